//! From a removed context to a vacant slot.
//!
//! A removal only makes the slot's state dead, and puts the slot on its CPU's list: the link is in
//! the state, so that takes no memory. The rest is done for many slots at once:
//!
//! ```text
//!  removal        cpu 0: filling -> s -> s -> s      under the lock, if nothing is waiting:
//!                 cpu 1: filling -> s                filling -> waiting, for a new grace period
//!
//!  reclaim        waiting -> s -> s -> s             when that is over: one barrier that restarts
//!                                                    rseq sections, then for each slot
//!                                                    fold its count of references
//!                                                      none:  drop the value, vacate the slot
//!                                                      some:  the last one put does that
//! ```
//!
//! It is moved on by whoever finds his CPU's list full, by an insert that would need a new slab, by
//! [`poll`](super::CtxTable::poll) and [`flush`](super::CtxTable::flush); and by the *tick*, an
//! object of RCU that is retired while anything is in the lists, so that a table is reclaimed in
//! time wherever RCU is ([`percpu::rcu::Bounds`], [`percpu::rcu::Reclaimer`]).
//!
//! # Invariants
//!
//! 1. A dead slot is in one list from its removal until its fold. Who pushes it is pinned until the
//!    link is stored; so links are read after a grace period only.
//! 2. The `waiting` lists belong to `State::reclaimer`, or, while there is none, to the lock.
//! 3. A slot's value is dropped once: by who folded it to none, or by the last reference put.
//! 4. No value is dropped under the lock.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use percpu::fence::heavy_rseq;
use percpu::rcu::{self, Batch, RetireHead};
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::{mutant, thread_id};

use super::core::{Core, State};
use super::error::WaitError;
use super::id::Id;
use super::slab::{Gone, NO_LINK, SLAB_BITS, SLOTS, Slab, SlabPtr, Slot};

/// No list: no slots, no first one.
const EMPTY: u64 = NO_LINK as u64;

/// One CPU's dead slots.
///
/// A list is how many there are, and the index of the first.
#[derive(Debug)]
pub(super) struct Limbo {
    filling: AtomicU64,
    /// Invariant 2.
    waiting: AtomicU64,
}

impl Limbo {
    /// Dead slots of one CPU that are worth a look; a sixteenth of the live ones if that is more,
    /// up to the second number. Guesses: some microseconds of fences for each.
    pub(super) const BATCH: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 1024 };
    const LARGEST: u64 = 1 << 16;

    pub(super) fn new() -> Self {
        Self { filling: AtomicU64::new(EMPTY), waiting: AtomicU64::new(EMPTY) }
    }

    /// How many slots are in its lists.
    pub(super) fn len(&self) -> u64 {
        // Ordering: Relaxed, both; a statistic.
        (self.filling.load(Ordering::Relaxed) >> 32) + (self.waiting.load(Ordering::Relaxed) >> 32)
    }

    /// Adds a dead slot, and tells how many there are now. Lock-free; the caller is pinned.
    #[inline]
    fn push<T>(&self, slot: &Slot<T>, id: Id) -> u32 {
        // Ordering: Relaxed; the exchange checks it.
        let mut list = self.filling.load(Ordering::Relaxed);
        loop {
            let longer = ((list >> 32) + 1) << 32 | u64::from(id.index());
            // Ordering: Release pairs with the Acquire in `close`; it carries the dead state. Relaxed
            // on failure: the next attempt checks again.
            let pushed = self.filling.compare_exchange_weak(
                list,
                longer,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => break,
                Err(now) => list = now,
            }
        }
        // Ordering: Relaxed; invariant 1: a grace period orders it.
        slot.state.store(Gone::dead(id, list as u32).bits(), Ordering::Relaxed);
        (list >> 32) as u32 + 1
    }
}

