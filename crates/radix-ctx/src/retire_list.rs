//! The per-CPU lists of dead slots.
//!
//! The link of a list is in the slot's state, so a list takes no memory. The links are read after a
//! grace period only: invariant 1 of [`reclaim`](crate::reclaim).

use offlock_percpu::rcu;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::order;

use crate::id::Id;
use crate::slab::{NO_LINK, NotLive, SLAB_BITS, SlabPtr, SlabTree, Slot};

/// An empty list: no slots, no first one.
pub(super) const EMPTY: u64 = NO_LINK as u64;

/// The number of lists of one CPU. Reclaim follows one link of each at a time, because each is a cache
/// miss.
pub(super) const LANES: usize = if cfg!(offlock_model) { 1 } else { 8 };

/// The number of dead slots that reclaim looks up at a time, and of slabs whose slots it makes vacant
/// under one lock. A guess: some hundred nanoseconds.
pub(super) const BATCH: usize = 32;

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

/// A walk over the waiting lists of a CPU.
pub(super) struct Walk<T: Send + Sync + 'static> {
    /// The next slot of each list, and its slab.
    next: [(u32, Option<SlabPtr<T>>); LANES],
}

/// A dead slot that a walk has found: its slab, its index and its state.
pub(super) type Dead<T> = (SlabPtr<T>, u32, NotLive);

impl<T: Send + Sync + 'static> Walk<T> {
    /// Begins a walk over lists that belong to the calling thread and whose grace period is over.
    pub(super) fn new(slabs: &SlabTree<T>, lists: &RetireLists) -> Self {
        let _guard = rcu::pin();
        let next = |list: &AtomicU64| {
            // Ordering: Relaxed; invariant 2 of `reclaim`.
            let first = list.load(Ordering::Relaxed) as u32;
            // SAFETY: `_guard` is an RCU guard.
            unsafe { Self::at(slabs, first) }
        };
        Self { next: std::array::from_fn(|lane| next(&lists.waiting[lane])) }
    }

    /// Returns a slot of a list with its slab. The slab stays after the guard, because the slot is used.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    unsafe fn at(slabs: &SlabTree<T>, index: u32) -> (u32, Option<SlabPtr<T>>) {
        if index == NO_LINK {
            return (index, None);
        }
        // SAFETY: the caller holds a guard.
        let slab = unsafe { slabs.slab(index) };
        if let Some(slab) = slab {
            slab.prefetch(index);
        }
        (index, slab.map(SlabPtr::from))
    }

    /// Finds the next dead slots and returns how many. 0 at the end.
    pub(super) fn fill(
        &mut self,
        slabs: &SlabTree<T>,
        found: &mut [Option<Dead<T>>; BATCH],
    ) -> usize {
        let _guard = rcu::pin();
        let mut count = 0;
        loop {
            let before = count;
            for next in &mut self.next {
                let (index, Some(slab)) = *next else { continue };
                if count == BATCH {
                    return count;
                }
                // SAFETY: invariant 4 of `slab`: a slot in a list is dead, so used.
                let slot = unsafe { slab.as_ref() }.slot(index);
                // Ordering: Relaxed; the grace period orders the link.
                let state = slot.state.load(Ordering::Relaxed);
                let Some(state) = NotLive::read(state) else {
                    debug_assert!(false, "{index} is in a list, and live");
                    *next = (NO_LINK, None);
                    continue;
                };
                let link = state.link();
                let is_near = link != NO_LINK && link >> SLAB_BITS == index >> SLAB_BITS;
                *next = if is_near {
                    (link, Some(slab))
                } else {
                    // SAFETY: `_guard` is an RCU guard.
                    unsafe { Self::at(slabs, link) }
                };
                found[count] = Some((slab, index, state));
                count += 1;
            }
            if count == before {
                return count;
            }
        }
    }
}
