//! The part that a table shares with the references into it: the slabs, the lists of dead slots, the
//! limits, the waiters, and the state under the lock. A list of [`Frame`]s on the stack of each thread records the
//! tables whose contexts it is dropping.
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

use std::cell::Cell;
use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;
use offlock_percpu::PerCpu;
use offlock_percpu::rcu::{GracePeriod, RetireHead};
use offlock_sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use offlock_sync::native::OnceLock;
use offlock_sync::quarantine::Watched;
use offlock_sync::{WaitSet, WordGuard, WordLock, const_thread_local, order};

use crate::id::Id;
use crate::slab::{self, NO_LINK, NotLive, Slab, SlabPtr, SlabTree, Slot};

#[repr(C)]
pub(super) struct Core<T: Send + Sync + 'static> {
    pub(super) slabs: SlabTree<T>,
    /// Allocated with the first slab, so that an empty table is small.
    pub(super) lists: OnceLock<PerCpu<RetireLists>>,
    pub(super) quota: Quota,
    pub(super) max_index: u32,
    /// The threads that wait for the end of a reclaim, or for the last reference to a removed context.
    /// Both wake all of them.
    pub(super) changes: WaitSet,
    /// A task has waited for a removal, so removals look for tasks.
    pub(super) has_tasks: AtomicBool,
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
    /// The number of dead slots that were folded and that references keep: a statistic.
    pub(super) referenced: CachePadded<AtomicU64>,
}

// SAFETY: the raw pointers in it lead to slabs, which hold atomics and values of `T: Send + Sync`.
unsafe impl<T: Send + Sync + 'static> Send for Core<T> {}
// SAFETY: shared fields are atomics, types that are `Sync`, or under `lock`; slabs hold `T: Sync`.
unsafe impl<T: Send + Sync + 'static> Sync for Core<T> {}

/// The state under the lock.
#[repr(C)]
pub(super) struct State<T: Send + Sync + 'static> {
    /// The lowest vacant slots. The first field, so that it begins on the line of the lock's word.
    pub(super) queue: VacantQueue<T>,
    /// The number of bits set in the `used` of all slabs, without exhausted slots.
    pub(super) used: u64,
    /// The number of slots that stay unused because their last generation was assigned.
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
    /// The contexts of the dropped table are removed, and those without a reference dropped.
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
            changes: WaitSet::new(),
            has_tasks: AtomicBool::new(false),
            has_refs: AtomicBool::new(false),
            callback_queued: AtomicBool::new(false),
            batch: AtomicU32::new(batch),
            referenced: CachePadded::new(AtomicU64::new(0)),
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

    /// Returns the allocation of a core.
    pub(super) fn allocation(this: NonNull<Self>) -> NonNull<Watched<Self>> {
        // SAFETY: a core lies at that offset of its allocation (`place`).
        unsafe { this.byte_sub(Watched::<Self>::OFFSET) }.cast()
    }

    /// Tells a model checker that the core is used until here.
    #[inline(always)]
    pub(super) fn lives(&self) {
        #[cfg(offlock_model)]
        // SAFETY: the memory of a core stays until the end of a model, and the checker sees a free.
        let _: &Self = unsafe { Self::allocation(self.this).as_ref() };
    }

    /// Returns the core of a slab.
    pub(super) fn of(slab: &Slab<T>) -> NonNull<Self> {
        slab.owner().cast()
    }

    /// Returns the pointer through which the core may be freed (invariant 4).
    pub(super) fn this(&self) -> NonNull<Self> {
        self.this
    }

    /// Calls `f`, which drops contexts of this table. Meanwhile [`is_in_drop`](Self::is_in_drop) returns true on
    /// this thread: a drop may call the table, and must not wait there for its own end.
    pub(super) fn dropping<R>(&self, f: impl FnOnce() -> R) -> R {
        let outer = INNERMOST.with(Cell::get);
        let frame = Frame { of: ptr::from_ref(self).cast(), outer };
        let _leave = Leave(outer);
        INNERMOST.with(|innermost| innermost.set(&raw const frame));
        f()
    }

    /// Returns whether the calling thread is dropping a context of this table.
    pub(super) fn is_in_drop(&self) -> bool {
        let mut at = INNERMOST.with(Cell::get);
        // SAFETY: null, or a frame on this thread's stack of a call of `dropping` that has not returned.
        while let Some(frame) = unsafe { at.as_ref() } {
            if ptr::addr_eq(frame.of, self) {
                return true;
            }
            at = frame.outer;
        }
        false
    }

    #[inline]
    pub(super) fn lock(&self) -> WordGuard<'_, State<T>> {
        self.lock.lock()
    }
}

impl<T: Send + Sync + 'static> State<T> {
    /// Returns the number of slots that are live, dead or claimed.
    pub(super) fn in_use(&self) -> u64 {
        self.used - self.queue.len()
    }

    /// Returns whether the table and its last context are gone, and no thread reclaims.
    pub(super) fn is_over(&self) -> bool {
        self.ended && !self.reclaiming && self.in_use() == 0
    }

    /// Returns whether the table is dropped, and a thread must still drop its contexts.
    pub(super) fn must_end(&self) -> bool {
        self.dropped && !self.ended && !self.reclaiming
    }
}

const_thread_local! {
    static INNERMOST: Cell<*const Frame> = Cell::new(ptr::null());
}

/// A call of [`Core::dropping`] on this thread's stack.
struct Frame {
    /// The address of the core.
    of: *const (),
    outer: *const Frame,
}

/// Restores the outer frame when `dropping` returns or unwinds.
struct Leave(*const Frame);

