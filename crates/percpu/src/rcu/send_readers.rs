//! Counts the readers that may change threads, per CPU.
//!
//! A guard that lives across an `.await` may begin on one thread and end on another. So its begin
//! and its end go to two counters, each on the CPU that runs the thread at that time:
//!
//! ```text
//!              cpu 0          cpu 1
//!  lock[p]     7              4         sum 11
//!  unlock[p]   2              8         sum 10      one reader of parity p is inside
//! ```
//!
//! The scan adds up the counters CPU by CPU while readers enter and leave, so the order matters:
//! **unlocks first, then locks**. If the scan counts an unlock, it counts the lock of the same
//! reader, because the reader made both in that order (Release, Acquire). So the sums are equal
//! only if every counted lock has its unlock counted. The readers that the grace period waits for
//! locked before the `heavy` of the bump, so their locks are counted. With one counter that goes up
//! and down, or with locks added up first, the scan could miss a lock on a CPU it has passed and
//! then count an unlock, of that reader or of another one, on a CPU it has not.
//!
//! With a steady stream of new readers the sums might never be equal. So there are two *parities*:
//! new readers use one, the other one drains, and they swap each time the other one is empty. A
//! grace period ends once each parity was seen empty after the grace period's `heavy`, at any two
//! times, so two swaps are enough. A reader that loads the parity and sleeps before it counts
//! itself is counted in the old parity: it delays the next drain, and is not missed.
//!
//! # Invariants
//!
//! 1. The sums of `lock` and `unlock` wrap at 2^64, and there are never 2^64 guards.
//! 2. The words are changed only by rseq sections, or only by atomics, for the life of the process
//!    (`section::available`). A thread that has no rseq id counts in `remote`, by atomics.

use std::ptr;

use crossbeam_utils::CachePadded;

use crate::error::AllocError;
use crate::fence;
use crate::rseq::section;
use crate::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sync::const_fn;
use crate::sync::{check, cpu, order, step};
use crate::words::Words;

/// The counters of all `Send` readers.
#[derive(Debug)]
pub(super) struct SendReaders {
    /// The parity that new readers use: 0 or 1.
    parity: CachePadded<AtomicUsize>,
    /// Null until the first `Send` reader; the counters then count as 0.
    counters: AtomicPtr<Counters>,
    /// The counters of threads without an rseq id, and of all threads while there is no memory for
    /// `counters`; one pair per parity.
    remote: [RemoteCounters; 2],
    /// The gate that an rseq section tests. It is never closed.
    gate: AtomicU64,
}

/// The per-CPU counters, by parity.
#[derive(Debug)]
struct Counters {
    lock: [Words; 2],
    unlock: [Words; 2],
}

