//! Writes, discards, zeroes and syncs of a device that are in flight, and the issuer that waits for
//! them.
//!
//! ```text
//!  issuer: Batch ──begin 0──► DeviceChange ─► the device ── finish, or drop, in any thread ──┐
//!            ├─────begin 1──► DeviceChange ─► ...                                            ▼
//!            └─ wait: lists its waker, left == 0? ◄── wake, by the last ◄── left - 1 ◄── results[number]
//! ```
//!
//! # Invariants
//!
//! 1. A [`Batch`] outlives its completions: its issuer neither moves nor drops it before `left` is 0. The
//!    operation that ends last accesses nothing of the batch after it has lowered `left`: the waker of the
//!    issuer is in the cache.
//! 2. Each completion stores its result once, at the index of its operation. So each operation has
//!    its own result, in whatever order the operations end.

use std::fmt;
use std::io::{self, IoSlice};
use std::marker::PhantomPinned;
use std::mem::{self, MaybeUninit};
use std::ptr::NonNull;

use offlock_sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use offlock_sync::{Arc, order, step, thread_id};

use super::pool::Lane;
use crate::device::retry_interrupted;
use crate::dirty::errno_of;
#[cfg(feature = "aio-reap")]
use crate::engine::InEngine;
use crate::source::Source;
use crate::wait::{block_on, contain, is_blocking};

/// The most operations of a batch.
pub(super) const RUNS: usize = if cfg!(offlock_model) { 2 } else { 256 };
/// The result of an operation whose device has panicked.
const PANICKED: i32 = -1;

/// How an operation ended. The error is an errno, or `None` if the device has panicked.
pub(super) type Outcome = Result<(), Option<i32>>;

/// Operations of a device that one issuer begins and waits for.
pub(super) struct Batch<'s> {
    source: &'s Arc<Source>,
    /// The thread that blocks until the operations end; 0 if a task waits.
    issuer: u64,
    state: State,
    /// Operations point to the state, also while the issuer has `&mut` of the batch.
    _pinned: PhantomPinned,
}

struct State {
    /// The number of operations that have not ended.
    left: AtomicUsize,
    /// For each operation an errno, `PANICKED`, or 0 for a success.
    results: [AtomicI32; RUNS],
}

impl<'s> Batch<'s> {
    /// Returns an empty batch of the future that calls this.
    pub(super) async fn new(source: &'s Arc<Source>) -> Self {
        let issuer = if is_blocking().await { thread_id() } else { 0 };
        let results = std::array::from_fn(|_| AtomicI32::new(0));
        let state = State { left: AtomicUsize::new(0), results };
        Self { source, issuer, state, _pinned: PhantomPinned }
    }

    /// Adds an operation. `number` is the index of its result.
    ///
    /// # Safety
    ///
    /// The batch is neither moved nor forgotten until [`wait`](Self::wait) has returned.
    pub(super) unsafe fn begin(&self, number: usize) -> Completion {
        // Ordering: Relaxed; the count matters only once the issuer waits, which begins no more then.
        self.state.left.fetch_add(1, Ordering::Relaxed);
        let source = Arc::clone(self.source);
        let of = Some((source, NonNull::from(&self.state)));
        Completion { of, number, issuer: self.issuer }
    }

    /// Waits until all operations have ended.
    pub(super) async fn wait(&self) {
        if self.look().is_none() {
            let key = key_of(NonNull::from(&self.state));
            self.source.cache.waiting.wait(key, None, || self.look()).await;
        }
    }

    /// Returns whether all operations that have begun have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.look().is_some()
    }

    /// Returns a value once all operations have ended.
    fn look(&self) -> Option<()> {
        // Ordering: Acquire pairs with the Release in `Completion::end`; it carries the results, and
        // what the device did with the bytes.
        let left = self.state.left.load(order!(Acquire, "wait: the results are stored before"));
        (left == 0).then_some(())
    }

    /// Returns how an operation ended. The caller has waited for the batch.
    pub(super) fn result(&self, number: usize) -> Outcome {
        // Ordering: Relaxed; the Acquire in `wait` carries the result.
        match self.state.results[number].load(Ordering::Relaxed) {
            0 => Ok(()),
            PANICKED => Err(None),
            errno => Err(Some(errno)),
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // The issuer may unwind before it has waited.
        if self.look().is_none() {
            block_on(self.wait());
        }
    }
}

