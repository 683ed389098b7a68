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
//! 3. A release takes no lock, does not wait and leaves `errno` alone. So a signal handler may make
//!    a release even if it interrupts a release or a wait of the same parker.

use crate::asymmetric::{Strategy, compiler_fence, heavy, light, strategy};
use crate::atomic::{AtomicU32, Ordering};
use crate::{Futex, hint, step, thread};

/// Limits the attempts before a thread parks.
///
/// The first attempts follow pauses that double. The last ones follow a `sched_yield`, for a holder
/// that was preempted. A model makes none, because it makes the same attempts after `heavy`.
#[derive(Clone, Copy, Debug)]
pub struct SpinLimit {
    /// The number of pauses before the first attempt.
    first_pauses: u32,
    /// The most pauses before an attempt.
    max_pauses: u32,
    /// The number of attempts after pauses.
    attempts: u32,
    /// The number of attempts after a `sched_yield`.
    yields: u32,
}

impl SpinLimit {
    /// About a microsecond. A guess.
    pub const SHORT: Self = Self { first_pauses: 0, max_pauses: 32, attempts: 7, yields: 4 };
    /// About 25 us where a pause takes 20 ns, with at most 5 us between two attempts.
    ///
    /// For that long, a thread that locks repeatedly keeps the value in its cache. Measured on a
    /// queue with one sender and one receiver: the shorter the limit, the more time went into
    /// moving the value between their caches.
    pub const LONG: Self = Self { first_pauses: 4, max_pauses: 256, attempts: 10, yields: 4 };
}

/// Set in `waiters` where `light` is a full fence, so that a release takes the slow path, which has
/// the fence. Elsewhere a compiler fence suffices, and the fast path need not ask for the strategy.
const FENCED: u32 = 1 << 31;

/// The waiters of one word. A release wakes one thread, and that thread wakes the next when it
/// releases the word.
#[derive(Debug)]
pub struct Parker {
    /// The number of waiters, and [`FENCED`].
    waiters: AtomicU32,
    /// Advances with every release that sees a waiter.
    sequence: Futex,
}

impl Parker {
    /// Creates a parker without waiters.
    #[allow(clippy::new_without_default, reason = "the facade's types have no such use")]
    pub fn new() -> Self {
        Self {
            waiters: AtomicU32::new(match strategy() {
                Strategy::Membarrier => 0,
                _ => FENCED,
            }),
            sequence: Futex::new(),
        }
    }

    /// Wakes one waiter, if there is one. The calling thread has just released the word.
    #[inline(always)]
    pub fn unpark_one(&self) {
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
    pub fn wait<R>(&self, limit: SpinLimit, mut attempt: impl FnMut() -> Option<R>) -> R {
        spin(limit, &mut attempt).unwrap_or_else(|| self.park(attempt))
    }

    /// Waits like [`wait`](Self::wait), but without attempts before the thread parks.
    pub fn park<R>(&self, mut attempt: impl FnMut() -> Option<R>) -> R {
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

/// Makes attempts up to `limit`. Returns `None` if all fail.
pub fn spin<R>(limit: SpinLimit, mut attempt: impl FnMut() -> Option<R>) -> Option<R> {
    if cfg!(offlock_model) {
        return None;
    }
    let mut pauses = limit.first_pauses;
    for round in 0..limit.attempts + limit.yields {
        if round < limit.attempts {
            (0..pauses).for_each(|_| hint::spin_loop());
            pauses = (pauses * 2).clamp(1, limit.max_pauses);
        } else {
            thread::yield_now();
        }
        if let Some(got) = attempt() {
            return Some(got);
        }
    }
    None
}