/// What [`Core::finish`] did with a dead slot.
enum Finished {
    Vacant,
    /// Its index will not be used again.
    Retired,
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Makes a live slot dead and puts it on a list. True if the lists deserve a look now.
    ///
    /// The caller is pinned and has just changed the state from `id` to dead.
    #[inline]
    pub(super) fn bury(&self, slab: &Slab<T>, slot: &Slot<T>, id: Id) -> bool {
        self.quota.give_back(slab.weight(id.index()));
        let Some(limbo) = self.limbo.get() else { return false }; // there is: a slab was made
        let length = limbo.local().push(slot, id);
        self.waiters.notify();
        // Ordering: Relaxed, both; hints.
        let batch = self.batch.load(Ordering::Relaxed);
        length & (batch - 1) == 0 || !self.ticking.load(Ordering::Relaxed)
    }

    /// After [`bury`](Self::bury) said so, without a guard: has the tick sent, and moves reclaim on
    /// if a list is full.
    #[cold]
    #[inline(never)]
    pub(super) fn look(&self) {
        // Ordering: Relaxed; under the lock it is read again.
        if self.ticking.load(Ordering::Relaxed) {
            self.advance();
        } else {
            self.send_tick();
        }
    }

    /// Sends the tick if something is in the lists.
    pub(super) fn send_tick(&self) {
        let Ok(mut state) = self.lock() else { return };
        // Ordering: Relaxed, both; under the lock.
        if self.ticking.load(Ordering::Relaxed) || self.in_lists() == 0 {
            return;
        }
        self.ticking.store(true, Ordering::Relaxed);
        self.close(&mut state);
        drop(state);
        retire_tick(NonNull::from(self));
    }

    pub(super) fn in_lists(&self) -> u64 {
        self.limbos().map(Limbo::len).sum()
    }

    /// The lists of every CPU; none before there is a slab.
    pub(super) fn limbos(&self) -> impl Iterator<Item = &Limbo> {
        self.limbo.get().into_iter().flat_map(|limbo| limbo.iter()).map(|(_, limbo)| limbo)
    }

    /// Starts a grace period for what the CPUs' lists have filled with, unless another is not over.
    fn close(&self, state: &mut State<T>) {
        if state.waiting.is_some() || state.reclaimer != 0 {
            return;
        }
        let mut any = false;
        for limbo in self.limbos() {
            // Ordering: Acquire pairs with the Release in `push`; it carries the dead states to the
            // grace period, which begins after it.
            let list = limbo.filling.swap(EMPTY, Ordering::AcqRel);
            any |= list != EMPTY;
            // Ordering: Relaxed; invariant 2.
            limbo.waiting.store(list, Ordering::Relaxed);
        }
        if any {
            state.waiting = Some(rcu::start_grace_period());
            let live = state.used / 16;
            let batch = live.clamp(u64::from(Limbo::BATCH), Limbo::LARGEST).next_power_of_two();
            // Ordering: Relaxed; a hint.
            self.batch.store(batch as u32, Ordering::Relaxed);
        }
    }

    /// Reclaims what has waited for long enough, and starts a grace period for the rest. Never
    /// blocks on one. Returns how many slots came free.
    pub(super) fn advance(&self) -> usize {
        let Ok(mut state) = self.lock() else { return 0 };
        if state.reclaimer != 0 {
            return 0;
        }
        let Some(period) = state.waiting else {
            self.close(&mut state);
            return 0;
        };
        // Nobody else has the lists from here on.
        state.reclaimer = thread_id();
        drop(state);
        if !mutant("limbo-reclaims-without-a-grace-period") && !period.poll() {
            self.end_reclaim(false);
            return 0;
        }
        let vacated = self.reclaim();
        self.end_reclaim(true);
        vacated
    }

