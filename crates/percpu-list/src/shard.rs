//! A list's part in one slot: the array of its entries there, and what was counted.
//!
//! Made when the list has its first entry there, freed with the list.
//!
//! # Invariants
//!
//! 1. `array` is used by whoever holds the slot's lock, or has the whole list to himself.
//! 2. `added` and `removed` change under that lock, right beside `array`: their difference is the
//!    number of entries whenever nobody holds it.
//! 3. While `walkers` is not 0 no entry of `array` moves. It grows only under the lock.

use percpu::CpuId;
use percpu::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{load_own, order};

use crate::anchor::{Anchor, ShardPtr};
use crate::array::Array;
use crate::stats::Stats;

/// See the module. On lines of its own, by twos as the prefetcher fetches them:
///
/// ```text
///  0    what every addition and removal writes, all of it under the lock
///  64   what they read: the array's segments, the slot
///  128  what some write: who removes from another CPU, who uses a node again
/// ```
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Shard {
    added: AtomicU64,
    removed: AtomicU64,
    /// Entries to be removed by whoever comes next: a stack, last first. See `owning::deferred`.
    deferred: AtomicPtr<Anchor>,
    walkers: AtomicU32,
    contended: AtomicU32,
    array: UnsafeCell<Array>,
    slot: CpuId,
    counts_hits: bool,
    rare: RarelyWritten,
}

/// The last line of a shard.
#[derive(Debug)]
#[repr(align(64))]
struct RarelyWritten {
    cpu_misses: AtomicU64,
    node_misses: AtomicU64,
    /// Nodes to be used again, a stack; changed under the slot's lock. See `owning::pool`.
    pool_first: AtomicPtr<Anchor>,
    pool_len: AtomicU8,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))] // a model's atomics are larger
const _: () = {
    // What the crate's page says of memory.
    assert!(size_of::<Shard>() == 256);
    assert!(std::mem::offset_of!(Shard, array) + Array::WRITTEN == 64);
    assert!(std::mem::offset_of!(Shard, rare) == 128);
};

// SAFETY: `array` is used by one thread at a time (invariant 1) and may be used by any; the rest is
// atomics.
unsafe impl Sync for Shard {}

/// Adds to a counter that only the slot's lock holder changes.
///
/// Ordering: the load is ordered by the lock. Release store pairs with the Acquire loads in
/// `Shard::stats` and `Shard::entries`: they carry the counters that were stored before.
#[inline(always)]
fn count(counter: &AtomicU64) {
    // A model would not see it relaxed: an unlock comes between any two, and its fence is real there.
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

    /// Returns the shard that holds an anchor.
    ///
    /// # Safety
    ///
    /// The anchor is linked, the caller holds the lock of its home slot, and the list of the anchor
    /// lives as long as `'a`.
    #[inline(always)]
    pub(crate) unsafe fn of<'a>(anchor: &Anchor) -> &'a Self {
        // SAFETY: a linked anchor has a pointer from `as_anchor_ptr`, to a shard of a list that lives.
        unsafe { &*anchor.shard().as_ptr() }
    }

    /// Whether it counts from where entries are removed.
    #[inline(always)]
    pub(crate) fn counts_hits(&self) -> bool {
        self.counts_hits
    }

    pub(crate) fn slot(&self) -> CpuId {
        self.slot
    }

    /// The array, for who may change it: the slot's lock holder (invariant 1).
    #[inline(always)]
    pub(crate) fn array_mut_ptr(&self) -> *mut Array {
        self.array.with_mut(|array| array)
    }

    /// The array, for who may read it: the slot's lock holder (invariant 1).
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

    /// A removal from another slot's CPU, and from another node's. After `count_removed`.
    #[inline(always)]
    pub(crate) fn count_miss(&self, other_node: bool) {
        count(&self.rare.cpu_misses);
        if other_node {
            count(&self.rare.node_misses);
        }
    }

    /// The caller holds the lock, which it had to wait for.
    #[cold]
    pub(crate) fn count_contended(&self) {
        // Ordering: Relaxed, both; a statistics counter, changed under the lock.
        let counted = self.contended.load(Ordering::Relaxed).saturating_add(1);
        self.contended.store(counted, Ordering::Relaxed);
    }

    /// How many entries there are, without the lock: never less than stay throughout.
    pub(crate) fn entries(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `count`: each removal that is seen brings its
        // addition, and `added`, read later, counts that.
        let removed = self.removed.load(order!(Acquire, "length: removals before additions"));
        // Ordering: Acquire; as above, for whoever goes on from there.
        self.added.load(Ordering::Acquire) - removed
    }

    /// What was counted, without the lock. `cpu_hits <= node_hits <= removals` holds at any time.
    pub(crate) fn stats(&self) -> Stats {
        // Ordering: Acquire, all; in the opposite order of the stores, so that what is read later
        // counts at least what was counted with what is read before.
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

    /// Keeps entries where they are until that is dropped. The caller holds the lock.
    pub(crate) fn begin_walk(&self) -> WalkGuard<'_> {
        // Ordering: Relaxed; who must see it takes the lock that the caller holds.
        self.walkers.fetch_add(1, Ordering::Relaxed);
        WalkGuard { shard: self }
    }

    /// True if entries may move. The caller holds the lock.
    #[inline(always)]
    pub(crate) fn may_move(&self) -> bool {
        // Ordering: Relaxed; ordered by the lock, under which it grows.
        self.walkers.load(Ordering::Relaxed) == 0
    }

    /// The stack of nodes to be used again.
    #[inline(always)]
    pub(crate) fn pool(&self) -> (&AtomicPtr<Anchor>, &AtomicU8) {
        (&self.rare.pool_first, &self.rare.pool_len)
    }

    /// True if there may be entries to be removed. Needs no lock.
    #[inline(always)]
    pub(crate) fn has_deferred(&self) -> bool {
        // Ordering: Relaxed; whoever takes them reads it again.
        !self.deferred.load(Ordering::Relaxed).is_null()
    }

    /// The stack of entries to be removed.
    #[inline(always)]
    pub(crate) fn deferred(&self) -> &AtomicPtr<Anchor> {
        &self.deferred
    }
}

/// One of a shard's walkers, while it lives: from [`Shard::begin_walk`]. Dropping it needs no lock.
#[derive(Debug)]
pub(crate) struct WalkGuard<'a> {
    shard: &'a Shard,
}

impl Drop for WalkGuard<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; whether entries stay matters to the walk alone, and that is over.
        self.shard.walkers.fetch_sub(1, Ordering::Relaxed);
    }
}