/// The counters of one parity that all CPUs share.
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
        // Ordering: Acquire pairs with the Release in `allocate_counters`; it carries the
        // counters.
        let counters = self.counters.load(Ordering::Acquire);
        // SAFETY: null, or published by `allocate_counters` and never freed.
        unsafe { counters.as_ref() }
    }

    /// Allocates the counters. Returns `None` if there is no memory.
    #[cold]
    #[inline(never)]
    fn allocate_counters(&self) -> Option<&'static Counters> {
        // Chosen before the first reader, so that `light` costs readers nothing.
        let _ = fence::strategy();
        let pair = || Ok::<_, AllocError>([Words::new()?, Words::new()?]);
        let counters = Counters { lock: pair().ok()?, unlock: pair().ok()? };
        let new = Box::into_raw(crate::sync::alloc::try_box(counters).ok()?);
        // Ordering: Release on success pairs with the Acquire in `counters`; it carries the
        // counters. Relaxed on failure: `counters` loads the pointer again.
        let first = self.counters.compare_exchange(
            ptr::null_mut(),
            new,
            Ordering::Release,
            Ordering::Relaxed,
        );
        if first.is_err() {
            // SAFETY: `new` is from `into_raw` and was not published.
            drop(unsafe { Box::from_raw(new) });
        }
        self.counters()
    }

    /// Sets `drained` to `now` for each parity without a reader that entered before grace period
    /// `now`, and returns the lower of the two values.
    ///
    /// The caller holds `gp_lock`, and ran `heavy` after the bump to `now`.
    pub(super) fn scan(&self, now: u64, drained: &mut [u64; 2]) -> u64 {
        // Ordering: Relaxed, both; only the holder of `gp_lock` changes it, and readers take it as
        // a hint.
        let active = self.parity.load(Ordering::Relaxed);
        for (parity, drained) in drained.iter_mut().enumerate() {
            if self.is_drained(parity) {
                *drained = now;
            }
        }
        if drained[active] < now && drained[1 - active] == now {
            self.parity.store(1 - active, Ordering::Relaxed);
        }
        drained[0].min(drained[1])
    }

    /// Returns whether every reader of `parity` that locked before the last `heavy` of the calling
    /// thread has left.
    fn is_drained(&self, parity: usize) -> bool {
        let unlocks = self.unlocks(parity); // before the locks
        check!("scan: the Send readers have left", unlocks == self.locks(parity))
    }

    fn unlocks(&self, parity: usize) -> u64 {
        // Ordering: Acquire, all, pairs with the Release in `unlock` and `unlock_slow`; it carries
        // the reads of the reader, and its lock.
        let remote = self.remote[parity].unlock.load(Ordering::Acquire);
        let words = self.counters().map_or(0, |counters| {
            sum(counters.unlock[parity].iter().map(|word| word.load(Ordering::Acquire)))
        });
        remote.wrapping_add(words)
    }

    fn locks(&self, parity: usize) -> u64 {
        // Ordering: Relaxed, all; the locks that must be counted are ordered by the `light` in
        // `lock` and the `heavy` of `GpGuard::bump`, or by the Acquire in `unlocks`.
        let remote = self.remote[parity].lock.load(Ordering::Relaxed);
        let words = self.counters().map_or(0, |counters| {
            sum(counters.lock[parity].iter().map(|word| word.load(Ordering::Relaxed)))
        });
        remote.wrapping_add(words)
    }

    /// Returns the number of live guards: exact while no guard begins or ends.
    pub(super) fn alive(&self) -> u64 {
        let alive = |parity| {
            let unlocks = self.unlocks(parity);
            self.locks(parity).wrapping_sub(unlocks)
        };
        alive(0).wrapping_add(alive(1))
    }

    /// Counts a new reader, and returns the parity that it is counted in.
    #[inline(always)]
    pub(super) fn lock(&self) -> usize {
        // Ordering: Relaxed; a hint: a reader counted in the old parity is not missed.
        let parity = self.parity.load(Ordering::Relaxed) & 1;
        let counters = self.counters();
        let done = counters
            .is_some_and(|counters| section::add(&self.gate, 0, &counters.lock[parity], 1).is_ok());
        if !done {
            self.lock_slow(parity);
        }
        // Against the `heavy` of `GpGuard::bump`: either the writer counts this reader, or this reader
        // sees the unlink.
        step!("pin_send: before the reads", fence::light());
        parity
    }

    #[cfg_attr(all(target_arch = "x86_64", not(offlock_portable)), cold)]
    fn lock_slow(&self, parity: usize) {
        let Some(counters) = self.counters().or_else(|| self.allocate_counters()) else {
            return self.lock_remote(parity);
        };
        if !section::available() {
            // Ordering: Relaxed; ordered by the `light` in `lock` and by the Release in `unlock`.
            counters.lock[parity].slot(cpu::recent()).fetch_add(1, Ordering::Relaxed);
        } else if section::add(&self.gate, 0, &counters.lock[parity], 1).is_err() {
            self.lock_remote(parity);
        }
    }

    #[cold]
    fn lock_remote(&self, parity: usize) {
        // Ordering: Relaxed; ordered by the `light` in `lock` and by the Release in `unlock`.
        self.remote[parity].lock.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a reader of `parity`.
    #[inline(always)]
    pub(super) fn unlock(&self, parity: usize) {
        let counters = self.counters();
        // The store of a section is a Release, which pairs with the Acquire in `unlocks`, and the
        // section is a compiler fence.
        let done = counters.is_some_and(|counters| {
            section::add(&self.gate, 0, &counters.unlock[parity], 1).is_ok()
        });
        if !done {
            self.unlock_slow(parity);
        }
    }

    #[cfg_attr(all(target_arch = "x86_64", not(offlock_portable)), cold)]
    fn unlock_slow(&self, parity: usize) {
        let release = order!(Release, "unpin_send: the reads are done");
        // Ordering: Release, both, pairs with the Acquire in `unlocks`; it carries the reads of the
        // reader, and its lock.
        match self.counters() {
            Some(counters) if !section::available() => {
                counters.unlock[parity].slot(cpu::recent()).fetch_add(1, release);
            }
            _ => {
                self.remote[parity].unlock.fetch_add(1, release);
            }
        }
    }
}

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::wrapping_add)
}
