//! Parks threads until a word is released; a release costs one load while no thread waits.
//!
//! ```text
//!   releaser                            waiter
//!   word = 0            (Release)       waiters += 1
//!   light()                             heavy()
//!   waiters != 0?                       loop: seen = sequence            (Acquire)
//!     sequence += 1     (Release)             word == 0? waiters -= 1, done
//!     wake                                    sleep while sequence == seen
//! ```
//!
//! # Invariants
//!
//! 1. No wake-up is lost. If the releaser's `light` is before the waiter's `heavy`, the waiter's
//!    checks see the released word. Otherwise the releaser sees the waiter and advances `sequence`.
//!    A waiter that loaded `sequence` before that is woken or does not fall asleep; a waiter that
//!    loads it later sees the released word after it.
//! 2. `waiters` counts a waiter from before its first check after `heavy` until it has what it
//!    waits for, so one `heavy` covers all its checks.

use crate::asymmetric::{compiler_fence, has_membarrier, heavy, light};
use crate::atomic::{AtomicU32, Ordering};
use crate::{Futex, hint, step, thread};

// Before a thread parks it makes attempts for about 25 us where a pause takes 20 ns, with at most 5 us
// between two. The first ones follow pauses that double, the last ones a `sched_yield`, for a holder that
// was preempted. For that long, a thread that locks repeatedly keeps the value in its cache. Measured on a
// queue with one sender and one receiver: the shorter the limit, the more time went into moving the value
// between their caches.
const FIRST_PAUSES: u32 = 4;
const MAX_PAUSES: u32 = 256;
const ATTEMPTS: u32 = 10;
const YIELDS: u32 = 4;

/// Set in `waiters` where `light` is a full fence, so that a release takes the slow path, which has
/// the fence. Elsewhere a compiler fence suffices, and the fast path need not ask.
const FENCED: u32 = 1 << 31;

/// The waiters of one word. A release wakes one thread, and that thread wakes the next when it
/// releases the word.
#[derive(Debug)]
pub(crate) struct Parker {
    /// The number of waiters, and [`FENCED`].
    waiters: AtomicU32,
    /// Advances with every release that sees a waiter.
    sequence: Futex,
}

impl Parker {
    /// Creates a parker without waiters.
    pub(crate) fn new() -> Self {
        Self {
            waiters: AtomicU32::new(if has_membarrier() { 0 } else { FENCED }),
            sequence: Futex::new(),
        }
    }

    /// Wakes one waiter, if there is one. The calling thread has just released the word.
    #[inline(always)]
    pub(crate) fn unpark_one(&self) {
        // All that `light` does where `FENCED` is not set (invariant 1).
        step!("unpark: before the look at the waiters", compiler_fence());
        // Ordering: Relaxed; the fences order it, and no other memory is read because of it.
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.unpark_one_slow();
        }
    }

    #[cold]
    #[inline(never)]
    fn unpark_one_slow(&self) {
        // Pairs with the `heavy` in `park` (invariant 1).
        light();
        // Ordering: Relaxed; `light` orders it, and no other memory is read because of it.
        if self.waiters.load(Ordering::Relaxed) & !FENCED != 0 {
            self.notify();
        }
    }

    fn notify(&self) {
        step!("unpark: change the sequence", self.sequence.advance());
        step!("unpark: wake a waiter", self.sequence.wake_one());
    }

    /// Waits until `attempt` returns a value.
    ///
    /// `attempt` must be short, and must succeed once the word that it found taken is released.
    pub(crate) fn wait<R>(&self, mut attempt: impl FnMut() -> Option<R>) -> R {
        spin(&mut attempt).unwrap_or_else(|| self.park(attempt))
    }

    /// Waits like [`wait`](Self::wait), but without attempts before the thread parks.
    fn park<R>(&self, mut attempt: impl FnMut() -> Option<R>) -> R {
        // Ordering: Relaxed; `heavy` orders it before the attempts, for `unpark_one`.
        self.waiters.fetch_add(1, Ordering::Relaxed);
        step!("park: before the attempt", heavy()); // against `light` of `unpark_one` (invariant 1)
        let got = loop {
            let seen = self.sequence.load();
            if let Some(got) = attempt() {
                break got;
            }
            self.sequence.wait(seen);
        };
        // Ordering: Relaxed; a release that still counts this waiter makes a needless wake-up.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        got
    }
}

/// Makes attempts. Returns `None` if all fail. A model makes none: it makes the same ones after `heavy`.
fn spin<R>(mut attempt: impl FnMut() -> Option<R>) -> Option<R> {
    if cfg!(offlock_model) {
        return None;
    }
    let mut pauses = FIRST_PAUSES;
    for round in 0..ATTEMPTS + YIELDS {
        if round < ATTEMPTS {
            (0..pauses).for_each(|_| hint::spin_loop());
            pauses = (pauses * 2).min(MAX_PAUSES);
        } else {
            thread::yield_now();
        }
        if let Some(got) = attempt() {
            return Some(got);
        }
    }
    None
}
