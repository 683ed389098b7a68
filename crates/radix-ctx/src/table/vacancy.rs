//! The search for the lowest vacant slot.
//!
//! A slab has a bit for each used slot, and the tree has a bit for each full slab. A search reads several
//! cache lines, which are remote when another CPU inserted last. So the lowest vacant slots are moved in
//! batches, under one lock, to a [`VacantQueue`](super::vacant_queue::VacantQueue) beside the lock:
//!
//! ```text
//!   State -> queue: | 7 9 12 13 ... |   an insert: lock, take the lowest, unlock
//!                      ^ refilled: their bits in `used` are set already
//! ```
//!
//! An operation that vacates a slot, or searches within a range, first returns the queue's slots to the
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

use super::core::{Core, State};
use super::error::InsertRefused;
use super::id::Id;
use super::retire_list::RetireLists;
use super::slab::{self, Begin, FULL, NotLive, SLAB_BITS, SLOTS, Slab, SlabPtr};
use super::slab_tree::{LAST_KEY, next_generation, slab_of};
use super::vacant_queue::QUEUE;
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

/// The result of a search for a vacant slot.
enum Vacancy<T: Send + Sync + 'static> {
    In(SlabPtr<T>, u32),
    /// The key has no slab; `begin` has the first generations of a new one.
    NoSlab {
        key: u64,
        begin: Begin,
    },
    None,
}

/// The vacant index of a range that an insert takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pick {
    Lowest,
    /// The lowest from the cursor on, or the lowest of the range if there is none. The cursor moves
    /// behind it under the same lock.
    Next,
}