impl Drop for Leave {
    fn drop(&mut self) {
        INNERMOST.with(|innermost| innermost.set(self.0));
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

/// An empty list: no slots, no first one.
const EMPTY: u64 = NO_LINK as u64;

/// The number of lists of one CPU. Reclaim follows one link of each at a time, because each is a cache
/// miss.
pub(super) const LANES: usize = if cfg!(offlock_model) { 1 } else { 16 };

/// One CPU's dead slots. A list is a word with its length and the index of its first slot.
#[derive(Debug)]
pub(super) struct RetireLists {
    filling: [AtomicU64; LANES],
    /// Invariant 2 of [`reclaim`](crate::reclaim).
    pub(super) waiting: [AtomicU64; LANES],
}

impl RetireLists {
    pub(super) fn new() -> Self {
        let lists = || std::array::from_fn(|_| AtomicU64::new(EMPTY));
        Self { filling: lists(), waiting: lists() }
    }

    /// Returns the number of slots in the filling lists.
    pub(super) fn filled(&self) -> u64 {
        // Ordering: Relaxed; a hint, or ordered by the fence of the caller.
        self.filling.iter().map(|list| list.load(Ordering::Relaxed) >> 32).sum()
    }

    /// Adds `count` dead slots of one lane: `first`, which is linked to the others, up to `last`.
    /// Returns the new length of the list. Lock-free.
    ///
    /// # Safety
    ///
    /// The caller has made the slots dead, and since then holds an RCU guard: invariant 1 of
    /// [`reclaim`](crate::reclaim).
    #[inline]
    pub(super) unsafe fn splice<T>(
        &self,
        count: u32,
        first: u32,
        last: &Slot<T>,
        last_id: Id,
    ) -> u32 {
        let lane = &self.filling[first as usize % self.filling.len()];
        // Ordering: Relaxed; the exchange checks it.
        let mut list = lane.load(Ordering::Relaxed);
        loop {
            let longer = ((list >> 32) + u64::from(count)) << 32 | u64::from(first);
            // Ordering: Release pairs with the Acquire in `close`; it carries the dead states. No model
            // checks it, because their guards have fences. Relaxed on failure: the next attempt checks
            // again.
            let pushed =
                lane.compare_exchange_weak(list, longer, Ordering::Release, Ordering::Relaxed);
            match pushed {
                Ok(_) => break,
                Err(now) => list = now,
            }
        }
        // Ordering: Release pairs with the Acquire in `CtxRef::is_removed`; it carries what the removing
        // thread did before, because this store ends the release sequence of `Slot::kill`. The readers of
        // the link need no order but that of a grace period (invariant 1 of `reclaim`).
        let order = order!(Release, "retire: the link carries what came before the removal");
        last.state.store(NotLive::dead(last_id, list as u32).bits(), order);
        (list >> 32) as u32 + count
    }

    /// Moves the filling lists to the waiting lists, which are empty. Returns the number of slots.
    pub(super) fn close(&self) -> u64 {
        let mut slots = 0;
        for (filling, waiting) in self.filling.iter().zip(&self.waiting) {
            // Ordering: Acquire pairs with the Release in `splice`; it carries the dead states to the
            // grace period, which begins after it.
            let list = filling.swap(EMPTY, Ordering::Acquire);
            slots += list >> 32;
            // Ordering: Relaxed; invariant 2 of `reclaim`.
            waiting.store(list, Ordering::Relaxed);
        }
        slots
    }

    /// Empties the lists.
    pub(super) fn clear(&self) {
        for list in self.filling.iter().chain(&self.waiting) {
            // Ordering: Relaxed; no other thread uses the lists any more.
            list.store(EMPTY, Ordering::Relaxed);
        }
    }
}

/// The number of slabs in a queue: what fits beside the lock's word on its two cache lines.
pub(super) const QUEUE: usize = if cfg!(offlock_model) { 2 } else { 6 };

/// Vacant slots of a slab: a bit for each.
pub(super) type VacantBits<T> = (SlabPtr<T>, u64);

/// The lowest vacant slots.
#[derive(Debug)]
#[repr(C)]
pub(super) struct VacantQueue<T: Send + Sync + 'static> {
    left: u32,
    /// Descending: the lowest slab is at `left - 1`. Each has a slot.
    slabs: [VacantBits<T>; QUEUE],
}

impl<T: Send + Sync + 'static> VacantQueue<T> {
    pub(super) fn new() -> Self {
        Self { left: 0, slabs: [(NonNull::dangling(), 0); QUEUE] }
    }

    /// Returns the number of slots.
    pub(super) fn len(&self) -> u64 {
        self.slabs[..self.left as usize].iter().map(|(_, bits)| u64::from(bits.count_ones())).sum()
    }

    /// Takes the lowest slot: its slab, and its number there.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<(SlabPtr<T>, u32)> {
        let last = self.left.checked_sub(1)?;
        let (slab, bits) = self.slabs.get_mut(last as usize)?;
        let number = bits.trailing_zeros();
        *bits &= *bits - 1;
        if *bits == 0 {
            self.left = last;
        }
        Some((*slab, number))
    }

    /// Takes all slots of the lowest slab.
    pub(super) fn pop_slab(&mut self) -> Option<VacantBits<T>> {
        self.left = self.left.checked_sub(1)?;
        self.slabs.get(self.left as usize).copied()
    }

    /// Puts slots of ascending slabs into the queue, which is empty.
    pub(super) fn put(&mut self, ascending: &[VacantBits<T>]) {
        for (place, slab) in self.slabs.iter_mut().zip(ascending.iter().rev()) {
            *place = *slab;
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
