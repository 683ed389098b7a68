//! The entries of a list in one slot: an array of anchors, with counters and a pool of nodes.
//!
//! A list makes the shard of a slot at the first add there, and frees it when the list is dropped.
//!
//! # Invariants
//!
//! 1. A thread uses `array` only while it holds the slot's lock, or has exclusive access to the
//!    list.
//! 2. `added` and `removed` change under that lock, together with `array`. While the lock is free,
//!    their difference is the number of entries.
//! 3. While `walkers` is not 0, no entry of `array` moves. `walkers` is incremented only under the
//!    lock.

use offlock_percpu::CpuId;
use offlock_sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{load_own, order};

use crate::anchor::{Anchor, ShardPtr};
use crate::array::Array;
use crate::stats::Stats;

/// The shard of a list for one slot. It has cache lines of its own, in pairs, because the
/// prefetcher fetches pairs:
///
/// ```text
///  0    fields that every add and removal writes, all of them under the lock
///  64   fields that they read: the segments of the array, the slot
///  128  fields of removals by other CPUs, and of the pool of nodes
/// ```
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Shard {
    added: AtomicU64,
    removed: AtomicU64,
    /// A stack of entries that the thread with a snapshot has dropped; it changes under the slot's
    /// lock. See `owning::deferred`.
    deferred: AtomicPtr<Anchor>,
    walkers: AtomicU32,
    contended: AtomicU32,
    array: UnsafeCell<Array>,
    slot: CpuId,
    counts_hits: bool,
    rare: RarelyWritten,
}

/// The third cache line of a shard.
#[derive(Debug)]
#[repr(align(64))]
struct RarelyWritten {
    cpu_misses: AtomicU64,
    node_misses: AtomicU64,
    /// A stack of nodes for the next values; it changes under the slot's lock. See `owning::pool`.
    pool_first: AtomicPtr<Anchor>,
    pool_len: AtomicU8,
}

#[cfg(not(offlock_model))] // the atomics of a model are larger
const _: () = {
    // The crate documentation says how much memory a shard takes.
    assert!(size_of::<Shard>() == 256);
    assert!(std::mem::offset_of!(Shard, array) + Array::WRITTEN == 64);
    assert!(std::mem::offset_of!(Shard, rare) == 128);
};

// SAFETY: one thread at a time uses `array` (invariant 1), and `Array` is `Send`. The other fields
// are atomics, or never change.
unsafe impl Sync for Shard {}

/// Increments a counter that changes only under the slot's lock.
#[inline(always)]
fn count(counter: &AtomicU64) {
    // Ordering: the lock orders the load. The Release store pairs with the Acquire loads in
    // `Shard::stats` and `Shard::entries`; it carries the counters that were stored before.
    // It has no label, because a model cannot see it weakened: between two of these stores there is
    // an unlock, which orders them too.
    counter.store(load_own(counter) + 1, Ordering::Release);
}

impl Shard {
    pub(crate) fn new(slot: CpuId, counts_hits: bool) -> Self {
        Self {
            added: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            deferred: AtomicPtr::new(std::ptr::null_mut()),
            walkers: AtomicU32::new(0),
            contended: AtomicU32::new(0),
            array: UnsafeCell::new(Array::new()),
            slot,
            counts_hits,
            rare: RarelyWritten {
                cpu_misses: AtomicU64::new(0),
                node_misses: AtomicU64::new(0),
                pool_first: AtomicPtr::new(std::ptr::null_mut()),
                pool_len: AtomicU8::new(0),
            },
        }
    }

    /// Returns the pointer that the anchors in the shard have.
    #[inline(always)]
    pub(crate) fn as_anchor_ptr(&self) -> ShardPtr {
        ShardPtr::new(self)
    }

    /// Returns whether removals by other CPUs and nodes are counted.
    #[inline(always)]
    pub(crate) fn counts_hits(&self) -> bool {
        self.counts_hits
    }

    pub(crate) fn slot(&self) -> CpuId {
        self.slot
    }

    /// Returns a pointer for a thread that may change the array (invariant 1).
    #[inline(always)]
    pub(crate) fn array_mut_ptr(&self) -> *mut Array {
        self.array.with_mut(|array| array)
    }

