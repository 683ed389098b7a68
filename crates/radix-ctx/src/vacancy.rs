//! The search for the lowest vacant slot.
//!
//! A slab has a bit for each used slot, and the tree has a bit for each full slab. A search reads several
//! cache lines, which are remote when another CPU inserted last. So the lowest vacant slots are moved in
//! batches, under one lock, to a [`VacantQueue`](crate::core::VacantQueue) beside the lock:
//!
//! ```text
//!   State -> queue: | 7 9 12 13 ... |   an insert: lock, take the lowest, unlock
//!                      ^ refilled: their bits in `used` are set already
//! ```
//!
//! An operation that vacates a slot first returns the queue's slots to the
//! slabs. So an insert always gets the lowest index.
//!
//! # Invariants
//!
//! 1. No vacant index is below the last one in the queue, except for the slots that a running reclaim
//!    makes vacant.
//! 2. A slot in the queue is vacant, and its bit in `used` is set.

use percpu::rcu::{self, Batch};
use percpu::sync::atomic::Ordering;
use percpu::sync::order;
use percpu::{AllocError, PerCpu};

use crate::core::{Core, QUEUE, State};
use crate::error::InsertRefused;
use crate::id::{Id, MAX_GENERATION};
use crate::retire_list::RetireLists;
use crate::slab::{
    self, Begin, FULL, NotLive, SLAB_BITS, SLOTS, Slab, SlabPtr, next_generation, slab_of,
};
use crate::tree::{Edit, floor_word};

/// A vacant slot that belongs to the caller. The drop makes it vacant again, unless it was filled.
pub(super) struct Claim<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slab: SlabPtr<T>,
    id: Id,
}

// SAFETY: the claim owns its slot, and `fill` moves a `T: Send` into it.
unsafe impl<T: Send + Sync + 'static> Send for Claim<'_, T> {}
// SAFETY: `&Claim` gives access to the id and the pointer only.
unsafe impl<T: Send + Sync + 'static> Sync for Claim<'_, T> {}

