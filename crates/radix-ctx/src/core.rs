//! The part that a table shares with the references into it: the slabs, the lists of dead slots, the
//! limits, the waiters, and the state under the lock.
//!
//! Lookups read `slabs` and nothing else. The lock protects the search for vacant slots and the stages
//! of reclaim ([`reclaim`](crate::reclaim)).
//!
//! # Invariants
//!
//! 1. A key has a vacancy in `slabs` exactly if it has no slab, or its slab has a bit of `used` clear.
//! 2. A slab with a used slot stays in the tree. A slab that loses its last used slot leaves the tree,
//!    and a floor in its place, except for one slab: `empty`.
//! 3. The core is freed by its reclaim callback, a grace period after the table and its last context
//!    were dropped. A thread that holds no borrow of the table stays pinned from its last change of the
//!    core to its last use of it.
//! 4. `this` points to the core itself and is derived from its allocation. The core is freed through
//!    such a pointer only: one made from a `&Core` may read the core, but not free it.

use std::ptr::NonNull;
use std::time::Instant;

use crossbeam_utils::CachePadded;
use offlock_percpu::PerCpu;
use offlock_percpu::rcu::{GracePeriod, RetireHead};
use offlock_sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use offlock_sync::native::OnceLock;
use offlock_sync::quarantine::Watched;
use offlock_sync::{WordGuard, WordLock, order};

use crate::retire_list::RetireLists;
use crate::slab::{self, Slab, SlabPtr, SlabTree};
use crate::user_code::is_dropping;
use crate::waiters::Waiters;

#[repr(C)]
pub(super) struct Core<T: Send + Sync + 'static> {
    pub(super) slabs: SlabTree<T>,
    /// Allocated with the first slab, so that an empty table is small.
    pub(super) lists: OnceLock<PerCpu<RetireLists>>,
    pub(super) quota: Quota,
    pub(super) max_index: u32,
    pub(super) waiters: Waiters,
    /// Some slab has counts of references, so a fold needs the barrier that restarts sections.
    pub(super) has_refs: AtomicBool,
    /// The reclaim callback is queued, or a thread is about to queue it.
    pub(super) callback_queued: AtomicBool,
    /// A removal checks the lists each time that its list grows by this many dead slots.
    pub(super) batch: AtomicU32,
    pub(super) callback: RetireHead,
    /// Invariant 4. Written by [`place`](Self::place).
    this: NonNull<Self>,
    // On cache lines of their own, away from what lookups read.
    lock: CachePadded<WordLock<State<T>>>,
    pub(super) counters: CachePadded<Counters>,
}

/// Statistics. Rare operations write them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Dead slots that were folded and that references keep.
    pub(super) referenced: AtomicU64,
}

// SAFETY: the raw pointers in it lead to slabs, which hold atomics and values of `T: Send + Sync`.
unsafe impl<T: Send + Sync + 'static> Send for Core<T> {}
// SAFETY: shared fields are atomics, types that are `Sync`, or under `lock`; slabs hold `T: Sync`.
unsafe impl<T: Send + Sync + 'static> Sync for Core<T> {}

/// The state under the lock.
#[repr(C)]
pub(super) struct State<T: Send + Sync + 'static> {
    /// The lowest vacant slots. The first field, so that it begins on the line of the lock's word.
    pub(super) queue: VacantQueue,
    /// The number of bits set in the `used` of all slabs, without exhausted slots.
    pub(super) used: u64,
    /// The number of used slots whose generations are used up.
    pub(super) exhausted: u64,
    /// The number of dead slots that are in no filling list: they wait, or references keep them.
    pub(super) dead: u64,
    /// The one slab without a used slot that is kept.
    pub(super) empty: Option<SlabPtr<T>>,
    pub(super) slabs: u64,
    /// Indexes from here on were never used in a slab that was released.
    pub(super) unused_from: u32,
    /// The grace period of the waiting lists, unless they are empty.
    pub(super) waiting: Option<GracePeriod>,
    /// A thread owns the waiting lists.
    pub(super) reclaiming: bool,
    /// The table is dropped.
    pub(super) dropped: bool,
    /// A thread has begun to remove the contexts of the dropped table, or has done so.
    pub(super) ended: bool,
    /// The queued callback frees the core: its grace period is that of invariant 3.
    pub(super) callback_frees: bool,
}

