//! Changes of a device that are under way, and the issuer that waits for them.
//!
//! ```text
//!  issuer: Batch ──begin 0──► DeviceWrite ──► the device ─── finish, or drop, in any thread ──┐
//!            ├────begin 1──► DeviceWrite ──► ...                                             ▼
//!            └─ wait: leaves a waker, left - 1 ◄── wake ◄── left - 1, by the last ◄── results[number]
//! ```
//!
//! # Invariants
//!
//! 1. A [`Batch`] outlives its completions: its issuer neither moves nor leaves it before it is `OVER`.
//! 2. Each completion stores its result once, at the place that its number names. So results are those of
//!    their operations, in whatever order these end.
//! 3. The issuer counts as one more operation until it has left its waker, and again while it replaces that. The waker
//!    belongs to the issuer meanwhile, and otherwise to the operation that ends last.

use std::future::poll_fn;
use std::io;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use percpu::sync::atomic::{AtomicI32, AtomicUsize, Ordering, fence};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{Arc, order, panicking, step, thread, thread_id};

use crate::contain::contain;
use crate::dirty::errno_of;
use crate::engine::wait_for_writes;
use crate::source::Source;
use crate::wait::{Mode, wake_all};

/// Most operations of a batch.
pub(super) const RUNS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 256 };
/// The result of an operation that has panicked.
const PANICKED: i32 = -1;
/// The issuer counts.
const ISSUER: usize = 1 << 31;
/// All operations have ended, and the one that ended last has taken the waker.
const OVER: usize = 1 << 30;

/// How an operation ended: with an errno, or with none where the device has panicked.
pub(super) type Outcome = Result<(), Option<i32>>;

/// Operations of a device whose results one issuer waits for.
pub(super) struct Batch<'s> {
    source: &'s Arc<Source>,
    mode: Mode,
    state: State,
}

struct State {
    /// How many have not ended, and the issuer; or `OVER`.
    left: AtomicUsize,
    waker: UnsafeCell<Option<Waker>>,
    /// An errno, `PANICKED`, or 0.
    results: [AtomicI32; RUNS],
}

// SAFETY: invariant 3 of this module says which thread has the waker; all else is atomic.
unsafe impl Sync for State {}

impl<'s> Batch<'s> {
    pub(super) fn new(source: &'s Arc<Source>, mode: Mode) -> Self {
        let results = std::array::from_fn(|_| AtomicI32::new(0));
        let state = State { left: AtomicUsize::new(ISSUER), waker: UnsafeCell::new(None), results };
        Self { source, mode, state }
    }

    /// Adds an operation. `alone`: no other is added.
    ///
    /// # Safety
    ///
    /// The batch is neither moved nor forgotten until [`wait`](Self::wait) has returned.
    pub(super) unsafe fn begin(&self, number: usize, alone: bool) -> Completion {
        // Ordering: Relaxed; the issuer counts, so no operation is the last.
        self.state.left.fetch_add(1, Ordering::Relaxed);
        let source = Arc::clone(self.source);
        let issuer = if self.mode == Mode::Thread { thread_id() } else { 0 };
        Completion { of: Some((source, NonNull::from(&self.state))), number, alone, issuer }
    }

    /// Waits until all operations have ended.
    pub(super) async fn wait(&self) {
        if self.mode == Mode::Thread {
            self.block();
        } else {
            poll_fn(|context| self.poll(context)).await;
        }
    }

    fn block(&self) {
        let left = &self.state.left;
        // Ordering: Acquire pairs with the Release in `Completion::end`; it carries the results, and what the device
        // did with the bytes.
        while left.load(order!(Acquire, "block: the results are stored before")) != ISSUER {
            if !wait_for_writes() {
                return self.source.bell.sleep_until(|context| self.poll(context));
            }
        }
    }