/// A slab that was made before the lock was taken and is not in the tree yet.
struct Spare<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    key: u64,
    begin: Begin,
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Takes the lowest vacant slot. Blocks shortly on the lock; allocates a slab if no slab has a vacant
    /// slot.
    #[inline]
    pub(super) fn claim(&self) -> Result<Claim<'_, T>, InsertRefused> {
        let popped = self.lock().queue.pop();
        match popped {
            Some(index) => Ok(self.claim_used(index)),
            None => self.claim_slow(),
        }
    }

    /// Makes the claim of a slot whose bit this thread has set.
    #[inline]
    fn claim_used(&self, index: u32) -> Claim<'_, T> {
        let _guard = rcu::pin(); // keeps the nodes above the slab
        // SAFETY: `_guard` is an RCU guard. The slab stays after it, because the slot is used.
        let slab = unsafe { self.slabs.slab(index) }.expect("a used slot has a slab");
        Claim { core: self, slab: slab.into(), id: Id::new(index, next_generation(slab, index)) }
    }

    #[cold]
    #[inline(never)]
    fn claim_slow(&self) -> Result<Claim<'_, T>, InsertRefused> {
        self.make_lists()?;
        let mut spare: Option<Spare<T>> = None;
        let mut has_advanced = false;
        loop {
            let mut state = self.lock();
            self.refill(&mut state);
            if let Some(index) = state.queue.pop() {
                drop(state);
                return Ok(self.claim_used(index));
            }
            // The queue is empty, so the lowest vacant index has no slab.
            let wanted = self.missing_slab(&state);
            if let (Some(wanted), Some(made)) = (wanted, &spare) {
                if wanted == (made.key, made.begin) {
                    self.add_slab(&mut state, made)?;
                    std::mem::forget(spare.take());
                    continue;
                }
            }
            let (used, pending) = (state.used, self.pending(&state));
            drop(state);
            // Reclaims dead slots before it allocates, if there are many or no slab can be made.
            if !has_advanced && pending != 0 && (wanted.is_none() || pending >= used / 8) {
                has_advanced = true;
                if self.advance() != 0 {
                    continue;
                }
            }
            let (key, begin) = wanted.ok_or(InsertRefused::Exhausted { pending })?;
            spare = Some(self.make_slab(key, begin)?);
        }
    }

    #[cold]
    fn make_lists(&self) -> Result<(), AllocError> {
        if self.lists.get().is_none() {
            let made = PerCpu::try_new(|_| RetireLists::new())?;
            let _ = self.lists.set(made); // fails if another thread was faster, which is as good
        }
        Ok(())
    }

    /// Returns the right to change the tree. Only `release` unlinks nodes, so its callers retire them
    /// after the unlock; the other callers may drop the edit under the lock.
    fn edit<'a>(&'a self, _: &'a State<T>) -> Edit<'a> {
        // SAFETY: the state is borrowed while the edit lives, and a borrow of this core's state proves
        // that the caller holds the lock.
        unsafe { self.slabs.tree().edit() }
    }

    /// Moves the lowest vacant slots into an empty queue, up to the first key without a slab.
    fn refill(&self, state: &mut State<T>) {
        if state.queue.len() != 0 {
            return;
        }
        let mut taken = [0; QUEUE];
        let mut number = 0;
        let last = self.max_index;
        let (mut from, to) = (0, u64::from(last) >> SLAB_BITS);
        while number < QUEUE && from <= to {
            let edit = self.edit(state);
            let Some(key) = edit.first_not_full(from, to) else { break };
            let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
            let Some(slab) = slab_of::<T>(word) else { break };
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            let it = unsafe { slab.as_ref() };
            let mut bits = 0;
            while number < QUEUE {
                let Some(index) = vacant_in(it.used() | bits, it.index(0), last) else { break };
                bits |= 1 << (index as usize % SLOTS);
                taken[number] = index;
                number += 1;
            }
            drop(edit);
            self.mark_used(state, slab, bits);
            from = key + 1;
        }
        state.queue.fill(&taken[..number]);
    }

    /// Returns the slots of the queue to their slabs.
    fn empty_queue(&self, state: &mut State<T>, batch: &mut Batch) {
        while let Some(index) = state.queue.pop() {
            let _guard = rcu::pin(); // keeps the nodes above the slab
            // SAFETY: `_guard` is an RCU guard. The slab stays after it, because this thread holds the
            // lock.
            let slab = unsafe { self.slabs.slab(index) }.expect("a used slot has a slab");
            self.mark_vacant(state, slab.into(), 1 << (index as usize % SLOTS), batch);
        }
    }

    /// Returns the key of the first slab that is missing, and the first generations of its slots.
    fn missing_slab(&self, state: &State<T>) -> Option<(u64, Begin)> {
        let edit = self.edit(state);
        let last = u64::from(self.max_index) >> SLAB_BITS;
        let mut from = 0;
        while let Some(key) = edit.first_not_full(from, last) {
            let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
            if slab_of::<T>(word).is_none() {
                return Some((key, Begin::new(key, edit.floor_of(key) as u32, state.unused_from)));
            }
            from = key + 1; // its vacant slots are above the largest index
        }
        None
    }

    fn mark_used(&self, state: &mut State<T>, slab: SlabPtr<T>, bits: u64) {
        // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
        let it = unsafe { slab.as_ref() };
        let used = it.used() | bits;
        it.set_used(used);
        state.used += u64::from(bits.count_ones());
        if state.empty == Some(slab) && bits != 0 {
            state.empty = None;
        }
        if used == FULL {
            let edit = self.edit(state);
            if let Some(slot) = edit.slot(it.key()) {
                edit.set_full(slot);
            }
        }
    }

    /// Clears bits of `used`. A slab without a used slot goes to `batch`, which the caller drops after
    /// the unlock.
    fn mark_vacant(&self, state: &mut State<T>, slab: SlabPtr<T>, bits: u64, batch: &mut Batch) {
        // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
        let it = unsafe { slab.as_ref() };
        let used = it.used();
        it.set_used(used & !bits);
        state.used -= u64::from((used & bits).count_ones());
        if used == FULL {
            let edit = self.edit(state);
            if let Some(slot) = edit.slot(it.key()) {
                edit.clear_full(slot);
            }
        }
        if used & !bits == 0 && !state.dropped {
            self.emptied(state, slab, batch);
        }
    }

    fn make_slab(&self, key: u64, begin: Begin) -> Result<Spare<T>, AllocError> {
        let first = (key << SLAB_BITS) as u32;
        let slab = Slab::try_new(self.this().cast(), first, begin)?;
        Ok(Spare { slab, key, begin })
    }

    /// Adds a slab to the tree, which then owns it: the caller forgets the spare.
    fn add_slab(&self, state: &mut State<T>, spare: &Spare<T>) -> Result<(), AllocError> {
        let edit = self.edit(state);
        let slot = edit.make_slot(spare.key)?;
        edit.set(slot, spare.slab.as_ptr().cast());
        drop(edit);
        state.slabs += 1;
        Ok(())
    }

    /// Makes slots vacant, one slab after the other. The caller drops `batch` after the unlock.
    pub(super) fn vacate(
        &self,
        state: &mut State<T>,
        slots: impl Iterator<Item = (SlabPtr<T>, u64)>,
        empties_queue: bool,
        batch: &mut Batch,
    ) {
        if empties_queue {
            self.empty_queue(state, batch);
        }
        for (slab, bits) in slots {
            self.mark_vacant(state, slab, bits, batch);
        }
    }

    /// Keeps the lower of two empty slabs, because the next insert may need it, and releases the other.
    fn emptied(&self, state: &mut State<T>, slab: SlabPtr<T>, batch: &mut Batch) {
        let Some(kept) = state.empty.replace(slab) else { return };
        if kept == slab {
            return;
        }
        // SAFETY: invariant 4 of `slab`: both are in the tree, and this thread holds the lock.
        let key = |slab: SlabPtr<T>| unsafe { slab.as_ref() }.key();
        let (stays, goes) = if key(kept) < key(slab) { (kept, slab) } else { (slab, kept) };
        state.empty = Some(stays);
        self.release(state, key(goes), batch);
    }

    /// Takes a slab without a used slot out of the tree. Leaves the highest of its generations there as a
    /// floor, for the indexes that were used.
    ///
    /// The slab is freed through the pointer in the tree, which is that of its allocation. A [`SlabPtr`]
    /// that comes from a `&Slab` must not free it.
    fn release(&self, state: &mut State<T>, key: u64, batch: &mut Batch) {
        let edit = self.edit(state);
        let Some(slot) = edit.slot(key) else { return };
        let Some(slab) = slab_of::<T>(edit.get(slot)) else { return };
        // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
        let it = unsafe { slab.as_ref() };
        let indexes = (0..SLOTS).map(|number| it.index(number));
        let floor = indexes.clone().map(|index| next_generation(it, index)).max();
        let floor = floor.unwrap_or(Id::FIRST_GENERATION);
        // A slot whose next generation is the first one was never used.
        let used = indexes.filter(|&index| next_generation(it, index) > Id::FIRST_GENERATION).max();
        edit.set(slot, floor_word(u64::from(floor)));
        batch.append(&mut edit.finish());
        if let Some(index) = used {
            state.unused_from = state.unused_from.max(index + 1); // there is one: see `MAX_INDEX`
        }
        state.slabs -= 1;
        let bytes = Slab::<T>::BYTES + it.refs_bytes();
        // SAFETY: the slab is not freed, and the tree held the pointer.
        let head = unsafe { slab::head_of(slab) };
        // SAFETY: the slab has just left the tree under the lock, so only this thread retires it.
        unsafe { batch.push(head, bytes) };
    }
}

