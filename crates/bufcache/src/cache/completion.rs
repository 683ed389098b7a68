//! Writes, discards, zeroes and syncs of a device that are in flight, and the issuer that waits for
//! them.
//!
//! ```text
//!  issuer: Batch ──begin 0──► DeviceWrite ──► the device ── finish, or drop, in any thread ──┐
//!            ├─────begin 1──► DeviceWrite ──► ...                                            ▼
//!            └─ wait: stores a waker, left - 1 ◄─ wake, by the last ◄─ left - 1 ◄─ results[number]
//! ```
//!
//! # Invariants
//!
//! 1. A [`Batch`] outlives its completions: its issuer neither moves nor drops it before every
//!    operation has ended. `Batch::wait` sees that as `left == ISSUER`, `Batch::poll` as `OVER`.
//! 2. Each completion stores its result once, at the index of its operation. So each operation has
//!    its own result, in whatever order the operations end.
//! 3. `left` counts the issuer as one more operation until the issuer has stored its waker, and
//!    again while it replaces that. While the issuer counts, only the issuer accesses the waker.
//!    Otherwise only the operation that ends last does.

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::marker::PhantomPinned;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use offlock_sync::atomic::{AtomicI32, AtomicUsize, Ordering, fence};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{Arc, order, step, thread, thread_id};

use super::pool::Lane;
use crate::dirty::errno_of;
#[cfg(feature = "aio-reap")]
use crate::engine::InEngine;
use crate::source::Source;
use crate::wait::{block_on, contain, is_blocking, wake_all};

/// The most operations of a batch.
pub(super) const RUNS: usize = if cfg!(offlock_model) { 2 } else { 256 };
/// The result of an operation whose device has panicked.
const PANICKED: i32 = -1;
/// The flag of `State::left` that is set while the issuer counts as one more operation.
const ISSUER: usize = 1 << 31;
/// The value of `State::left` once all operations have ended and none of them accesses the batch
/// any more.
const OVER: usize = 1 << 30;

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
    /// The number of operations that have not ended, with `ISSUER` while the issuer counts; or
    /// `OVER`.
    left: AtomicUsize,
    waker: UnsafeCell<Option<Waker>>,
    /// For each operation an errno, `PANICKED`, or 0 for a success.
    results: [AtomicI32; RUNS],
}

// SAFETY: by invariant 3 one thread at a time accesses the waker, which is `Send`; all else is
// atomic.
unsafe impl Sync for State {}

impl<'s> Batch<'s> {
    /// Returns an empty batch of the future that calls this.
    pub(super) async fn new(source: &'s Arc<Source>) -> Self {
        let issuer = if is_blocking().await { thread_id() } else { 0 };
        let results = std::array::from_fn(|_| AtomicI32::new(0));
        let state = State { left: AtomicUsize::new(ISSUER), waker: UnsafeCell::new(None), results };
        Self { source, issuer, state, _pinned: PhantomPinned }
    }

    /// Adds an operation. `number` is the index of its result.
    ///
    /// # Safety
    ///
    /// The batch is neither moved nor forgotten until [`wait`](Self::wait) has returned.
    pub(super) unsafe fn begin(&self, number: usize) -> Completion {
        // Ordering: Relaxed; the issuer counts until it waits, so no operation is the last before
        // that.
        self.state.left.fetch_add(1, Ordering::Relaxed);
        let source = Arc::clone(self.source);
        let of = Some((source, NonNull::from(&self.state)));
        Completion { of, number, issuer: self.issuer }
    }

    /// Waits until all operations have ended.
    pub(super) async fn wait(&self) {
        let left = &self.state.left;
        // Ordering: Acquire pairs with the Release in `Completion::end`; it carries the results,
        // and what the device did with the bytes.
        if left.load(order!(Acquire, "wait: the results are stored before")) != ISSUER {
            poll_fn(|context| self.poll(context)).await;
        }
    }