    /// Returns a pointer for a thread that may read the array (invariant 1).
    #[inline(always)]
    pub(crate) fn array_ptr(&self) -> *const Array {
        self.array.with(|array| array)
    }

    #[inline(always)]
    pub(crate) fn count_added(&self) {
        count(&self.added);
    }

    #[inline(always)]
    pub(crate) fn count_removed(&self) {
        count(&self.removed);
    }

    /// Counts a removal by a CPU of another slot, and of another node. Follows `count_removed`.
    #[inline(always)]
    pub(crate) fn count_miss(&self, other_node: bool) {
        count(&self.rare.cpu_misses);
        if other_node {
            count(&self.rare.node_misses);
        }
    }

    /// Counts a wait for the lock, which the caller now holds.
    #[cold]
    pub(crate) fn count_contended(&self) {
        // Ordering: Relaxed, both; a statistics counter that publishes nothing. The lock orders its
        // changes.
        let counted = self.contended.load(Ordering::Relaxed).saturating_add(1);
        self.contended.store(counted, Ordering::Relaxed);
    }

    /// Returns the number of entries, without the lock. It is at least the number of entries that
    /// are in the shard during the whole call.
    pub(crate) fn entries(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `count`; it carries `added`. The load below
        // counts the add of every removal that this load counts.
        let removed = self.removed.load(order!(Acquire, "length: removals before adds"));
        // Ordering: Acquire pairs with the Release in `count`; it carries the counters that were
        // stored before, for the caller's later loads.
        self.added.load(Ordering::Acquire) - removed
    }

    /// Returns the counters, without the lock. `cpu_hits <= node_hits <= removals` always holds.
    pub(crate) fn stats(&self) -> Stats {
        // Ordering: Acquire, all; each pairs with the Release in `count` and carries the counters
        // that were stored before. The loads are in the opposite order of the stores, so a counter
        // loaded later is not behind one loaded earlier.
        let node_misses = self.rare.node_misses.load(Ordering::Acquire);
        let cpu_misses = self.rare.cpu_misses.load(Ordering::Acquire);
        let removals = self.removed.load(Ordering::Acquire);
        let adds = self.added.load(Ordering::Acquire);
        Stats {
            adds,
            removals,
            cpu_hits: removals - cpu_misses,
            node_hits: removals - node_misses,
            // Ordering: Relaxed; a statistics counter, it publishes nothing.
            contended: self.contended.load(Ordering::Relaxed).into(),
        }
    }

    /// Keeps the entries at their indexes until the guard is dropped. The caller holds the lock.
    pub(crate) fn begin_walk(&self) -> WalkGuard<'_> {
        // Ordering: Relaxed; the lock that the caller holds carries it to the load in `may_move`.
        self.walkers.fetch_add(1, Ordering::Relaxed);
        WalkGuard { shard: self }
    }

    /// Returns whether entries may move. The caller holds the lock.
    #[inline(always)]
    pub(crate) fn may_move(&self) -> bool {
        // Ordering: Relaxed; the lock orders the increments in `begin_walk` before this load.
        self.walkers.load(Ordering::Relaxed) == 0
    }

    /// Returns the stack of pooled nodes, and its length.
    #[inline(always)]
    pub(crate) fn pool(&self) -> (&AtomicPtr<Anchor>, &AtomicU8) {
        (&self.rare.pool_first, &self.rare.pool_len)
    }

    /// Returns the stack of deferred removals.
    #[inline(always)]
    pub(crate) fn deferred(&self) -> &AtomicPtr<Anchor> {
        &self.deferred
    }
}

/// Keeps the entries of a shard at their indexes while it lives, for [`Shard::begin_walk`].
/// Dropping it needs no lock.
#[derive(Debug)]
pub(crate) struct WalkGuard<'a> {
    shard: &'a Shard,
}

impl Drop for WalkGuard<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; only the walk needs the entries to stay, and the walk is over.
        self.shard.walkers.fetch_sub(1, Ordering::Relaxed);
    }
}
