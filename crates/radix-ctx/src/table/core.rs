//! What a table and the references into it share: the tree of slabs, which slots are in use, and
//! what waits to be reclaimed.
//!
//! Lookups read `tree` and nothing else. Which slots are vacant is known under `lock`; so are the
//! stages of reclaim, which [`limbo`](super::limbo) moves on.
//!
//! # Invariants
//!
//! 1. A slab's entry in `tree` is full exactly if its `used` is.
//! 2. `hint`, if there is one, is the lowest slab that is not full, and no vacant index is below it.
//! 3. A slab with a used slot stays in the tree. One without leaves it, and a floor in its place, but
//!    for one: `empty`.
//! 4. The core is freed by its tick, a grace period after the table was dropped and the last context
//!    with it: who holds no borrow of the table stays pinned from its last change until it is done
//!    with the core.

use std::ptr::NonNull;

use percpu::rcu::{Batch, GracePeriod, RetireHead};
use percpu::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use percpu::sync::native::OnceLock;
use percpu::sync::quarantine::Watched;
use percpu::sync::{WordGuard, WordLock};
use percpu::{AllocError, Forked, PerCpu};

use super::error::{InsertRefused, LookupError};
use super::id::{GENERATION_BITS, Id};
use super::limbo::Limbo;
use super::quota::Quota;
use super::slab::{self, FULL, Gone, MAX_INDEX, SLAB_BITS, SLOTS, Slab, SlabPtr, Slot};
use super::waiters::Waiters;
use crate::tree::{Cursor, Edit, Tree, Which, floor_word};

/// What a table was made to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) max_index: u32,
    /// Generations stay below it.
    pub(super) generations: u32,
}

impl Limits {
    pub(super) const NONE: Self = Self { max_index: MAX_INDEX, generations: 1 << GENERATION_BITS };
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
    /// Claimed by reservations, not live.
    pub(super) reserved: AtomicU64,
    /// Dead, folded, and in use by references.
    pub(super) referenced: AtomicU64,
    pub(super) panics: AtomicU64,
    pub(super) tick: RetireHead,
    lock: Lines<WordLock<State<T>>>,
}

/// On cache lines of its own, away from what lookups read.
#[repr(align(128))]
struct Lines<T>(T);

// SAFETY: the raw pointers in it are to slabs, which hold a `T`, `Send` and `Sync`, and atomics.
unsafe impl<T: Send + Sync + 'static> Send for Core<T> {}
// SAFETY: as above; what is not atomic is under `lock`.
unsafe impl<T: Send + Sync + 'static> Sync for Core<T> {}

/// What is under the lock.
pub(super) struct State<T: Send + Sync + 'static> {
    /// Bits set in the slabs' `used`, but for retired slots.
    pub(super) used: u64,
    pub(super) retired: u64,
    hint: Option<SlabPtr<T>>,
    empty: Option<SlabPtr<T>>,
    pub(super) slabs: u64,
    /// Where a cyclic insert looks first.
    pub(super) cursor: u32,
    /// There are dead slots in the `waiting` lists, for this.
    pub(super) waiting: Option<GracePeriod>,
    /// The thread that owns the `waiting` lists, 0 if none does.
    pub(super) reclaimer: u64,
    /// There is no table any more.
    pub(super) dropped: bool,
    /// And who ends it is known.
    pub(super) ended: bool,
}

/// A vacant slot that is the caller's: given back on drop, unless it is filled.
pub(super) struct Claim<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slab: SlabPtr<T>,
    id: Id,
}

/// What a search for a vacant slot found.
enum Vacancy<T: Send + Sync + 'static> {
    In(SlabPtr<T>, u32),
    /// No slab is there; and with which generation the slots of a new one begin.
    NoSlab {
        key: u64,
        next: u32,
    },
    None,
}

/// A slab that was made before the lock was taken.
struct Spare<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    key: u64,
    next: u32,
}