    /// Returns ready once all operations have ended. Otherwise stores the waker of `context`, in
    /// place of that of an earlier call.
    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        let left = &self.state.left;
        // Ordering: Relaxed, here and in the exchange: the waker that is replaced is the issuer's
        // own store.
        let mut seen = left.load(Ordering::Relaxed);
        while seen & ISSUER == 0 && seen != OVER {
            let (new, relaxed) = (seen | ISSUER, Ordering::Relaxed);
            if seen == 0 {
                // The operation that ended last takes the waker, and stores `OVER` next.
                thread::yield_now();
                seen = left.load(relaxed);
            } else {
                match left.compare_exchange_weak(seen, new, relaxed, relaxed) {
                    Ok(_) => seen = new,
                    Err(now) => seen = now,
                }
            }
        }
        if seen & ISSUER != 0 {
            let waker = context.waker().clone();
            // SAFETY: by invariant 3; the issuer counts.
            self.state.waker.with_mut(|at| unsafe { *at = Some(waker) });
            // Ordering: AcqRel. The Release pairs with the Acquire fence of the operation that ends
            // last, in `Completion::end`; it carries the waker. The Acquire pairs with the Release
            // in `Completion::end`, as in `wait`.
            if left.fetch_sub(ISSUER, Ordering::AcqRel) == ISSUER {
                // Ordering: Relaxed; no operation is left, so only the issuer loads it.
                left.store(OVER, Ordering::Relaxed);
            }
        }
        // Ordering: Acquire pairs with the Release of `OVER` in `Completion::end`; it carries all
        // results. From then on the issuer may drop the batch.
        match left.load(order!(Acquire, "poll: the results are stored before")) {
            OVER => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Returns how an operation ended. The caller has waited for the batch.
    pub(super) fn result(&self, number: usize) -> Outcome {
        // Ordering: Relaxed; the Acquire in `wait` or `poll` carries the result.
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
        let left = &self.state.left;
        // Ordering: Acquire, as in `wait`. No model checks it, because a panic ends a model.
        if !matches!(left.load(Ordering::Acquire), ISSUER | OVER) {
            block_on(poll_fn(|context| self.poll(context)));
        }
    }
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

    /// Counts the operation as one in an engine of this thread until the returned value drops, which
    /// is before the operation ends.
    #[cfg(feature = "aio-reap")]
    pub(super) fn enter_engine(&self) -> InEngine {
        InEngine::new(self.source().map(Arc::clone))
    }

    pub(super) fn source(&self) -> Option<&Arc<Source>> {
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
        let result = contain(|| {
            loop {
                match method(source) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            }
        });
        match result {
            Ok(result) => self.finish(result),
            Err(_) => self.end(PANICKED),
        }
    }

    /// Ends the operation, unless it has ended. The batch may be gone when this returns.
    fn end(&mut self, result: i32) {
        let Some((source, batch)) = self.of.take() else { return };
        // Before the operation ends, while the issuer has a reference too. The drop of the device
        // may wait for this thread, so this reference must not be the last.
        drop(source);
        // SAFETY: by invariant 1; this operation has not ended.
        let batch = unsafe { batch.as_ref() };
        // Ordering: Relaxed; the Release of the decrement carries it.
        batch.results[self.number].store(result, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire fence below, of the operation that ends last,
        // and with the Acquire in `Batch::wait` and `Batch::poll`; it carries the result, and what
        // the device did with the bytes.
        let release = order!(Release, "completion: the result is stored");
        if batch.left.fetch_sub(1, release) != 1 {
            return;
        }
        // Ordering: Acquire pairs with the Release in `Batch::poll`, which carries the waker, and
        // with the Release of the operations that ended before, which carries their results.
        fence(Ordering::Acquire);
        // SAFETY: by invariant 3; this operation ended last.
        let waker = batch.waker.with_mut(|at| unsafe { (*at).take() });
        // Ordering: Release pairs with the Acquire in `Batch::poll`; it carries all results. The
        // batch may be gone after this.
        batch.left.store(OVER, order!(Release, "completion: all results are stored"));
        step!("completion: wake the issuer", wake_all(waker));
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() { PANICKED } else { libc::ECANCELED });
    }
}

// The owned completions of a device that begins writes, discards, zeroes and syncs.

/// The methods that the three have.
macro_rules! device_operation {
    ($type:ident) => {
        impl $type {
            /// Counts the operation as one in an engine of this thread until the returned value drops.
            #[cfg(feature = "aio-reap")]
            pub(crate) fn enter_engine(&self) -> InEngine {
                self.completion.enter_engine()
            }

            /// Returns whether a thread blocks until the operation ends. If not, a task has begun it: the
            /// device must not wait, and must not rely on a later wait of the calling thread.
            pub fn is_blocking(&self) -> bool {
                self.completion.is_waited_for()
            }
        }
    };
}

device_operation!(DeviceWrite);
device_operation!(DeviceRange);
device_operation!(DeviceSync);

/// A write of adjacent blocks: an offset on the device, and bytes that do not change before it
/// ends.
///
/// The device that [begins](crate::BlockDevice::begin_write) the write owns it and ends it once, in
/// any thread: by [`finish`](Self::finish), or by a drop, which fails it with `ECANCELED`. If it is
/// forgotten, the issuer waits for ever.
#[must_use = "a drop fails the write with `ECANCELED`: end it with `finish`"]
pub struct DeviceWrite {
    completion: Completion,
    offset: u64,
    parts: Parts,
    durable: bool,
}

/// The bytes of a [`DeviceWrite`], which neither change nor go before it ends.
struct Parts(NonNull<[IoSlice<'static>]>);

// SAFETY: the parts are read only, and live until the write ends, see `DeviceWrite::new`.
unsafe impl Send for Parts {}
// SAFETY: a shared reference only reads the parts, which no thread changes until the write ends.
unsafe impl Sync for Parts {}

impl Parts {
    /// Returns the parts. The write has not ended.
    fn get(&self) -> &[IoSlice<'_>] {
        // SAFETY: by the promise of `DeviceWrite::new` they live until the write ends.
        unsafe { self.0.as_ref() }
    }
}

impl DeviceWrite {
    /// # Safety
    ///
    /// The parts neither change nor go, and the batch is neither moved nor forgotten, before the
    /// batch has been [waited](Batch::wait) for.
    pub(super) unsafe fn new(
        batch: &Batch<'_>,
        number: usize,
        offset: u64,
        parts: &[IoSlice<'_>],
        durable: bool,
    ) -> Self {
        // SAFETY: the caller's promise.
        let completion = unsafe { batch.begin(number) };
        let parts = NonNull::slice_from_raw_parts(NonNull::from(parts).cast(), parts.len());
        Self { completion, offset, parts: Parts(parts), durable }
    }

    /// Returns the offset on the device in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the bytes, in parts that are adjacent on the device.
    pub fn parts(&self) -> &[IoSlice<'_>] {
        self.parts.get()
    }

    /// Returns whether the write must be durable when it ends (FUA).
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Calls the blocking [`write_vectored`](crate::BlockDevice::write_vectored) of the device, or
    /// the durable form, and ends the write: on the calling thread if a thread
    /// [blocks](Self::is_blocking) for it, otherwise on a thread of the cache.
    pub fn defer(self) {
        let Self { completion, offset, parts, durable } = self;
        completion.defer(move |source| match durable {
            true => source.device.write_vectored_durable(offset, parts.get()),
            false => source.device.write_vectored(offset, parts.get()),
        });
    }

    /// Ends the write. After an error any of its sectors may have been written. `Interrupted` is an
    /// error like any other: a device that wants to retry does so first.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceWrite")
            .field("offset", &self.offset)
            .field("parts", &self.parts().len())
            .field("durable", &self.durable)
            .finish_non_exhaustive()
    }
}

/// A discard or zeroing of a range, owned by the device that begins it. Ends as a [`DeviceWrite`]
/// does.
#[must_use = "a drop fails the operation with `ECANCELED`: end it with `finish`"]
pub struct DeviceRange {
    completion: Completion,
    offset: u64,
    len: u64,
    discards: bool,
}

impl DeviceRange {
    /// # Safety
    ///
    /// As for [`Batch::begin`].
    pub(super) unsafe fn new(batch: &Batch<'_>, (offset, len): (u64, u64), discards: bool) -> Self {
        // SAFETY: the caller's promise.
        Self { completion: unsafe { batch.begin(0) }, offset, len, discards }
    }

    /// Returns the offset on the device in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is not empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Calls the blocking [`discard`](crate::BlockDevice::discard) or
    /// [`zero`](crate::BlockDevice::zero) of the device, on a thread as [`DeviceWrite::defer`]
    /// says.
    pub fn defer(self) {
        let Self { completion, offset, len, discards } = self;
        completion.defer(move |source| match discards {
            true => source.device.discard(offset, len),
            false => source.device.zero(offset, len),
        });
    }

    /// Ends the operation; with `EOPNOTSUPP` if the device cannot do it and has changed nothing.
    /// `Interrupted` is an error like any other.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRange")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A sync, owned by the device that begins it. Ends as a [`DeviceWrite`] does.
#[must_use = "a drop fails the sync with `ECANCELED`: end it with `finish`"]
pub struct DeviceSync {
    completion: Completion,
}

impl DeviceSync {
    /// # Safety
    ///
    /// As for [`Batch::begin`].
    pub(super) unsafe fn new(batch: &Batch<'_>) -> Self {
        // SAFETY: the caller's promise.
        Self { completion: unsafe { batch.begin(0) } }
    }

    /// Calls the blocking [`sync`](crate::BlockDevice::sync) of the device, on a thread as
    /// [`DeviceWrite::defer`] says.
    pub fn defer(self) {
        self.completion.defer(|source| source.device.sync());
    }

    /// Ends the sync. After an error, writes that were not durable before may be lost. That holds
    /// for `Interrupted`, too: a device that wants to retry does so first.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSync").finish_non_exhaustive()
    }
}
