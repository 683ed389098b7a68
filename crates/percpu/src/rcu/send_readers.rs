//! Readers that may change threads: counted per CPU instead of listed.
//!
//! A guard that lives across an `.await` begins on one thread and ends on another, so its begin and
//! its end go to two counters, each to that of the CPU it happens on:
//!
//! ```text
//!              cpu 0          cpu 1
//!  lock[p]     7              4         sum 11
//!  unlock[p]   2              8         sum 10      one reader of parity p is inside
//! ```
//!
//! The sums are taken CPU by CPU while readers come and go, so the order matters: **unlocks first,
//! then locks**. Every unlock counted has its lock counted, since the reader made both in that order
//! (Release, Acquire); so the sums are equal only if every lock counted has its unlock counted. The
//! readers in question locked before the turn's `heavy`, so their locks are counted. One counter that
//! goes up and down, or locks summed first, misses a lock on a CPU it has passed and then sees that
//! reader's, or another's, unlock on one it has not.
//!
//! Under a stream of new readers the sums might never be equal. So there are two *parities*: new
//! readers go to one of them, the other one drains, and each time it has, the two change places. A
//! grace period ends when each parity was seen empty after the grace period's `heavy`, at whatever
//! time: two changes of places at most. (A reader that chose its parity and then slept before it
//! counted itself is counted in the old one: it delays the next drain, and is not overlooked.)
//!
//! # Invariants
//!
//! 1. All `lock` and `unlock` sums wrap at 2^64, and there are never 2^64 guards.
//! 2. The words are changed by rseq sections only, or by atomics only, for the life of the process
//!    (`section::available`). A thread that has no rseq id counts in `remote`, by atomics.

use std::ptr;

use crossbeam_utils::CachePadded;

use super::const_fn::const_fn;
use crate::error::AllocError;
use crate::fence;
use crate::rseq::section;
use crate::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{cpu, mutant};
use crate::words::Words;

/// The counters of all `Send` readers.
#[derive(Debug)]
pub(super) struct SendReaders {
    /// Which parity new readers count in: 0 or 1.
    parity: CachePadded<AtomicUsize>,
    /// Null until the first `Send` reader: all counters read 0.
    counters: AtomicPtr<Counters>,
    remote: [RemoteCounters; 2],
    /// The gate of the sections, which nobody closes.
    gate: AtomicU64,
}

/// One parity's counters.
#[derive(Debug)]
struct Counters {
    lock: [Words; 2],
    unlock: [Words; 2],
}

#[derive(Debug)]
struct RemoteCounters {
    lock: AtomicU64,
    unlock: AtomicU64,
}

impl RemoteCounters {
    const_fn! {
        const fn new() -> Self {
            Self { lock: AtomicU64::new(0), unlock: AtomicU64::new(0) }
        }
    }
}