/// Returns the lowest vacant index up to `last`, in the slab whose first index is `lowest`.
fn vacant_in(used: u64, lowest: u32, last: u32) -> Option<u32> {
    let vacant = !used & FULL;
    (vacant != 0).then(|| lowest + vacant.trailing_zeros()).filter(|index| *index <= last)
}

impl<T: Send + Sync + 'static> Drop for Spare<T> {
    fn drop(&mut self) {
        // SAFETY: the slab was never in the tree: a spare whose slab was added is forgotten.
        unsafe { slab::discard(self.slab) };
    }
}

impl<'a, T: Send + Sync + 'static> Claim<'a, T> {
    pub(super) fn id(&self) -> Id {
        self.id
    }

    pub(super) fn slab(&self) -> SlabPtr<T> {
        self.slab
    }

    /// Writes the value of the slot and makes it live.
    #[inline]
    pub(super) fn fill(self, value: T) -> Id {
        let id = self.id;
        // SAFETY: invariant 4 of `slab`: the claimed slot is used.
        let slab = unsafe { self.slab.as_ref() };
        std::mem::forget(self);
        let slot = slab.slot(id.index());
        // SAFETY: the slot is vacant and belongs to this claim.
        unsafe { slot.write(value) };
        // Ordering: Release pairs with the Acquire in `SlabTree::find`; it carries the value.
        slot.state.store(id.to_bits(), order!(Release, "insert: the value is written"));
        id
    }
}

impl<T: Send + Sync + 'static> Drop for Claim<'_, T> {
    /// Makes the slot vacant with the next generation: the id of this claim may be known, so no other
    /// context gets it.
    fn drop(&mut self) {
        let mut batch = Batch::new();
        let (index, next) = (self.id.index(), self.id.generation() + 1);
        let mut state = self.core.lock();
        // SAFETY: invariant 4 of `slab`: the claimed slot is used.
        let slot = unsafe { self.slab.as_ref() }.slot(index);
        // Ordering: Relaxed; the lock orders it, and lookups fail either way.
        slot.state.store(NotLive::vacant(next).bits(), Ordering::Relaxed);
        if next < MAX_GENERATION {
            let slot = (self.slab, 1 << (index as usize % SLOTS));
            self.core.vacate(&mut state, std::iter::once(slot), true, &mut batch);
        } else {
            state.exhaust(1);
        }
        drop(state);
        drop(batch);
    }
}
