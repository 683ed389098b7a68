//! The search for the lowest vacant slot.
//!
//! A slab has a bit for each used slot, and a node of the tree one for each child with a vacancy. A search
//! reads several cache lines, which are remote when another CPU inserted last. So the vacant slots of the lowest
//! slabs are moved together, under one lock, to a [`VacantQueue`](crate::core::VacantQueue) beside the lock:
//!
//! ```text
//!   State -> queue: | slab 0: 7 9 | slab 3: 12 13 ... |   an insert: lock, take the lowest, unlock
//!                             ^ refilled: their bits in `used` are set already
//! ```
//!
//! An operation that vacates a slot first returns the queue's slots to the slabs. So an insert always gets
//! the lowest index.
//!
//! # Invariants
//!
//! 1. Each vacant index outside of the queue is above all those in it, except for the slots that a
//!    running reclaim makes vacant.
//! 2. A slot in the queue is vacant, and its bit in `used` is set.

use std::ptr::NonNull;

use offlock_percpu::rcu::Batch;
use offlock_percpu::{AllocError, PerCpu};
use offlock_sync::atomic::Ordering;
use offlock_sync::{check, order};

use crate::core::{Core, QUEUE, RetireLists, State};
use crate::error::InsertRefused;
use crate::id::{Id, MAX_GENERATION};
use crate::slab::{
    self, Begin, FULL, NotLive, SLAB_BITS, SLOTS, Slab, SlabPtr, next_generation, slab_of,
};
use crate::tree::{floor_in, floor_word, is_present};

/// A vacant slot that belongs to the caller. The drop makes it vacant again, unless it was filled.
pub(super) struct Claim<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slab: SlabPtr<T>,
    id: Id,
}

/// A slab that was made before the lock was taken and is not in the tree yet.
struct Spare<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    key: u64,
    begin: Begin,
}