impl SendReaders {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                parity: CachePadded::new(AtomicUsize::new(0)),
                counters: AtomicPtr::new(ptr::null_mut()),
                remote: [RemoteCounters::new(), RemoteCounters::new()],
                gate: AtomicU64::new(0),
            }
        }
    }

    #[inline(always)]
    fn counters(&self) -> Option<&'static Counters> {
        // Ordering: Acquire pairs with the Release in `allocate_counters`; it carries the counters.
        let counters = self.counters.load(Ordering::Acquire);
        // SAFETY: null, or leaked by `allocate_counters`.
        unsafe { counters.as_ref() }
    }

    #[cold]
    #[inline(never)]
    fn allocate_counters(&self) -> Option<&'static Counters> {
        // The strategy is chosen before the first reader, so that its `light` costs nothing.
        let _ = fence::strategy();
        let pair = || Ok::<_, AllocError>([Words::new()?, Words::new()?]);
        let counters = Counters { lock: pair().ok()?, unlock: pair().ok()? };
        let new = Box::into_raw(crate::alloc::try_box(counters).ok()?);
        // Ordering: Release on success pairs with the Acquire in `counters`; it carries them.
        // Acquire on failure: those of the thread that was first.
        let first = self.counters.compare_exchange(
            ptr::null_mut(),
            new,
            Ordering::Release,
            Ordering::Acquire,
        );
        if first.is_err() {
            // SAFETY: from `into_raw` above, and not published.
            drop(unsafe { Box::from_raw(new) });
        }
        self.counters()
    }

    /// Moves `drained` to `now` for each parity that has no reader from before, and returns how far
    /// both are. The caller has the turn, and ran `heavy` since the bump to `now`.
    pub(super) fn scan(&self, now: u64, drained: &mut [u64; 2]) -> u64 {
        // Ordering: Relaxed, both; changed by holders of the turn only, and for readers a hint.
        let active = self.parity.load(Ordering::Relaxed);
        for (parity, drained) in drained.iter_mut().enumerate() {
            let trusted = mutant("rcu-send-trusts-inactive") && parity != active;
            if trusted || self.is_drained(parity) {
                *drained = now;
            }
        }
        if drained[active] < now && drained[1 - active] == now {
            self.parity.store(1 - active, Ordering::Relaxed);
        }
        drained[0].min(drained[1])
    }

    /// Whether every reader of the parity that locked before the caller's last `heavy` is gone.
    fn is_drained(&self, parity: usize) -> bool {
        if mutant("rcu-send-locks-first") {
            let locks = self.locks(parity);
            return locks == self.unlocks(parity);
        }
        let unlocks = self.unlocks(parity);
        unlocks == self.locks(parity)
    }

    fn unlocks(&self, parity: usize) -> u64 {
        // Ordering: Acquire, all, pairs with the Release in `SendGuard::drop`; it carries what the
        // reader has read, and that it was counted as locked.
        let remote = self.remote[parity].unlock.load(Ordering::Acquire);
        let words = self.counters().map_or(0, |counters| {
            sum(counters.unlock[parity].iter().map(|word| word.load(Ordering::Acquire)))
        });
        remote.wrapping_add(words)
    }

    fn locks(&self, parity: usize) -> u64 {
        // Ordering: Relaxed, all; what must be seen is ordered by the fence pair, or by the
        // Acquire in `unlocks`.
        let remote = self.remote[parity].lock.load(Ordering::Relaxed);
        let words = self.counters().map_or(0, |counters| {
            sum(counters.lock[parity].iter().map(|word| word.load(Ordering::Relaxed)))
        });
        remote.wrapping_add(words)
    }

    /// Guards alive: exact when none comes or goes.
    pub(super) fn alive(&self) -> u64 {
        let alive = |parity| {
            let unlocks = self.unlocks(parity);
            self.locks(parity).wrapping_sub(unlocks)
        };
        alive(0).wrapping_add(alive(1))
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> usize {
        // Ordering: Relaxed; a hint (see the module).
        let parity = self.parity.load(Ordering::Relaxed) & 1;
        let counters = self.counters();
        let done = counters
            .is_some_and(|counters| section::add(&self.gate, &counters.lock[parity], 1).is_ok());
        if !done {
            self.lock_slow(parity);
        }
        if !mutant("rcu-send-without-light") {
            // Against the `heavy` of `GpGuard::bump`: either it counts us, or we see the unlink.
            fence::light();
        }
        parity
    }

    #[cfg_attr(all(target_arch = "x86_64", not(offlock_portable)), cold)]
    fn lock_slow(&self, parity: usize) {
        let Some(counters) = self.counters().or_else(|| self.allocate_counters()) else {
            return self.lock_remote(parity);
        };
        if !section::available() {
            // Ordering: Relaxed; the fence in `lock` orders it, and the Release in `unlock`.
            counters.lock[parity].slot(cpu::recent()).fetch_add(1, Ordering::Relaxed);
        } else if section::add(&self.gate, &counters.lock[parity], 1).is_err() {
            self.lock_remote(parity);
        }
    }

    #[cold]
    fn lock_remote(&self, parity: usize) {
        // Ordering: as in `lock_slow`.
        self.remote[parity].lock.fetch_add(1, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn unlock(&self, parity: usize) {
        let counters = self.counters();
        if mutant("rcu-send-one-counter") {
            let down = u64::MAX;
            if let Some(counters) = counters {
                if section::add(&self.gate, &counters.lock[parity], down).is_err() {
                    let slot = counters.lock[parity].slot(cpu::current());
                    slot.fetch_add(down, Ordering::Release);
                }
            }
            return;
        }
        // A section's store is a Release, and the section is a compiler fence.
        let done = counters
            .is_some_and(|counters| section::add(&self.gate, &counters.unlock[parity], 1).is_ok());
        if !done {
            self.unlock_slow(parity);
        }
    }

    #[cfg_attr(all(target_arch = "x86_64", not(offlock_portable)), cold)]
    fn unlock_slow(&self, parity: usize) {
        let order =
            if mutant("rcu-send-unlock-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release, both, pairs with the Acquire in `unlocks`; it carries what the reader
        // has read, and its lock.
        match self.counters() {
            Some(counters) if !section::available() => {
                counters.unlock[parity].slot(cpu::recent()).fetch_add(1, order);
            }
            _ => {
                self.remote[parity].unlock.fetch_add(1, order);
            }
        }
    }
}

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::wrapping_add)
}