    /// [`advance`](Self::advance) until everything that was removed before this call is out of the
    /// lists. Blocks for grace periods, and for another thread that reclaims.
    pub(super) fn flush(&self) -> Result<usize, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let mut vacated = 0;
        // What waits already, and what the lists have filled with meanwhile.
        for _ in 0..2 {
            let mut state = self.lock_reclaimed()?;
            self.close(&mut state);
            if state.waiting.is_none() {
                break;
            }
            state.reclaimer = thread_id();
            drop(state);
            if let Err(error) = rcu::synchronize() {
                self.end_reclaim(false);
                return Err(error.into());
            }
            vacated += self.reclaim();
            self.end_reclaim(true);
        }
        Ok(vacated)
    }

    /// The lock, at a moment when nobody reclaims. Blocks until then.
    fn lock_reclaimed(&self) -> Result<percpu::sync::WordGuard<'_, State<T>>, WaitError> {
        loop {
            let state = self.lock()?;
            if state.reclaimer == 0 {
                return Ok(state);
            }
            if state.reclaimer == thread_id() {
                return Err(WaitError::InDrop);
            }
            drop(state);
            self.waiters.wait(None, || match self.lock() {
                Ok(state) => (state.reclaimer == 0).then_some(()),
                Err(_) => Some(()),
            });
        }
    }

    /// Gives the lists back to the lock.
    fn end_reclaim(&self, reclaimed: bool) {
        if let Ok(mut state) = self.lock() {
            state.reclaimer = 0;
            if reclaimed {
                state.waiting = None;
                self.close(&mut state);
            }
            let dropped = state.dropped;
            drop(state);
            if dropped {
                self.end();
            }
        }
        self.waiters.notify();
    }

    /// Reclaims the slots in the `waiting` lists, which are the caller's.
    fn reclaim(&self) -> usize {
        self.restart_sections();
        let mut vacated = Vacated::new(self);
        for limbo in self.limbos() {
            // Ordering: Relaxed; invariant 2.
            let mut next = limbo.waiting.load(Ordering::Relaxed) as u32;
            while next != NO_LINK {
                let index = next;
                let guard = rcu::pin(); // for the nodes on the way
                // SAFETY: that guard; and the slab stays after it, as its slot is used.
                let Some(slab) = (unsafe { self.slab(index) }) else { break };
                drop(guard);
                // Ordering: Relaxed; the grace period orders the link.
                let state = slab.slot(index).state.load(Ordering::Relaxed);
                let Some(gone) = Gone::read(state) else { break };
                next = gone.link();
                self.fold(slab.into(), index, gone, &mut vacated);
            }
            // Ordering: Relaxed; invariant 2.
            limbo.waiting.store(EMPTY, Ordering::Relaxed);
        }
        vacated.give_back();
        let number = vacated.total;
        if number != 0 {
            self.waiters.notify();
        }
        number
    }

    /// After this no count of a slot that was dead before is open to a section.
    fn restart_sections(&self) {
        // Ordering: Acquire pairs with the Release in `make_refs`; a count that is made after this
        // never had a reference of a slot that was dead before.
        if self.has_refs.load(Ordering::Acquire) && !mutant("limbo-folds-without-a-barrier") {
            heavy_rseq();
        }
    }

    /// Folds a dead slot's count; vacates the slot if nobody has a reference.
    fn fold(&self, slab: SlabPtr<T>, index: u32, gone: Gone, vacated: &mut Vacated<'_, T>) {
        // SAFETY: its slot is used.
        let it = unsafe { slab.as_ref() };
        if let Some(refs) = it.refs() {
            // First, as the last reference may be put as soon as the count is folded.
            // Ordering: Release, pairs with the Acquire of whoever asks whether it is reclaimed.
            it.slot(index).state.store(gone.referenced().bits(), Ordering::Release);
            // Ordering: Relaxed; a statistic.
            self.referenced.fetch_add(1, Ordering::Relaxed);
            if !refs.fold(index as usize % SLOTS) {
                return;
            }
            self.referenced.fetch_sub(1, Ordering::Relaxed);
        }
        if self.drop_value(it, index).is_err() {
            // Ordering: Relaxed; a statistic.
            self.panics.fetch_add(1, Ordering::Relaxed);
        }
        vacated.add(slab, index, self.finish(it, index, gone));
    }

    fn drop_value(&self, slab: &Slab<T>, index: u32) -> Result<(), Box<dyn Any + Send>> {
        let slot = slab.slot(index);
        // SAFETY: dead for a grace period and without a reference, and ours: invariant 3.
        catch_unwind(AssertUnwindSafe(|| unsafe { slot.drop_value() }))
    }

    /// The end of a slot's life: its count is open again, its state vacant.
    fn finish(&self, slab: &Slab<T>, index: u32, gone: Gone) -> Finished {
        if let Some(refs) = slab.refs() {
            refs.open(index as usize % SLOTS);
        }
        // Ordering: Release pairs with the Acquire of whoever asks whether it is reclaimed; it
        // carries the drop.
        slab.slot(index).state.store(Gone::vacant(gone.next()).bits(), Ordering::Release);
        if gone.next() < self.limits.generations { Finished::Vacant } else { Finished::Retired }
    }

    /// The last reference to a dead slot was put: drops the value and vacates the slot.
    ///
    /// # Panics
    ///
    /// With the panic of the value's drop.
    #[cold]
    pub(super) fn last_put(&self, slab: SlabPtr<T>, index: u32) {
        // Invariant 4 of the core: the table may be gone, and with it the borrow.
        // SAFETY: its slot is used.
        let it = unsafe { slab.as_ref() };
        // Ordering: Relaxed; the count of references orders it.
        let state = it.slot(index).state.load(Ordering::Relaxed);
        let Some(gone) = Gone::read(state) else { return };
        let dropped = self.drop_value(it, index);
        let guard = rcu::pin();
        let mut vacated = Vacated::new(self);
        vacated.add(slab, index, self.finish(it, index, gone));
        // Ordering: Relaxed; a statistic.
        self.referenced.fetch_sub(1, Ordering::Relaxed);
        vacated.give_back();
        self.waiters.notify();
        self.end();
        drop(guard);
        if let Err(panic) = dropped {
            std::panic::resume_unwind(panic);
        }
    }

    /// The table goes: kills what is live and reclaims all that has no reference, with no grace
    /// period, as nobody has a borrow of the table; then the rest of the core's life is that of the
    /// references. Another thread that reclaims just now does it in our place.
    pub(super) fn end_table(&self) {
        let guard = rcu::pin(); // invariant 4 of the core
        if let Ok(mut state) = self.lock() {
            state.dropped = true;
        }
        drop(guard);
        self.end();
    }

    /// Moves on the end of a dropped table, if nobody else is at it.
    ///
    /// The caller is pinned, or what it has of the core outlives this: invariant 4 of the core.
    fn end(&self) {
        let mut guard = rcu::pin();
        let Ok(mut state) = self.lock() else { return };
        if !state.dropped || state.reclaimer != 0 {
            return;
        }
        if !state.ended {
            state.ended = true;
            state.reclaimer = thread_id();
            drop(state);
            drop(guard); // drops of values may wait for readers; the reclaimer keeps the core
            self.reclaim_all();
            guard = rcu::pin();
            let Ok(again) = self.lock() else { return };
            state = again;
            state.reclaimer = 0;
        }
        // Ordering: Relaxed, both; under the lock.
        if state.used == 0 && !self.ticking.load(Ordering::Relaxed) {
            self.ticking.store(true, Ordering::Relaxed);
            drop(state);
            retire_tick(NonNull::from(self));
        }
        drop(guard);
    }

    /// Kills everything, and reclaims what has no reference.
    fn reclaim_all(&self) {
        let for_each = |f: &mut dyn FnMut(SlabPtr<T>, u32, u64)| {
            let mut from = 0;
            while let Some((key, slab)) = self.next_slab(from, u64::from(u32::MAX) >> SLAB_BITS) {
                // SAFETY: a slab does not leave the tree of a dropped table.
                let it = unsafe { slab.as_ref() };
                for number in 0..SLOTS {
                    let index = it.index(number);
                    // Ordering: Acquire pairs with the Release of `fill`, by another thread.
                    f(slab, index, it.slot(index).state.load(Ordering::Acquire));
                }
                from = key + 1;
            }
        };
        for_each(&mut |slab, index, state| {
            if Gone::read(state).is_none() {
                let id = Id::from_bits(state).expect("a live state is an id");
                // SAFETY: as above.
                let slot = unsafe { slab.as_ref() }.slot(index);
                // Ordering: Release, with the barrier below: no section finds it open after that.
                slot.state.store(Gone::dead(id, NO_LINK).bits(), Ordering::Release);
            }
        });
        self.waiters.notify();
        self.restart_sections();
        let mut vacated = Vacated::new(self);
        for_each(&mut |slab, index, state| {
            if let Some(gone) = Gone::read(state) {
                if gone.is_pending() && !gone.is_referenced() {
                    self.fold(slab, index, gone, &mut vacated);
                }
            }
        });
        for limbo in self.limbos() {
            // Ordering: Relaxed, both; nobody else has the lists.
            limbo.filling.store(EMPTY, Ordering::Relaxed);
            limbo.waiting.store(EMPTY, Ordering::Relaxed);
        }
        vacated.give_back();
    }
}