/// Makes a change of the device, and waits for its end.
pub(super) async fn make(source: &Arc<Source>, change: Change<'_>) -> Outcome {
    let batch = Batch::new(source).await;
    // SAFETY: the batch is waited for below, before it or the parts of a write go.
    let change = unsafe { DeviceChange::new(&batch, 0, change) };
    // If the device panics, the change is dropped, which ends it.
    let _ = contain(|| source.device.begin(change));
    batch.wait().await;
    batch.result(0)
}

/// Returns the key of the wait for a batch. In a model all have one, because an address may differ from run to
/// run.
fn key_of(state: NonNull<State>) -> u64 {
    if cfg!(offlock_model) { u64::MAX } else { state.addr().get() as u64 }
}

/// Ends one operation of a batch, at the latest when it is dropped.
pub(super) struct Completion {
    /// The device, and the state of the batch. `None` once the operation has ended.
    of: Option<(Arc<Source>, NonNull<State>)>,
    number: usize,
    /// The thread that blocks until the operation ends; 0 if a task waits.
    issuer: u64,
}

// SAFETY: the state is `Sync` and outlives the completion (invariant 1); the `Arc<Source>` is
// `Send`.
unsafe impl Send for Completion {}
// SAFETY: `&self` gives access to plain values and to the `Arc<Source>`, which is `Sync`. It never
// follows the pointer to the state.
unsafe impl Sync for Completion {}

impl Completion {
    pub(super) fn finish(mut self, result: io::Result<()>) {
        self.end(result.map_or_else(|error| errno_of(&error), |()| 0));
    }

    /// Returns whether a thread, not a task, waits for the operation. Then the device may block the
    /// thread that begins the operation.
    pub(super) fn is_waited_for(&self) -> bool {
        self.issuer != 0
    }

    fn source(&self) -> Option<&Arc<Source>> {
        self.of.as_ref().map(|(source, _)| source)
    }

    /// [Calls](Self::call) a blocking method of the device: on this thread if a thread blocks for the
    /// operation, and otherwise on a thread of the cache.
    fn defer(self, method: impl FnMut(&Source) -> io::Result<()> + Send + 'static) {
        if self.is_waited_for() {
            return self.call(method);
        }
        let Some(source) = self.source().map(Arc::clone) else { return };
        source.cache.call_blocking(source.id, Lane::Device, move || self.call(method));
    }

    /// Calls a blocking method of the device, again while a signal interrupts it, and ends the
    /// operation with its result.
    fn call(mut self, mut method: impl FnMut(&Source) -> io::Result<()>) {
        let Some((source, _)) = &self.of else { return };
        let result = contain(|| retry_interrupted(|| method(source)));
        match result {
            Ok(result) => self.finish(result),
            Err(_) => self.end(PANICKED),
        }
    }