/// What an insert does next, while it has the lock.
enum Step<T: Send + Sync + 'static> {
    /// Takes the slot of this number in a slab. Its bit in `used` is set.
    Take(SlabPtr<T>, u32),
    /// Adds a slab for this key to the tree. If the insert has made none for it, makes one without the lock.
    AddSlab(u64, Begin),
    /// Reclaims before it allocates: many slots are dead, or no slab can be added.
    Reclaim,
    /// Gives up: every index is in use.
    Refuse { pending: u64 },
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Takes the lowest vacant slot. Blocks shortly on the lock; allocates a slab if the lowest vacant
    /// index has none.
    #[inline]
    pub(super) fn claim(&self) -> Result<Claim<'_, T>, InsertRefused> {
        let popped = self.lock().queue.pop();
        match popped {
            Some((slab, number)) => Ok(self.claim_used(slab, number)),
            None => self.claim_slow(),
        }
    }

    /// Returns the claim of a slot that was taken from the queue. Its bit in `used` is set.
    #[inline(always)]
    fn claim_used(&self, slab: SlabPtr<T>, number: u32) -> Claim<'_, T> {
        // SAFETY: invariant 4 of `slab`: the slot is used.
        let slot = unsafe { slab.as_ref() }.slot(number);
        // Ordering: Relaxed; the lock orders it.
        let state = NotLive::read(slot.state.load(Ordering::Relaxed));
        Claim { core: self, slab, id: state.expect("a claimed slot is vacant").next_id() }
    }

    #[cold]
    #[inline(never)]
    fn claim_slow(&self) -> Result<Claim<'_, T>, InsertRefused> {
        self.make_lists()?;
        let mut spare: Option<Spare<T>> = None;
        let mut has_advanced = false;
        loop {
            let mut state = self.lock();
            match self.next_step(&mut state, has_advanced) {
                Step::Take(slab, number) => {
                    drop(state);
                    return Ok(self.claim_used(slab, number));
                }
                Step::AddSlab(key, begin) => match spare.take() {
                    // The lock was free since the spare was made: another insert may have added that slab, and
                    // others may have filled it, or emptied it and left a floor.
                    Some(made)
                        if check!(
                            "insert: the spare slab is the missing one",
                            made.is_for(key, begin)
                        ) =>
                    {
                        self.add_slab(&mut state, made)?;
                        // Under the same lock: behind an unlock, lower slots may be vacant, and an empty slab
                        // that `State::empty` does not know is never released.
                        if let Some((slab, number)) = self.refill(&mut state) {
                            drop(state);
                            return Ok(self.claim_used(slab, number));
                        }
                    }
                    outdated => {
                        drop(state);
                        drop(outdated);
                        spare = Some(self.make_slab(key, begin)?);
                    }
                },
                Step::Reclaim => {
                    drop(state);
                    has_advanced = true;
                    self.advance();
                }
                Step::Refuse { pending } => return Err(InsertRefused::Exhausted { pending }),
            }
        }
    }

    /// Decides what an insert does next.
    fn next_step(&self, state: &mut State<T>, has_advanced: bool) -> Step<T> {
        if let Some((slab, number)) = state.queue.pop().or_else(|| self.refill(state)) {
            return Step::Take(slab, number);
        }
        let pending = self.pending(state);
        // The queue cannot be filled, so the lowest vacant index has no slab.
        let key = self.slabs.tree().lowest_vacant();
        let word = self.slabs.tree().load(key);
        // Otherwise the slab's vacant slots are above the largest index.
        let is_missing = key <= u64::from(self.max_index) >> SLAB_BITS && !is_present(word);
        if !has_advanced && pending != 0 && (!is_missing || pending >= state.used / 8) {
            Step::Reclaim
        } else if is_missing {
            Step::AddSlab(key, Begin::new(key, floor_in(word), state.unused_from))
        } else {
            Step::Refuse { pending }
        }
    }

    /// Returns the number of dead slots. Exact while no thread removes a context.
    pub(super) fn pending(&self, state: &State<T>) -> u64 {
        state.dead + self.filled()
    }

    #[cold]
    fn make_lists(&self) -> Result<(), AllocError> {
        if self.lists.get().is_none() {
            let made = PerCpu::try_new(|_| RetireLists::new())?;
            let _ = self.lists.set(made); // fails if another thread was faster, which is as good
        }
        Ok(())
    }

    /// Moves the vacant slots of the lowest slabs into the empty queue, up to the first key without a slab. Takes
    /// the lowest of them, if there are any.
    fn refill(&self, state: &mut State<T>) -> Option<(SlabPtr<T>, u32)> {
        let mut taken = [(NonNull::dangling(), 0); QUEUE];
        let mut number = 0;
        while number < QUEUE {
            let key = self.slabs.tree().lowest_vacant();
            let Some(slab) = slab_of::<T>(self.slabs.tree().load(key)) else { break };
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            let it = unsafe { slab.as_ref() };
            let usable = u64::from(self.max_index) - (key << SLAB_BITS) + 1;
            let bits = !it.used() & (FULL >> (SLOTS as u64).saturating_sub(usable));
            if bits == 0 {
                break; // its vacant slots are above the largest index
            }
            self.mark_used(state, slab, bits);
            taken[number] = (slab, bits);
            number += 1;
        }
        state.queue.put(&taken[..number]);
        state.queue.pop()
    }

    /// Returns the slots of the queue to their slabs.
    pub(super) fn empty_queue(&self, state: &mut State<T>, batch: &mut Batch) {
        while let Some((slab, bits)) = state.queue.pop_slab() {
            state.used -= u64::from(bits.count_ones());
            self.mark_vacant(state, slab, bits, batch);
        }
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
            self.slabs.tree().set_vacant(it.key(), false);
        }
    }

    /// Clears bits of a slab's `used`; the caller subtracts them from the table's. A slab without a used slot goes
    /// to `batch`, which the caller drops after the unlock.
    pub(super) fn mark_vacant(
        &self,
        state: &mut State<T>,
        slab: SlabPtr<T>,
        bits: u64,
        batch: &mut Batch,
    ) {
        // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
        let it = unsafe { slab.as_ref() };
        let used = it.used();
        it.set_used(used & !bits);
        if used == FULL {
            self.slabs.tree().set_vacant(it.key(), true);
        }
        // The slot of a claim is used, so the slab stays while an insert writes to it without a guard.
        if check!("vacate: no slot of the slab is used", used & !bits == 0) && !state.dropped {
            self.emptied(state, slab, batch);
        }
    }

    fn make_slab(&self, key: u64, begin: Begin) -> Result<Spare<T>, AllocError> {
        let first = (key << SLAB_BITS) as u32;
        let slab = Slab::try_new(self.this().cast(), first, begin)?;
        Ok(Spare { slab, key, begin })
    }

    /// Adds a slab to the tree, which then owns it.
    fn add_slab(&self, state: &mut State<T>, spare: Spare<T>) -> Result<(), AllocError> {
        self.slabs.tree().make_slot(spare.key)?;
        self.slabs.tree().set(spare.key, spare.slab.as_ptr().cast());
        std::mem::forget(spare);
        state.slabs += 1;
        Ok(())
    }

    /// Clears the bit of a slot in `state`, which is stored already. The caller drops `batch` after the unlock.
    pub(super) fn vacate(
        &self,
        state: &mut State<T>,
        slab: SlabPtr<T>,
        index: u32,
        slot: NotLive,
        batch: &mut Batch,
    ) {
        state.used -= 1;
        if slot.next() < MAX_GENERATION {
            self.empty_queue(state, batch);
            self.mark_vacant(state, slab, 1 << (index as usize % SLOTS), batch);
        } else {
            state.exhausted += 1;
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
        let Some(slab) = slab_of::<T>(self.slabs.tree().load(key)) else { return };
        // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
        let it = unsafe { slab.as_ref() };
        let indexes = (0..SLOTS).map(|number| it.index(number));
        let floor = indexes.clone().map(|index| next_generation(it, index)).max();
        let floor = floor.unwrap_or(Id::FIRST_GENERATION);
        // A slot whose next generation is the first one was never used.
        let used = indexes.filter(|&index| next_generation(it, index) > Id::FIRST_GENERATION).max();
        self.slabs.tree().set(key, floor_word(floor));
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

impl<T: Send + Sync + 'static> Spare<T> {
    fn is_for(&self, key: u64, begin: Begin) -> bool {
        (self.key, self.begin) == (key, begin)
    }
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
    pub(super) fn publish(self, value: T) -> Id {
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
    /// Makes the slot vacant with the next generation.
    fn drop(&mut self) {
        let mut batch = Batch::new();
        let index = self.id.index();
        let vacant = NotLive::vacant(self.id.generation() + 1, index);
        let mut state = self.core.lock();
        // SAFETY: invariant 4 of `slab`: the claimed slot is used.
        let slot = unsafe { self.slab.as_ref() }.slot(index);
        // Ordering: Relaxed; the lock orders it, and lookups fail either way.
        slot.state.store(vacant.bits(), Ordering::Relaxed);
        self.core.vacate(&mut state, self.slab, index, vacant, &mut batch);
        drop(state);
        drop(batch);
    }
}