/// Retires the tick of a core; the caller has set `ticking`.
fn retire_tick<T: Send + Sync + 'static>(core: NonNull<Core<T>>) {
    let offset = std::mem::offset_of!(Core<T>, tick);
    // SAFETY: within the core.
    let tick = unsafe { core.byte_add(offset) }.cast();
    // SAFETY: one at a time, that of who set `ticking`. Its `free` is `run_tick`, which frees the
    // core only where nobody else has it.
    unsafe { rcu::retire_raw(tick, size_of::<Core<T>>()) };
}

/// What a retired tick runs, a grace period later.
///
/// # Safety
///
/// `head` is the tick of a core that was retired.
pub(super) unsafe fn run_tick<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    let offset = std::mem::offset_of!(Core<T>, tick);
    // SAFETY: the head lies at that offset of a core.
    let core = unsafe { head.byte_sub(offset) }.cast::<Core<T>>();
    // SAFETY: it is freed by its tick only, so not while `ticking` is set.
    let it = unsafe { core.as_ref() };
    it.advance();
    let guard = rcu::pin(); // invariant 4 of the core
    let Ok(mut state) = it.lock() else { return };
    if state.ended && state.used == 0 && state.reclaimer == 0 {
        drop(state);
        drop(guard);
        // SAFETY: a box of `CtxTable::new`. The table and every context are gone, and since the last
        // of them a grace period is over, for which everybody was pinned who had to do with it.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
        return;
    }
    let again = it.in_lists() != 0;
    if again {
        it.close(&mut state);
    } else {
        // Ordering: Relaxed; under the lock.
        it.ticking.store(false, Ordering::Relaxed);
    }
    drop(state);
    if again {
        retire_tick(core);
    }
    drop(guard);
}