impl<T: Send + Sync + 'static> Core<T> {
    pub(super) fn new(limits: Limits, quota: Quota, tick: RetireHead) -> Self {
        Self {
            tree: Tree::new(),
            limbo: OnceLock::new(),
            quota,
            limits,
            waiters: Waiters::default(),
            has_refs: AtomicBool::new(false),
            ticking: AtomicBool::new(false),
            batch: AtomicU32::new(Limbo::BATCH),
            reserved: AtomicU64::new(0),
            referenced: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            tick,
            lock: Lines(WordLock::new(State {
                used: 0,
                retired: 0,
                hint: None,
                empty: None,
                slabs: 0,
                cursor: 0,
                waiting: None,
                reclaimer: 0,
                dropped: false,
                ended: false,
            })),
        }
    }

    #[inline]
    pub(super) fn lock(&self) -> Result<WordGuard<'_, State<T>>, Forked> {
        self.lock.0.lock()
    }

    /// The tree, for who looks into it.
    pub(super) fn tree(&self) -> &Tree<true> {
        &self.tree
    }

    /// A walk over the slabs with keys in a range; the caller is pinned for `'g`.
    pub(super) fn slabs<'g>(&'g self, from: u64, to: u64) -> Cursor<'g, true> {
        // SAFETY: the caller.
        unsafe { self.tree.cursor(from, to, Which::Present) }
    }

    /// The slab that an index belongs to. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard, or a used slot of that slab, or the whole core.
    #[inline(always)]
    pub(super) unsafe fn slab<'a>(&self, index: u32) -> Option<&'a Watched<Slab<T>>> {
        // SAFETY: the caller's guard, or that it is the only one.
        let word = unsafe { self.tree.load(u64::from(index) >> SLAB_BITS) };
        // SAFETY: what is not a floor is a slab; it is freed a grace period after it left the tree,
        // and does not leave while a slot is used.
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
            if slot.state.load(Ordering::Acquire) == id.to_bits() {
                return Ok((slab, slot));
            }
        }
        Err(self.why(id))
    }

    /// Why an id is not live. The caller is pinned.
    #[cold]
    #[inline(never)]
    fn why(&self, id: Id) -> LookupError {
        let key = u64::from(id.index()) >> SLAB_BITS;
        // SAFETY: the caller is pinned.
        let next = match unsafe { self.slab(id.index()) } {
            Some(slab) => next_of(slab, id.index()),
            // SAFETY: the caller is pinned.
            None => (unsafe { self.tree.floor_at(key) }) as u32,
        };
        if id.generation() < next { LookupError::Stale } else { LookupError::NotFound }
    }

    /// Finds the lowest vacant slot of a range and takes it. Blocks shortly; allocates where there
    /// is no slab with one.
    pub(super) fn claim(&self, first: u32, last: u32) -> Result<Claim<'_, T>, InsertRefused> {
        let last = last.min(self.limits.max_index);
        if first > last {
            return Err(InsertRefused::NoRange);
        }
        if self.limbo.get().is_none() {
            self.make_limbo()?;
        }
        let mut spare: Option<Spare<T>> = None;
        let mut looked = false;
        loop {
            let mut state = self.lock()?;
            let wanted = match self.vacancy(&state, first, last) {
                Vacancy::In(slab, index) => {
                    let claim = self.take(&mut state, slab, index);
                    // SAFETY: its slot is used.
                    if first == 0 && unsafe { slab.as_ref() }.used() != FULL {
                        state.hint = Some(slab);
                    }
                    return Ok(claim);
                }
                Vacancy::None => None,
                Vacancy::NoSlab { key, next } => Some((key, next)),
            };
            if let (Some((key, next)), Some(made)) = (wanted, &spare) {
                if made.key == key && made.next == next {
                    self.add_slab(&mut state, made)?;
                    let slab = made.slab;
                    std::mem::forget(spare.take());
                    let index = first.max((key << SLAB_BITS) as u32);
                    return Ok(self.take(&mut state, slab, index));
                }
            }
            let used = state.used;
            drop(state);
            // Dead slots first, if there are many, or nothing else is left.
            let pending = self.pending();
            if !looked && pending != 0 && (wanted.is_none() || pending >= used / 8) {
                looked = true;
                if self.advance() != 0 {
                    continue;
                }
            }
            let Some((key, next)) = wanted else {
                return Err(InsertRefused::Exhausted { pending: self.pending() });
            };
            let first = (key << SLAB_BITS) as u32;
            let slab = Slab::try_new(NonNull::from(self), first, next, self.quota.is_weighted())?;
            spare = Some(Spare { slab, key, next });
        }
    }

    #[cold]
    fn make_limbo(&self) -> Result<(), AllocError> {
        if self.limbo.get().is_some() {
            return Ok(());
        }
        let made = PerCpu::try_new(|_| Limbo::new())?;
        let _ = self.limbo.set(made); // another thread's is as good
        Ok(())
    }

    /// The right to change the tree. The changes that retire something are in the returned edit's
    /// batch, which is retired when it is dropped: after the lock.
    fn edit<'a>(&'a self, _: &State<T>) -> Edit<'a, true> {
        // SAFETY: the state is borrowed from the lock's guard, which is dropped after the edit.
        unsafe { self.tree.edit() }
    }

    fn vacancy(&self, state: &State<T>, first: u32, last: u32) -> Vacancy<T> {
        if let Some(slab) = state.hint {
            if first == 0 {
                // SAFETY: a hint is in the tree, where nobody takes it from while we have the lock.
                if let Some(index) = vacant_in(unsafe { slab.as_ref() }, first, last) {
                    return Vacancy::In(slab, index);
                }
            }
        }
        let edit = self.edit(state);
        let (mut from, to) = (u64::from(first) >> SLAB_BITS, u64::from(last) >> SLAB_BITS);
        while let Some(key) = edit.first_not_full(from, to) {
            let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
            let Some(slab) = slab_of(word) else {
                return Vacancy::NoSlab { key, next: (edit.floor_of(key) as u32).max(1) };
            };
            // SAFETY: it is in the tree, as above.
            if let Some(index) = vacant_in(unsafe { slab.as_ref() }, first, last) {
                return Vacancy::In(slab, index);
            }
            if key == to {
                break;
            }
            from = key + 1;
        }
        Vacancy::None
    }

    /// Marks a vacant slot as used.
    fn take(&self, state: &mut State<T>, slab: SlabPtr<T>, index: u32) -> Claim<'_, T> {
        // SAFETY: it is in the tree, where it stays while we have the lock, and then by its used slot.
        let it = unsafe { slab.as_ref() };
        let used = it.used() | 1 << (index as usize % SLOTS);
        it.set_used(used);
        state.used += 1;
        if state.empty == Some(slab) {
            state.empty = None;
        }
        if used == FULL {
            let edit = self.edit(state);
            if let Some(slot) = edit.slot(it.key()) {
                edit.set_full(slot);
            }
            if state.hint == Some(slab) {
                state.hint = None;
            }
        }
        let next = next_of(it, index);
        Claim { core: self, slab, id: Id::new(index, next) }
    }

    fn add_slab(&self, state: &mut State<T>, spare: &Spare<T>) -> Result<(), AllocError> {
        let edit = self.edit(state);
        let slot = edit.make_slot(spare.key)?;
        edit.set(slot, spare.slab.as_ptr().cast());
        state.slabs += 1;
        Ok(())
    }

    /// Gives slots back. Under the lock; what is left without a used slot goes to `batch`, to be
    /// retired after the lock.
    pub(super) fn vacate(
        &self,
        state: &mut State<T>,
        slab: SlabPtr<T>,
        vacant: u64,
        batch: &mut Batch,
    ) {
        // SAFETY: its slots were used until now, so it is in the tree.
        let it = unsafe { slab.as_ref() };
        let used = it.used();
        let left = used & !vacant;
        it.set_used(left);
        state.used -= u64::from((used ^ left).count_ones());
        let key = it.key();
        if used == FULL {
            let edit = self.edit(state);
            if let Some(slot) = edit.slot(key) {
                edit.clear_full(slot);
            }
        }
        if let Some(hint) = state.hint {
            // SAFETY: a hint is in the tree.
            if key < unsafe { hint.as_ref() }.key() {
                state.hint = Some(slab);
            }
        }
        if left == 0 && !state.dropped {
            self.emptied(state, slab, batch);
        }
    }

    /// Of two empty slabs the lower one stays: the next insert may want it.
    fn emptied(&self, state: &mut State<T>, slab: SlabPtr<T>, batch: &mut Batch) {
        let Some(kept) = state.empty.replace(slab) else { return };
        if kept == slab {
            return;
        }
        // SAFETY: both are in the tree.
        let key = |slab: SlabPtr<T>| unsafe { slab.as_ref() }.key();
        let (stays, goes) = if key(kept) < key(slab) { (kept, slab) } else { (slab, kept) };
        state.empty = Some(stays);
        self.release(state, goes, batch);
    }

    /// Takes a slab without a used slot out of the tree; its generations stay there as a floor.
    pub(super) fn release(&self, state: &mut State<T>, slab: SlabPtr<T>, batch: &mut Batch) {
        // SAFETY: it is in the tree, and is retired by us.
        let it = unsafe { slab.as_ref() };
        let floor = (0..SLOTS).map(|number| next_of(it, it.index(number))).max().unwrap_or(1);
        if state.hint == Some(slab) {
            state.hint = None;
        }
        let edit = self.edit(state);
        if let Some(slot) = edit.slot(it.key()) {
            edit.set(slot, floor_word(u64::from(floor)));
        }
        batch.append(&mut edit.finish());
        state.slabs -= 1;
        // SAFETY: it left the tree, and nobody else retires it.
        unsafe { batch.push(NonNull::from(&it.head), Slab::<T>::BYTES + it.refs_bytes()) };
    }

    /// The index that `claim` would find.
    pub(super) fn next_free(&self) -> Result<Option<u32>, Forked> {
        let state = self.lock()?;
        Ok(match self.vacancy(&state, 0, self.limits.max_index) {
            Vacancy::In(_, index) => Some(index),
            Vacancy::NoSlab { key, .. } => Some((key << SLAB_BITS) as u32),
            Vacancy::None => None,
        })
    }

    /// Makes slabs, the lowest first, until `contexts` more have a slot.
    pub(super) fn make_room(&self, contexts: u32) -> Result<(), InsertRefused> {
        self.make_limbo()?;
        let mut from = 0;
        loop {
            let mut state = self.lock()?;
            let room = state.slabs * SLOTS as u64 - state.used - state.retired;
            if room >= u64::from(contexts) {
                return Ok(());
            }
            let edit = self.edit(&state);
            let last = u64::from(self.limits.max_index) >> SLAB_BITS;
            // Full slabs are skipped fast, others with a slot one by one.
            let absent = loop {
                let Some(key) = edit.first_not_full(from, last) else { break None };
                let word = edit.slot(key).map_or(floor_word(0), |slot| edit.get(slot));
                if slab_of::<T>(word).is_none() {
                    break Some(key);
                }
                from = key + 1;
                if from > last {
                    break None;
                }
            };
            let Some(key) = absent else {
                return Err(InsertRefused::Exhausted { pending: self.pending() });
            };
            let next = (edit.floor_of(key) as u32).max(1);
            drop(edit);
            // Under the lock: room is made where nobody minds the time.
            let first = (key << SLAB_BITS) as u32;
            let slab = Slab::try_new(NonNull::from(self), first, next, self.quota.is_weighted())?;
            let spare = Spare { slab, key, next };
            self.add_slab(&mut state, &spare)?;
            std::mem::forget(spare);
        }
    }

    /// Releases the one empty slab that was kept.
    pub(super) fn shrink(&self) -> Result<(), Forked> {
        let mut batch = Batch::new();
        let mut state = self.lock()?;
        if let Some(slab) = state.empty.take() {
            self.release(&mut state, slab, &mut batch);
        }
        drop(state);
        drop(batch);
        Ok(())
    }

    /// Dead slots that are not vacant yet. A hint while others remove or reclaim. Wait-free.
    pub(super) fn pending(&self) -> u64 {
        // Ordering: Relaxed; a statistic.
        self.in_lists() + self.referenced.load(Ordering::Relaxed)
    }

    /// Live contexts. Exact while nobody inserts or removes.
    pub(super) fn len(&self) -> Result<u64, Forked> {
        let used = self.lock()?.used;
        // Ordering: Relaxed; a statistic.
        let reserved = self.reserved.load(Ordering::Relaxed);
        Ok(used.saturating_sub(self.pending() + reserved))
    }
}

