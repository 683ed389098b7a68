//! What a table and the references into it share: the tree of slabs, which slots are in use, and
//! what waits to be reclaimed.
//!
//! Lookups read `tree` and nothing else. Which slots are vacant is known under `lock`; so are the
//! stages of reclaim, which [`limbo`](super::limbo) moves on.
//!
//! # Invariants
//!
//! 1. A slab's entry in `tree` is full exactly if its `used` is.
//! 2. A slab with a used slot stays in the tree. One that loses its last leaves it, and a floor in its
//!    place, but for one: `empty`.
//! 3. The core is freed by its tick, a grace period after the table was dropped and the last context
//!    with it: who holds no borrow of the table stays pinned from its last change until it is done
//!    with the core.
//! 4. `this` points to the core itself and is derived from its allocation. The core is freed through
//!    such a pointer only: one made from a `&Core` may read the core, but not free it.

use std::ptr::NonNull;

use crossbeam_utils::CachePadded;
use percpu::PerCpu;
use percpu::rcu::{GracePeriod, RetireHead};
use percpu::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use percpu::sync::native::OnceLock;
use percpu::sync::quarantine::Watched;
use percpu::sync::{WordGuard, WordLock};

use super::error::LookupError;
use super::id::{Id, MAX_GENERATION};
use super::limbo::Limbo;
use super::quota::Quota;
use super::slab::{self, Gone, MAX_INDEX, SLAB_BITS, Slab, SlabPtr, Slot};
use super::vacancy::Queue;
use super::waiters::Waiters;
use crate::tree::{Cursor, Tree, Which, floor_in};

/// What a table was made to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) max_index: u32,
    /// Generations stay below it; it fits into a state as the next of a context's generation.
    pub(super) generations: u32,
}

impl Limits {
    pub(super) const NONE: Self = Self { max_index: MAX_INDEX, generations: MAX_GENERATION };
}

#[repr(C)]
pub(super) struct Core<T: Send + Sync + 'static> {
    tree: Tree<true>,
    /// Made with the first slab, so that an empty table is small.
    pub(super) limbo: OnceLock<PerCpu<Limbo>>,
    pub(super) quota: Quota,
    pub(super) limits: Limits,
    pub(super) waiters: Waiters,
    /// Some slab has counts: whoever folds runs the barrier before.
    pub(super) has_refs: AtomicBool,
    /// The tick is on its way.
    pub(super) ticking: AtomicBool,
    /// A CPU's list of this many dead slots is worth a look.
    pub(super) batch: AtomicU32,
    pub(super) tick: RetireHead,
    /// Invariant 4. Written by [`place`](Self::place).
    this: NonNull<Self>,
    // On cache lines of their own, away from what lookups read.
    lock: CachePadded<WordLock<State<T>>>,
    pub(super) tally: CachePadded<Tally>,
}

/// Statistics; written by rare operations, read by rarer ones.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Claimed by reservations, not live.
    pub(super) reserved: AtomicU64,
    /// Dead, folded, and in use by references.
    pub(super) referenced: AtomicU64,
    /// Drops of values that panicked.
    pub(super) panics: AtomicU64,
}

// SAFETY: the raw pointers in it are to slabs, which hold a `T`, `Send` and `Sync`, and atomics.
unsafe impl<T: Send + Sync + 'static> Send for Core<T> {}
// SAFETY: as above; what is not atomic is under `lock`.
unsafe impl<T: Send + Sync + 'static> Sync for Core<T> {}

/// What is under the lock.
#[repr(C)]
pub(super) struct State<T: Send + Sync + 'static> {
    /// The lowest vacant slots. First: it begins on the line of the lock's word.
    pub(super) queue: Queue,
    /// Bits set in the slabs' `used`, but for retired slots.
    pub(super) used: u64,
    pub(super) retired: u64,
    /// Those of `used` that are dead and in no list that fills: they wait, or are referenced.
    pub(super) dead: u64,
    /// The one slab without a used slot that is kept.
    pub(super) empty: Option<SlabPtr<T>>,
    pub(super) slabs: u64,
    /// Where a cyclic insert looks first.
    pub(super) cursor: u32,
    /// Indexes from here on were never used in a slab that was released.
    pub(super) unused_from: u32,
    /// There are dead slots in the `waiting` lists, for this.
    pub(super) waiting: Option<GracePeriod>,
    /// A thread owns the `waiting` lists.
    pub(super) reclaiming: bool,
    /// There is no table any more.
    pub(super) dropped: bool,
    /// And who ends it is known.
    pub(super) ended: bool,
    /// And the tick that frees the core is on its way: the grace period of invariant 3.
    pub(super) last_tick: bool,
}

