//! Counts the batches of objects that threads have taken out of the bags and not yet freed.
//!
//! `barrier` waits for the batches of all threads. There are two parities:
//! new batches use one parity while `barrier` waits for the other, so a stream of new batches
//! cannot delay `barrier` for ever.
//!
//! # Invariants
//!
//! 1. Every batch that is taken out of a bag is counted, before the bag's lock is taken, until it
//!    is freed. No other object is ever taken out of a bag: while a thread waits for readers, the
//!    objects it waits for stay in the bags.

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use offlock_sync::const_fn;

use super::backoff::Backoff;
use super::spin_lock::SpinLock;

/// The number of batches that are being freed.
#[derive(Debug)]
pub(super) struct InFlight {
    /// Batches in flight, by parity.
    counts: CachePadded<[AtomicU64; 2]>,
    /// The parity that new batches use.
    parity: AtomicUsize,
    /// Held by the thread that changes `parity`.
    waiter: SpinLock,
}

impl InFlight {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                counts: CachePadded::new([AtomicU64::new(0), AtomicU64::new(0)]),
                parity: AtomicUsize::new(0),
                waiter: SpinLock::new(),
            }
        }
    }

    /// Counts a batch until the returned value is dropped.
    ///
    /// The caller has not yet locked the bags that it takes the batch from.
    pub(super) fn begin(&self) -> BatchInFlight<'_> {
        // Ordering: Relaxed; a hint: `wait` waits for both parities.
        let parity = self.parity.load(Ordering::Relaxed);
        // Ordering: Relaxed; the barrier that must see the count locks the bag after this thread.
        self.counts[parity].fetch_add(1, Ordering::Relaxed);
        BatchInFlight { in_flight: self, parity }
    }

    /// Waits until every batch that was counted before is freed.
    pub(super) fn wait(&self) {
        let mut backoff = Backoff::default();
        while !self.waiter.try_lock() {
            backoff.wait();
        }
        // Ordering: Relaxed; only the holder of `waiter` changes it, and `begin` takes it as a
        // hint.
        let active = self.parity.load(Ordering::Relaxed);
        for parity in [1 - active, active] {
            self.parity.store(1 - parity, Ordering::Relaxed);
            // Ordering: Acquire pairs with the Release in `BatchInFlight::drop`; it carries what
            // the drops did.
            while self.counts[parity].load(Ordering::Acquire) != 0 {
                backoff.wait();
            }
        }
        self.waiter.unlock();
    }
}

/// A batch that is counted as in flight.
#[derive(Debug)]
pub(super) struct BatchInFlight<'a> {
    in_flight: &'a InFlight,
    parity: usize,
}

impl Drop for BatchInFlight<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `InFlight::wait`; it carries what the drops
        // of this batch did.
        self.in_flight.counts[self.parity].fetch_sub(1, Ordering::Release);
    }
}
