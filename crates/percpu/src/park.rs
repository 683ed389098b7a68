//! Waiting until a word changes, at no price for whoever changes it while nobody waits.
//!
//! ```text
//!   releaser                            waiter
//!   word = 0            (Release)       waiters += 1
//!   light()                             heavy()
//!   waiters != 0?                       loop: seen = changed             (Acquire)
//!     sequence += 1      (Release)             word == 0? waiters -= 1, done
//!     wake                                    sleep while sequence == seen
//! ```
//!
//! # Invariants
//!
//! 1. No wake-up is lost. Either the releaser's `light` is before the waiter's `heavy`, and the
//!    waiter's checks see the released word; or it is after it, and the releaser sees the waiter and
//!    changes `sequence`. A waiter that looked at that before is woken, or does not fall asleep; one
//!    that looks at it later sees the released word behind it.
//! 2. `waiters` counts a waiter from before its first check behind `heavy` until it has what it
//!    waits for: one `heavy` covers all its checks.
//! 3. A release takes no lock, waits for nobody and leaves `errno` alone: a signal handler may make
//!    one, whatever it interrupts, be it a release or a wait of the same parker.

use crate::fence::{Strategy, compiler_fence, heavy, light, strategy};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Futex, hint, mutant, thread};

/// Attempts before parking: some with a pause before them that doubles, then some with a
/// `sched_yield`, for a holder that was preempted. None in a model, which has the same attempts
/// behind `heavy`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinLimit {
    /// Pauses before the first attempt.
    first_pauses: u32,
    /// Most pauses before an attempt.
    max_pauses: u32,
    attempts: u32,
    yields: u32,
}

impl SpinLimit {
    /// About a microsecond; a guess.
    pub(crate) const SHORT: Self = Self { first_pauses: 0, max_pauses: 32, attempts: 7, yields: 4 };
    /// About 25 us where a pause takes 20 ns, of which 5 us at most pass between two attempts: so long
    /// threads that use what is locked again and again keep it in their caches. Measured on a queue
    /// with one sender and one receiver: the shorter, the more of their time it went to and fro.
    pub(crate) const LONG: Self =
        Self { first_pauses: 4, max_pauses: 256, attempts: 10, yields: 4 };
}

/// Part of `waiters` where `light` is a full fence: the release then goes where one is. Elsewhere
/// it asks nothing about fences.
const FENCED: u32 = 1 << 31;

/// Where threads wait for one word. A release wakes one: each thread that gets the word wakes the next.
#[derive(Debug)]
pub(crate) struct Parker {
    waiters: AtomicU32,
    /// Advances with every release that sees a waiter.
    sequence: Futex,
}

impl Parker {
    pub(crate) fn new() -> Self {
        Self {
            waiters: AtomicU32::new(match strategy() {
                Strategy::Membarrier => 0,
                _ => FENCED,
            }),
            sequence: Futex::new(),
        }
    }

    /// Wakes who waits for the word that the caller has just released.
    #[inline(always)]
    pub(crate) fn unpark_one(&self) {
        compiler_fence(); // all that `light` is where `FENCED` is not set: invariant 1
        // Ordering: Relaxed; the fences order it, and a number is the whole message.
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.unpark_one_slow();
        }
    }

    #[cold]
    #[inline(never)]
    fn unpark_one_slow(&self) {
        // Pairs with the `heavy` in `wait`: invariant 1.
        light();
        // Ordering: Relaxed; as in `unpark_one`.
        if self.waiters.load(Ordering::Relaxed) & !FENCED != 0 {
            self.notify();
        }
    }

    fn notify(&self) {
        if mutant("lglock-unlock-ignores-waiters") {
            return;
        }
        if !mutant("lglock-unlock-changes-nothing") {
            self.sequence.advance();
        }
        self.sequence.wake_one();
    }

    /// Waits until `attempt` returns a value.
    ///
    /// `attempt` must succeed once a word is released that it found taken, and take no time.
    pub(crate) fn wait<R>(&self, limit: SpinLimit, mut attempt: impl FnMut() -> Option<R>) -> R {
        spin(limit, &mut attempt).unwrap_or_else(|| self.park(attempt))
    }

    /// The same, without attempts before it parks: for who made them.
    pub(crate) fn park<R>(&self, mut attempt: impl FnMut() -> Option<R>) -> R {
        // Ordering: Relaxed; `heavy` orders it before the attempts, for `unpark_one`.
        self.waiters.fetch_add(1, Ordering::Relaxed);
        if !mutant("lglock-waiter-skips-heavy") {
            heavy(); // pairs with the `light` in `unpark_one`: invariant 1
        }
        let mut skip = mutant("lglock-waiter-skips-the-check");
        let got = loop {
            let seen = self.sequence.load();
            if !std::mem::take(&mut skip) {
                if let Some(got) = attempt() {
                    break got;
                }
            }
            let late = mutant("lglock-waiter-looks-too-late");
            let seen = if late { self.sequence.load() } else { seen };
            self.sequence.wait(seen);
        };
        // Ordering: Relaxed; a release that still counts us wakes for nothing.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        got
    }
}

/// Makes some attempts, for some microseconds.
pub(crate) fn spin<R>(limit: SpinLimit, mut attempt: impl FnMut() -> Option<R>) -> Option<R> {
    if cfg!(any(offlock_loom, offlock_shuttle)) {
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