    /// Whether all operations have ended. Leaves the waker, and takes back that of the call before: a thread that waited
    /// by its engine may have to sleep by the bell.
    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        let left = &self.state.left;
        // Ordering: Relaxed, here and in the exchange: the waker that is taken back is the issuer's own store.
        let mut seen = left.load(Ordering::Relaxed);
        while seen & ISSUER == 0 && seen != OVER {
            let (new, relaxed) = (seen | ISSUER, Ordering::Relaxed);
            if seen == 0 {
                // The operation that ended last has the waker, and stores `OVER` next.
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
            // SAFETY: invariant 3 of this module: the issuer counts still.
            self.state.waker.with_mut(|at| unsafe { *at = Some(waker) });
            // Ordering: AcqRel. Release pairs with the Acquire of the operation that ends last; it carries the waker.
            // Acquire pairs with the Release in `Completion::end`, as above.
            if left.fetch_sub(ISSUER, Ordering::AcqRel) == ISSUER {
                // Ordering: Relaxed; the issuer's own, as no operation is left.
                left.store(OVER, Ordering::Relaxed);
            }
        }
        // Ordering: Acquire pairs with the Release in `Completion::end`, as above, and behind that the issuer may let
        // the batch go.
        match left.load(order!(Acquire, "poll: the results are stored before")) {
            OVER => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// How an operation ended, once all have.
    pub(super) fn result(&self, number: usize) -> Outcome {
        // Ordering: Relaxed; `wait` has carried it.
        match self.state.results[number].load(Ordering::Relaxed) {
            0 => Ok(()),
            PANICKED => Err(None),
            errno => Err(Some(errno)),
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // Where the issuer unwinds before it has waited.
        let left = &self.state.left;
        // Ordering: Acquire, as in `block`. No model checks it, because a panic ends a model.
        if !matches!(left.load(Ordering::Acquire), ISSUER | OVER) {
            self.block();
        }
    }
}

/// The part of an operation that ends it.
pub(super) struct Completion {
    /// The device, and its issuer's. `None` once it has ended.
    of: Option<(Arc<Source>, NonNull<State>)>,
    number: usize,
    pub(super) alone: bool,
    /// The thread that blocks until the operation ends; 0: none does.
    issuer: u64,
}

// SAFETY: the batch is shared by atomics, and outlives this (invariant 1 of this module).
unsafe impl Send for Completion {}
// SAFETY: `&self` reaches plain values only.
unsafe impl Sync for Completion {}

impl Completion {
    pub(super) fn finish(mut self, result: io::Result<()>) {
        self.end(result.map_or_else(|error| errno_of(&error), |()| 0));
    }

    /// Whether a thread waits for the operation, which may as well make it.
    pub(super) fn is_waited_for(&self) -> bool {
        self.issuer != 0
    }

    pub(super) fn source(&self) -> Option<&Arc<Source>> {
        self.of.as_ref().map(|(source, _)| source)
    }

    /// Calls a blocking method of the device until no signal interrupts it, and ends with its result.
    pub(super) fn call(mut self, mut method: impl FnMut(&Source) -> io::Result<()>) {
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

    /// Ends the operation, unless it has. The batch may be gone when this returns.
    fn end(&mut self, result: i32) {
        let Some((source, batch)) = self.of.take() else { return };
        // The issuer keeps it until then: the device's drop, which may wait for this thread, is not this thread's.
        drop(source);
        // SAFETY: invariant 1 of this module: this operation has not ended.
        let batch = unsafe { batch.as_ref() };
        // Ordering: Relaxed; the decrement carries it.
        batch.results[self.number].store(result, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire of the last of these, and in `Batch::block` and `Batch::poll`; it
        // carries the result, and what the device did with the bytes.
        let release = order!(Release, "completion: the result is stored");
        if batch.left.fetch_sub(1, release) != 1 {
            return;
        }
        // Ordering: Acquire pairs with the Release in `Batch::poll`, which carries the waker, and with that of the
        // operations which ended before.
        fence(Ordering::Acquire);
        // SAFETY: invariant 3 of this module: this operation ended last.
        let waker = batch.waker.with_mut(|at| unsafe { (*at).take() });
        // Ordering: Release pairs with the Acquire in `Batch::poll`; the batch may be gone behind this.
        batch.left.store(OVER, order!(Release, "completion: all results are stored"));
        step!("completion: wake the issuer", wake_all(waker));
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.end(if panicking() { PANICKED } else { libc::ECANCELED });
    }
}