/// Slabs whose slots are given back under one lock. A guess: some hundred nanoseconds.
const TOGETHER: usize = 32;

/// Slots to be given back together, so that the lock is taken once for some.
struct Vacated<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slots: [Option<(SlabPtr<T>, u64)>; TOGETHER],
    number: usize,
    retired: u64,
    total: usize,
}

impl<'a, T: Send + Sync + 'static> Vacated<'a, T> {
    fn new(core: &'a Core<T>) -> Self {
        Self { core, slots: [None; TOGETHER], number: 0, retired: 0, total: 0 }
    }

    fn add(&mut self, slab: SlabPtr<T>, index: u32, finished: Finished) {
        self.total += 1;
        if let Finished::Retired = finished {
            self.retired += 1;
            return;
        }
        let bit = 1 << (index as usize % SLOTS);
        if let Some(Some((last, bits))) = self.number.checked_sub(1).map(|n| &mut self.slots[n]) {
            if *last == slab {
                *bits |= bit;
                return;
            }
        }
        if self.number == TOGETHER {
            self.give_back();
        }
        self.slots[self.number] = Some((slab, bit));
        self.number += 1;
    }

    /// In a fork child that lost the lock the slots stay used.
    fn give_back(&mut self) {
        let mut batch = Batch::new();
        let slots = &mut self.slots[..self.number];
        self.number = 0;
        if let Ok(mut state) = self.core.lock() {
            for (slab, bits) in slots.iter_mut().filter_map(Option::take) {
                self.core.vacate(&mut state, slab, bits, &mut batch);
            }
            state.retire(std::mem::take(&mut self.retired));
        }
    }
}
