//! Changes of a device that are under way, and the thread that waits for them.
//!
//! ```text
//!  issuer: Batch ──begin 0──► DeviceWrite ──► the device ─── finish, or drop, in any thread ──┐
//!            ├────begin 1──► DeviceWrite ──► ...                                             ▼
//!            └─ wait: until none is left ◄── wake ◄── left - 1, by the last ◄── results[number]
//! ```
//!
//! # Invariants
//!
//! 1. A [`Batch`] outlives its completions: its issuer neither moves nor leaves it before none is left.
//! 2. Each completion stores its result once, at the place that its number names. So results are those of
//!    their operations, in whatever order these end.

use std::io;
use std::ptr::NonNull;

use percpu::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use percpu::sync::{Arc, order, panicking, step};

use crate::contain::contain;
use crate::source::Source;

/// Most operations of a batch. A guess: enough to keep a disk busy.
pub(super) const RUNS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 32 };
/// The result of an operation that has panicked.
const PANICKED: i32 = -1;
/// The issuer sleeps, or is about to.
const SLEEPS: usize = 1 << 31;

/// How an operation ended: with an errno, or with none where the device has panicked.
pub(super) type Outcome = Result<(), Option<i32>>;

/// Operations of a device whose results one thread waits for.
pub(super) struct Batch<'s> {
    source: &'s Arc<Source>,
    state: State,
}

struct State {
    /// How many have not ended, and `SLEEPS`.
    left: AtomicUsize,
    /// An errno, `PANICKED`, or 0.
    results: [AtomicI32; RUNS],
}

impl<'s> Batch<'s> {
    pub(super) fn new(source: &'s Arc<Source>) -> Self {
        let results = std::array::from_fn(|_| AtomicI32::new(0));
        Self { source, state: State { left: AtomicUsize::new(0), results } }
    }

    /// Adds an operation. `alone`: no other is added.
    ///
    /// # Safety
    ///
    /// The batch is neither moved nor forgotten until [`wait`](Self::wait) has returned.
    pub(super) unsafe fn begin(&self, number: usize, alone: bool) -> Completion {
        // Ordering: Relaxed; the issuer's own.
        self.state.left.fetch_add(1, Ordering::Relaxed);
        let source = Arc::clone(self.source);
        Completion { of: Some((source, NonNull::from(&self.state))), number, alone }
    }

    /// Waits until all operations have ended.
    pub(super) fn wait(&self) {
        let left = &self.state.left;
        // Ordering: Acquire, here and below, pairs with the Release in `Completion::end`; it carries the results,
        // and what the device did with the bytes.
        while left.load(Ordering::Acquire) & !SLEEPS > 0 {
            if crate::engine::wait_for_writes() {
                continue;
            }
            let seen = self.source.ended.load();
            if left.fetch_or(SLEEPS, Ordering::Acquire) & !SLEEPS > 0 {
                self.source.ended.wait(seen);
            }
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
        self.wait(); // also where the issuer unwinds
    }
}

/// The part of an operation that ends it.
pub(super) struct Completion {
    /// The device, and its issuer's. `None` once it has ended.
    of: Option<(Arc<Source>, NonNull<State>)>,
    number: usize,
    pub(super) alone: bool,
}

// SAFETY: the batch is shared by atomics, and outlives this (invariant 1 of this module).
unsafe impl Send for Completion {}
// SAFETY: `&self` reaches plain values only.
unsafe impl Sync for Completion {}

impl Completion {
    pub(super) fn finish(mut self, result: io::Result<()>) {
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        self.end(result.map_or_else(errno, |()| 0));
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
        let ended = Arc::clone(&source.ended);
        // The issuer keeps it until then: the device's drop, which may wait for this thread, is not this thread's.
        drop(source);
        // SAFETY: invariant 1 of this module: this operation has not ended.
        let batch = unsafe { batch.as_ref() };
        // Ordering: Relaxed; the decrement carries it.
        batch.results[self.number].store(result, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `wait`; it carries the result, and what the device did with
        // the bytes.
        let release = order!(Release, "completion: the result is stored");
        if batch.left.fetch_sub(1, release) == SLEEPS + 1 {
            ended.advance();
            step!("completion: wake the issuer", ended.wake_all());
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.end(if panicking() { PANICKED } else { libc::ECANCELED });
    }
}