impl<T: Send + Sync + 'static> Core<T> {
    pub(super) fn new(max_index: u32, quota: Quota, callback: RetireHead, batch: u32) -> Self {
        Self {
            slabs: SlabTree::new(),
            lists: OnceLock::new(),
            quota,
            max_index,
            waiters: Waiters::default(),
            has_refs: AtomicBool::new(false),
            callback_queued: AtomicBool::new(false),
            batch: AtomicU32::new(batch),
            counters: CachePadded::new(Counters::default()),
            callback,
            this: NonNull::dangling(),
            lock: CachePadded::new(WordLock::new(State {
                queue: VacantQueue::new(),
                used: 0,
                exhausted: 0,
                dead: 0,
                empty: None,
                slabs: 0,
                unused_from: 0,
                waiting: None,
                reclaiming: false,
                dropped: false,
                ended: false,
                callback_frees: false,
            })),
        }
    }

    /// Completes a core that was just allocated. Returns the pointer through which it may be freed.
    pub(super) fn place(core: Box<Watched<Self>>) -> NonNull<Self> {
        let core = NonNull::from(Box::leak(core));
        // SAFETY: the core lies at that offset of its allocation.
        let this = unsafe { core.byte_add(Watched::<Self>::OFFSET) }.cast::<Self>();
        // SAFETY: the field lies inside the core.
        let own = unsafe { &raw mut (*this.as_ptr()).this };
        // SAFETY: no other thread knows the core yet, and no reference to it exists.
        unsafe { own.write(this) };
        this
    }

    /// Returns the core of a slab.
    pub(super) fn of(slab: &Slab<T>) -> NonNull<Self> {
        slab.owner().cast()
    }

    /// Returns the pointer through which the core may be freed (invariant 4).
    pub(super) fn this(&self) -> NonNull<Self> {
        self.this
    }

    /// Returns the address that names this core in [`dropping`](crate::user_code::dropping).
    pub(super) fn address(&self) -> *const () {
        std::ptr::from_ref(self).cast()
    }

    /// Returns whether the calling thread is dropping a context of this table.
    pub(super) fn is_in_drop(&self) -> bool {
        is_dropping(self.address())
    }

    /// Blocks until `done` returns a value, or until the deadline. Calls `done` after each reclaim and each
    /// last reference.
    pub(super) fn wait_change<R>(
        &self,
        deadline: Option<Instant>,
        done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let counted = self.waiters.count_thread();
        drop(self.lock()); // a change before it is seen by `done`, one after it sees the count
        self.waiters.wait(&counted, deadline, done)
    }

    #[inline]
    pub(super) fn lock(&self) -> WordGuard<'_, State<T>> {
        self.lock.lock()
    }
}

impl<T: Send + Sync + 'static> State<T> {
    /// Returns the number of slots that are live, dead or claimed.
    pub(super) fn in_use(&self) -> u64 {
        self.used - self.queue.len() as u64
    }

    /// Returns whether the table and its last context are gone, and no thread reclaims.
    pub(super) fn is_over(&self) -> bool {
        self.ended && !self.reclaiming && self.in_use() == 0
    }

    /// Counts used slots that will never be vacant again.
    pub(super) fn exhaust(&mut self, slots: u64) {
        self.used -= slots;
        self.exhausted += slots;
    }
}

impl<T: Send + Sync + 'static> Drop for Core<T> {
    fn drop(&mut self) {
        self.slabs.destroy(|slab| {
            // SAFETY: no thread uses the core or its slabs any more, and all slots are vacant.
            unsafe { slab::free_slab(slab) };
        });
    }
}

/// The capacity of a queue: what fits beside the lock's word on its two cache lines.
pub(super) const QUEUE: usize = if cfg!(offlock_model) { 2 } else { 20 };

/// The lowest vacant indexes.
#[derive(Debug)]
#[repr(C)]
pub(super) struct VacantQueue {
    left: u32,
    /// Descending: the lowest is at `left - 1`.
    indexes: [u32; QUEUE],
}

impl VacantQueue {
    pub(super) fn new() -> Self {
        Self { left: 0, indexes: [0; QUEUE] }
    }

    pub(super) fn len(&self) -> usize {
        self.left as usize
    }

    /// Takes the lowest index.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<u32> {
        let left = self.left.checked_sub(1)?;
        self.left = left;
        self.indexes.get(left as usize).copied()
    }

    /// Fills an empty queue with ascending indexes.
    pub(super) fn fill(&mut self, ascending: &[u32]) {
        for (at, index) in ascending.iter().rev().enumerate() {
            self.indexes[at] = *index;
        }
        self.left = ascending.len() as u32;
    }
}

/// A number of contexts that never exceeds its limit, on a cache line of its own, so that a table without
/// a limit is small.
///
/// A context counts from before it is live until it is removed, even if a reader still uses it. So an
/// insert that follows a removal can take the place of the removed context.
#[derive(Debug)]
pub(super) struct Quota(Option<Box<CachePadded<Counted>>>);

#[derive(Debug)]
struct Counted {
    used: AtomicU64,
    most: u64,
}

impl Quota {
    pub(super) fn new(most: Option<u64>) -> Self {
        let counted = |most| Box::new(CachePadded::new(Counted { used: AtomicU64::new(0), most }));
        Self(most.map(counted))
    }

    /// Counts one more context, or returns the limit as an error and counts nothing. Lock-free.
    ///
    /// Never adds first and subtracts after a check: such an add could make another thread's add fail
    /// that fits.
    #[inline]
    pub(super) fn take(&self) -> Result<(), u64> {
        let Some(counted) = &self.0 else { return Ok(()) };
        let Counted { used, most } = &***counted;
        // Ordering: Relaxed; the exchange checks the value.
        let mut seen = used.load(Ordering::Relaxed);
        while seen < *most {
            // Ordering: Acquire on success pairs with the Release in `give_back`; it carries what happened
            // before the removal to the insert that takes its place. Relaxed on failure: only the
            // value is used.
            let order = order!(Acquire, "take: what came before the removal");
            match used.compare_exchange_weak(seen, seen + 1, order, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
        Err(*most)
    }

    /// Reverses [`take`](Self::take) for `contexts` contexts. Wait-free.
    #[inline]
    pub(super) fn give_back(&self, contexts: u64) {
        if let Some(counted) = &self.0 {
            // Ordering: Release pairs with the Acquire in `take`; it carries what happened before the
            // removal.
            let order =
                order!(Release, "give back: the number carries what came before the removal");
            let before = counted.used.fetch_sub(contexts, order);
            debug_assert!(contexts <= before, "{contexts} given back of {before}");
        }
    }
}