impl<T: Send + Sync + 'static> State<T> {
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

/// The generation of the next context at `index`.
fn next_of<T: Send + Sync + 'static>(slab: &Slab<T>, index: u32) -> u32 {
    // Ordering: Relaxed; under the lock, or a hint.
    let state = slab.slot(index).state.load(Ordering::Relaxed);
    match Gone::read(state) {
        Some(gone) => gone.next(),
        None => (state >> 32) as u32 + 1,
    }
}

/// The lowest vacant index of a slab within a range. Under the lock.
fn vacant_in<T: Send + Sync + 'static>(slab: &Slab<T>, first: u32, last: u32) -> Option<u32> {
    let mut vacant = !slab.used() & FULL;
    let lowest = slab.index(0);
    if first > lowest {
        let below = first - lowest;
        vacant &= u64::MAX.checked_shl(below).unwrap_or(0);
    }
    (vacant != 0).then(|| lowest + vacant.trailing_zeros()).filter(|index| *index <= last)
}

impl<T: Send + Sync + 'static> Drop for Spare<T> {
    fn drop(&mut self) {
        // SAFETY: made for us, and nobody has seen it: `claim` forgets one that it has added.
        unsafe { slab::discard(self.slab) };
    }
}

impl<'a, T: Send + Sync + 'static> Claim<'a, T> {
    pub(super) fn id(&self) -> Id {
        self.id
    }

    /// Puts a value in the slot and publishes it.
    #[inline]
    pub(super) fn fill(self, value: T, weight: u64) -> Id {
        let id = self.id;
        // SAFETY: the slot is used, so the slab stays.
        let slab = unsafe { self.slab.as_ref() };
        std::mem::forget(self);
        let slot = slab.slot(id.index());
        slab.set_weight(id.index(), weight);
        // SAFETY: vacant, and claimed by us.
        unsafe { slot.write(value) };
        // Ordering: Release pairs with the Acquire in `find`; it carries the value.
        slot.state.store(id.to_bits(), Ordering::Release);
        id
    }
}

impl<T: Send + Sync + 'static> Drop for Claim<'_, T> {
    /// The id was seen, so it is not given to another: the next one has the next generation.
    fn drop(&mut self) {
        let mut batch = Batch::new();
        let (index, next) = (self.id.index(), self.id.generation() + 1);
        // In a fork child that lost the lock the slot stays used.
        let Ok(mut state) = self.core.lock() else { return };
        // SAFETY: the slot is used, so the slab stays.
        let slot = unsafe { self.slab.as_ref() }.slot(index);
        // Ordering: Relaxed; the lock orders it, and lookups fail either way.
        slot.state.store(Gone::vacant(next).bits(), Ordering::Relaxed);
        if next < self.core.limits.generations {
            self.core.vacate(&mut state, self.slab, 1 << (index as usize % SLOTS), &mut batch);
        } else {
            state.retire(1);
        }
        drop(state);
        drop(batch);
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