impl<T: Send + Sync + 'static> Core<T> {
    pub(super) fn new(limits: Limits, quota: Quota, tick: RetireHead) -> Self {
        Self {
            tree: Tree::new(),
            limbo: OnceLock::new(),
            quota,
            limits,
            waiters: Waiters::new(),
            has_refs: AtomicBool::new(false),
            ticking: AtomicBool::new(false),
            batch: AtomicU32::new(Limbo::BATCH),
            tally: CachePadded::new(Tally::default()),
            tick,
            this: NonNull::dangling(),
            lock: CachePadded::new(WordLock::new(State {
                queue: Queue::new(),
                used: 0,
                retired: 0,
                dead: 0,
                empty: None,
                slabs: 0,
                cursor: 0,
                unused_from: 0,
                waiting: None,
                reclaiming: false,
                dropped: false,
                ended: false,
                last_tick: false,
            })),
        }
    }

    /// Completes a core that was just allocated, and returns the pointer to it that may free it.
    pub(super) fn place(core: Box<Watched<Self>>) -> NonNull<Self> {
        let core = NonNull::from(Box::leak(core));
        // SAFETY: the core lies at that offset of its allocation.
        let this = unsafe { core.byte_add(Watched::<Self>::OFFSET) }.cast::<Self>();
        // SAFETY: inside the core.
        let own = unsafe { &raw mut (*this.as_ptr()).this };
        // SAFETY: no other thread knows the core yet, and no reference to it exists.
        unsafe { own.write(this) };
        this
    }

    /// The core as a pointer that may free it (invariant 4).
    pub(super) fn this(&self) -> NonNull<Self> {
        self.this
    }

    #[inline]
    pub(super) fn lock(&self) -> WordGuard<'_, State<T>> {
        self.lock.lock()
    }

    /// The tree, for who looks into it.
    pub(super) fn tree(&self) -> &Tree<true> {
        &self.tree
    }

    /// A walk over the slabs with keys in a range.
    ///
    /// # Safety
    ///
    /// For `'g` the caller holds an RCU guard.
    pub(super) unsafe fn slabs<'g>(&'g self, from: u64, to: u64) -> Cursor<'g, true> {
        // SAFETY: the caller's guard.
        unsafe { self.tree.cursor(from, to, Which::Present) }
    }

    /// The slab that an index belongs to. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard.
    #[inline(always)]
    pub(super) unsafe fn slab<'a>(&self, index: u32) -> Option<&'a Watched<Slab<T>>> {
        // SAFETY: the caller's guard.
        let word = unsafe { self.tree.load(u64::from(index) >> SLAB_BITS) };
        // SAFETY: invariant 4 of `slab`: found under the caller's guard.
        slab_of(word).map(|slab| unsafe { slab.as_ref() })
    }

    /// The slot of a live context. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard.
    #[inline(always)]
    pub(super) unsafe fn find<'a>(
        &self,
        id: Id,
    ) -> Result<(&'a Watched<Slab<T>>, &'a Slot<T>), LookupError> {
        // SAFETY: the caller's guard.
        if let Some(slab) = unsafe { self.slab(id.index()) } {
            let slot = slab.slot(id.index());
            // Ordering: Acquire pairs with the Release in `Claim::fill`; it carries the value.
            let state = slot.state.load(Ordering::Acquire);
            if state == id.to_bits() {
                return Ok((slab, slot));
            }
        }
        // SAFETY: the caller's guard.
        Err(unsafe { self.why(id) })
    }

    /// Why an id is not live.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn why(&self, id: Id) -> LookupError {
        // SAFETY: the caller's guard.
        let word = unsafe { self.tree.load_or_floor(u64::from(id.index()) >> SLAB_BITS) };
        let next = match slab_of::<T>(word) {
            // SAFETY: invariant 4 of `slab`: found under the caller's guard.
            Some(slab) => next_of(unsafe { slab.as_ref() }, id.index()),
            None => floor_in(word) as u32,
        };
        if id.generation() < next { LookupError::Stale } else { LookupError::NotFound }
    }

    /// Dead slots that are not vacant yet. Exact while nobody removes.
    pub(super) fn pending(&self, state: &State<T>) -> u64 {
        state.dead + self.filled()
    }

    /// Live contexts. Exact while nobody inserts, reserves or removes.
    pub(super) fn len(&self, state: &State<T>) -> u64 {
        // Ordering: Relaxed; a statistic.
        let reserved = self.tally.reserved.load(Ordering::Relaxed);
        state.in_use().saturating_sub(self.pending(state) + reserved)
    }
}

impl<T: Send + Sync + 'static> State<T> {
    /// Slots that are live, pending, or claimed.
    pub(super) fn in_use(&self) -> u64 {
        self.used - self.queue.len() as u64
    }

    /// The table and its last context are gone, and nobody is at them.
    pub(super) fn is_over(&self) -> bool {
        self.ended && !self.reclaiming && self.in_use() == 0
    }

    /// Used slots that will never be vacant again.
    pub(super) fn retire(&mut self, slots: u64) {
        self.used -= slots;
        self.retired += slots;
    }
}

/// The slab that a word of the tree leads to; nothing for none, or a floor.
#[inline(always)]
pub(super) fn slab_of<T: Send + Sync + 'static>(word: *mut ()) -> Option<SlabPtr<T>> {
    // SAFETY: a tree with floors has no null words.
    (word.addr() & 1 == 0).then(|| unsafe { NonNull::new_unchecked(word.cast()) })
}

/// The generation of the next context at `index`, or of the one that is there: those below are stale.
pub(super) fn next_of<T: Send + Sync + 'static>(slab: &Slab<T>, index: u32) -> u32 {
    // Ordering: Relaxed; under the lock, or a hint.
    let state = slab.slot(index).state.load(Ordering::Relaxed);
    match Gone::read(state) {
        Some(gone) => gone.next(),
        None => Id::from_live(state).generation(),
    }
}

impl<T: Send + Sync + 'static> Drop for Core<T> {
    fn drop(&mut self) {
        self.tree.destroy(|_, word| {
            if let Some(slab) = slab_of::<T>(word) {
                // SAFETY: nobody has the core any more, nor what is in it; its slots are vacant.
                unsafe { slab::free_slab(slab) };
            }
        });
    }
}