/// A slab that was made before the lock was taken and is not in the tree yet.
struct Spare<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    key: u64,
    begin: Begin,
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Takes the lowest vacant slot of a range. Blocks shortly on the lock; allocates a slab if no slab of
    /// the range has a vacant slot.
    #[inline]
    pub(super) fn claim(&self, first: u32, last: u32) -> Result<Claim<'_, T>, InsertRefused> {
        if first == 0 {
            let popped = self.lock().queue.pop(last);
            if let Some(index) = popped {
                return Ok(self.claim_used(index));
            }
        }
        self.claim_slow(first, last, Pick::Lowest)
    }

    /// Takes the lowest vacant slot of a range from the cursor on, or of the whole range if there is
    /// none. Blocks and allocates like [`claim`](Self::claim).
    pub(super) fn claim_next(&self, first: u32, last: u32) -> Result<Claim<'_, T>, InsertRefused> {
        self.claim_slow(first, last, Pick::Next)
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
    fn claim_slow(&self, first: u32, last: u32, pick: Pick) -> Result<Claim<'_, T>, InsertRefused> {
        let last = last.min(self.limits.max_index);
        if first > last {
            return Err(InsertRefused::NoRange);
        }
        self.make_lists()?;
        let mut batch = Batch::new(); // its drop, after the unlock, retires the slabs in it
        let mut spare: Option<Spare<T>> = None;
        // Whether reclaim has advanced: in the search from the cursor on, and in the search of the range.
        let (mut looked_ahead, mut looked) = (false, false);
        loop {
            let mut state = self.lock();
            if state.closed {
                return Err(InsertRefused::Closed);
            }
            let cursor = state.cursor;
            let is_ahead = pick == Pick::Next && cursor > first && cursor <= last;
            let mut from = if is_ahead { cursor } else { first };
            if first == 0 && pick == Pick::Lowest {
                self.refill(&mut state);
                if let Some(index) = state.queue.pop(last) {
                    drop(state);
                    return Ok(self.claim_used(index));
                }
            }
            if state.queue.reaches(from) {
                self.empty_queue(&mut state, &mut batch);
            }
            let mut vacancy = self.vacancy(&state, from, last);
            if from > first
                && matches!(vacancy, Vacancy::None)
                && (looked_ahead || self.pending(&state) == 0)
            {
                from = first;
                self.empty_queue(&mut state, &mut batch);
                vacancy = self.vacancy(&state, first, last);
            }
            let wanted = match vacancy {
                Vacancy::In(slab, index) => {
                    self.mark_used(&mut state, slab, 1 << (index as usize % SLOTS));
                    if pick == Pick::Next {
                        state.cursor = index + 1; // there is one: see `MAX_INDEX`
                    }
                    drop(state);
                    return Ok(self.claim_used(index));
                }
                Vacancy::None => None,
                Vacancy::NoSlab { key, begin } => Some((key, begin)),
            };
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
            let looked = if from > first { &mut looked_ahead } else { &mut looked };
            if !*looked && pending != 0 && (wanted.is_none() || pending >= used / 8) {
                *looked = true;
                if self.advance() != 0 {
                    continue;
                }
            }
            let Some((key, begin)) = wanted else {
                if from > first {
                    continue; // searches the whole range next
                }
                return Err(InsertRefused::Exhausted { pending });
            };
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
        let last = self.limits.max_index;
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
                let Some(index) = vacant_in(it.used() | bits, it.index(0), 0, last) else { break };
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
        while let Some(index) = state.queue.pop(u32::MAX) {
            let _guard = rcu::pin(); // keeps the nodes above the slab
            // SAFETY: `_guard` is an RCU guard. The slab stays after it, because this thread holds the
            // lock.
            let slab = unsafe { self.slabs.slab(index) }.expect("a used slot has a slab");
            self.mark_vacant(state, slab.into(), 1 << (index as usize % SLOTS), batch);
        }
    }

    fn vacancy(&self, state: &State<T>, first: u32, last: u32) -> Vacancy<T> {
        let edit = self.edit(state);
        let (mut from, to) = (u64::from(first) >> SLAB_BITS, u64::from(last) >> SLAB_BITS);
        while let Some(key) = edit.first_not_full(from, to) {
            let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
            let Some(slab) = slab_of(word) else {
                let begin = Begin::new(key, edit.floor_of(key) as u32, state.unused_from);
                return Vacancy::NoSlab { key, begin };
            };
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            let it = unsafe { slab.as_ref() };
            if let Some(index) = vacant_in(it.used(), it.index(0), first, last) {
                return Vacancy::In(slab, index);
            }
            if key == to {
                break;
            }
            from = key + 1;
        }
        Vacancy::None
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
        let slab = Slab::try_new(self.this().cast(), first, begin, self.quota.is_weighted())?;
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

    /// Returns the index that an insert would get.
    pub(super) fn next_free(&self) -> Option<u32> {
        let state = self.lock();
        if state.closed { None } else { self.lowest_vacant(&state) }
    }

    /// Refuses inserts from now on.
    ///
    /// The check is in the slow path only: the queue is empty from now on, because only that path fills
    /// it.
    pub(super) fn close(&self) {
        let mut batch = Batch::new(); // its drop, after the unlock, retires the slabs in it
        let mut state = self.lock();
        state.closed = true;
        self.empty_queue(&mut state, &mut batch);
        drop(state);
        drop(batch);
        self.waiters.notify(); // an `insert_wait` may wait for a slot
    }

    /// Returns whether an index of a range is vacant, a flush may make one vacant, or inserts are refused.
    /// Changes nothing.
    pub(super) fn has_vacancy(&self, first: u32, last: u32) -> bool {
        let last = last.min(self.limits.max_index);
        let state = self.lock();
        let (queue, range) = (&state.queue, first..=last);
        state.closed
            || state.waiting.is_some()
            || self.filled() != 0
            || queue.indexes().iter().any(|index| range.contains(index))
            || !matches!(self.vacancy(&state, first, last), Vacancy::None)
    }

    /// Returns the lowest vacant index. Changes nothing.
    pub(super) fn lowest_vacant(&self, state: &State<T>) -> Option<u32> {
        if let Some(queued) = state.queue.lowest() {
            return Some(queued);
        }
        match self.vacancy(state, 0, self.limits.max_index) {
            Vacancy::In(_, index) => Some(index),
            Vacancy::NoSlab { key, .. } => Some((key << SLAB_BITS) as u32),
            Vacancy::None => None,
        }
    }

    /// Makes slabs until the lowest `contexts` vacant indexes have a slot.
    pub(super) fn make_room(&self, contexts: u32) -> Result<(), InsertRefused> {
        self.make_lists()?;
        let last = u64::from(self.limits.max_index) >> SLAB_BITS;
        let mut batch = Batch::new(); // its drop, after the unlock, retires the slabs in it
        let (mut room, mut from) = (0, 0);
        while room < contexts {
            // Locks for each slab, so that other threads do not wait for all of them.
            let mut state = self.lock();
            self.empty_queue(&mut state, &mut batch);
            let edit = self.edit(&state);
            let not_full = if from > last { None } else { edit.first_not_full(from, last) };
            let Some(key) = not_full else {
                return Err(InsertRefused::Exhausted { pending: self.pending(&state) });
            };
            let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
            let begin = Begin::new(key, edit.floor_of(key) as u32, state.unused_from);
            drop(edit);
            let used = match slab_of::<T>(word) {
                // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
                Some(slab) => unsafe { slab.as_ref() }.used(),
                None => {
                    // Allocates under the lock: this function is for times when latency is no concern.
                    let spare = self.make_slab(key, begin)?;
                    self.add_slab(&mut state, &spare)?;
                    std::mem::forget(spare);
                    0
                }
            };
            let slots = SLOTS as u32 - 1;
            let beyond = slots - (self.limits.max_index - (key << SLAB_BITS) as u32).min(slots);
            room += (!used & (FULL >> beyond)).count_ones();
            from = key + 1;
        }
        Ok(())
    }

    /// Releases the slabs without a used slot: the kept one, and those that `make_room` made.
    pub(super) fn shrink(&self) {
        let mut batch = Batch::new();
        let mut state = self.lock();
        self.empty_queue(&mut state, &mut batch); // its slots may be the only used ones of a slab
        state.empty = None;
        let mut from = 0;
        while let Some((key, slab)) = self.slabs.next_slab(from, LAST_KEY) {
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            if unsafe { slab.as_ref() }.used() == 0 {
                self.release(&mut state, key, &mut batch);
            }
            from = key + 1;
        }
        drop(state);
        drop(batch);
    }
}

/// Returns the lowest vacant index of a range, in the slab whose first index is `lowest`.
fn vacant_in(used: u64, lowest: u32, first: u32, last: u32) -> Option<u32> {
    let mut vacant = !used & FULL;
    if first > lowest {
        vacant &= u64::MAX.checked_shl(first - lowest).unwrap_or(0);
    }
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
    pub(super) fn fill(self, value: T, weight: u64) -> Id {
        let (core, id) = (self.core, self.id);
        // SAFETY: invariant 4 of `slab`: the claimed slot is used.
        let slab = unsafe { self.slab.as_ref() };
        std::mem::forget(self);
        let slot = slab.slot(id.index());
        if core.quota.is_weighted() {
            slab.set_weight(id.index(), weight);
        }
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
        if next < self.core.limits.generations {
            let slot = (self.slab, 1 << (index as usize % SLOTS));
            self.core.vacate(&mut state, std::iter::once(slot), true, &mut batch);
        } else {
            state.exhaust(1);
        }
        drop(state);
        drop(batch);
        self.core.waiters.notify(); // an `insert_wait` may wait for the slot
    }
}