    /// Ends the operation, unless it has ended. The batch may be gone when this returns. Keeps a reference
    /// to the cache, not to the device, past the end, because the cache has the waker of the issuer.
    /// Taking the waker out may allocate.
    fn end(&mut self, result: i32) {
        let Some((source, batch)) = self.of.take() else { return };
        let cache = Arc::clone(&source.cache);
        // Before the operation ends, while the issuer has a reference too. The drop of the device
        // may wait for this thread, so this reference must not be the last.
        drop(source);
        let key = key_of(batch);
        // SAFETY: by invariant 1; this operation has not ended.
        let state = unsafe { batch.as_ref() };
        // Ordering: Relaxed; the Release of the decrement carries it.
        state.results[self.number].store(result, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `Batch::wait`; it carries the result, and what the
        // device did with the bytes. The batch may be gone after this.
        let release = order!(Release, "completion: the result is stored");
        if state.left.fetch_sub(1, release) == 1 {
            step!("completion: wake the issuer", cache.waiting.wake_at(key));
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() { PANICKED } else { libc::ECANCELED });
    }
}

// The owned completion of a device that begins changes.

/// A change of a device that has begun: a write, a discard, a zeroing or a sync.
///
/// The device that [begins](crate::BlockDevice::begin) the change owns it and ends it once, in any thread: by
/// [`finish`](Self::finish), or by a drop, which fails it with `ECANCELED`. If it is forgotten, the issuer
/// waits for ever.
#[must_use = "a drop fails the change with `ECANCELED`: end it with `finish`"]
pub struct DeviceChange {
    completion: Completion,
    /// The parts of a write live until it ends. A function that owns the change may return later, so it must
    /// have no reference to them.
    change: MaybeUninit<Change<'static>>,
}

/// What a [`DeviceChange`] does. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum Change<'c> {
    /// Writes parts that are adjacent on the device.
    Write {
        /// The offset of the first part.
        offset: u64,
        /// The bytes, which do not change before the write ends.
        parts: &'c [IoSlice<'c>],
        /// The write must be durable when it ends (FUA).
        durable: bool,
    },
    /// [Discards](crate::BlockDevice::discard) a range.
    Discard {
        /// The offset of the range.
        offset: u64,
        /// The length of the range.
        len: u64,
    },
    /// [Zeroes](crate::BlockDevice::zero) a range.
    Zero {
        /// The offset of the range.
        offset: u64,
        /// The length of the range.
        len: u64,
    },
    /// [Syncs](crate::BlockDevice::sync) the device. After an error, also `Interrupted`, writes that were not
    /// durable before may be lost.
    Sync,
}

impl DeviceChange {
    /// Adds a change to a batch. `number` is the index of its result.
    ///
    /// # Safety
    ///
    /// The parts of a write neither change nor go, and the batch is neither moved nor forgotten, before the
    /// batch has been [waited](Batch::wait) for.
    pub(super) unsafe fn new(batch: &Batch<'_>, number: usize, change: Change<'_>) -> Self {
        // SAFETY: the caller's promise.
        let completion = unsafe { batch.begin(number) };
        // SAFETY: only the lifetime of the parts changes. By the caller's promise they live until the change
        // ends, and `change` lends them for no longer.
        let change = unsafe { mem::transmute::<Change<'_>, Change<'static>>(change) };
        let change = MaybeUninit::new(change);
        Self { completion, change }
    }

    /// Returns what the change does.
    pub fn change(&self) -> Change<'_> {
        // SAFETY: initialised in `new`, and the change has not ended.
        unsafe { self.change.assume_init() }
    }

    /// Returns whether a thread blocks until the operation ends. If not, a task has begun it: the
    /// device must not wait, and must not rely on a later wait of the calling thread.
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Calls the blocking method of the device, and then ends the change: on the calling thread if a thread
    /// [blocks](Self::is_blocking) for it, otherwise on a thread of the cache.
    pub fn defer(self) {
        let Self { completion, change } = self;
        completion.defer(move |source| {
            let device = &source.device;
            // SAFETY: initialised in `new`, and the change has not ended.
            match unsafe { change.assume_init() } {
                Change::Write { offset, parts, durable } => {
                    device.write_vectored(offset, parts, durable)
                }
                Change::Discard { offset, len } => device.discard(offset, len),
                Change::Zero { offset, len } => device.zero(offset, len),
                Change::Sync => device.sync(),
            }
        });
    }

    /// Ends the change. After an error any of its sectors may have changed, unless it is `EOPNOTSUPP` of a
    /// discard or zero. `Interrupted` is an error like any other: a device that wants to retry does so first.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }

    /// Counts the change as one in an engine of this thread until the returned value drops, which is before
    /// the change ends.
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        InEngine::new(self.completion.source().map(Arc::clone))
    }
}

impl fmt::Debug for DeviceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (offset, parts, durable) = match self.change() {
            Change::Write { offset, parts, durable } => (offset, parts, durable),
            other => return f.debug_tuple("DeviceChange").field(&other).finish(),
        };
        let len: usize = parts.iter().map(|part| part.len()).sum(); // in place of the bytes
        write!(f, "DeviceChange(Write {{ offset: {offset}, len: {len}, durable: {durable} }})")
    }
}
