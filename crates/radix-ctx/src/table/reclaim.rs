//! Reclaim: drops the values of dead slots after their grace period, and makes the slots vacant.
//!
//! [`retire`](super::retire) describes the stages and the invariants.

use std::ptr::NonNull;

use percpu::fence::heavy_rseq;
use percpu::rcu::{self, Batch};
use percpu::sync::atomic::Ordering;
use percpu::sync::{WordGuard, check, order, step};

use super::core::{Core, State};
use super::error::WaitError;
use super::id::MAX_GENERATION;
use super::retire_list::{BATCH, EMPTY, Walk};
use super::slab::{NotLive, SLOTS, Slab, SlabPtr};
use super::user_code::{FirstPanic, dropping};

/// The state in which [`Core::finish`] left a dead slot.
enum Finished {
    Vacant,
    /// Its generations are used up, so its index will not be used again.
    Exhausted,
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Reclaims the slots in the waiting lists if their grace period has ended, and starts a grace
    /// period for the others. Never blocks for a grace period. Returns how many slots it reclaimed.
    ///
    /// # Panics
    ///
    /// Panics if the drop of a context does, when the others are dropped.
    pub(super) fn advance(&self) -> usize {
        let mut panic = FirstPanic::default();
        let vacated = self.advance_by(&mut panic);
        panic.resume();
        vacated
    }

    /// Advances reclaim, and leaves the first panic of a drop to the caller.
    pub(super) fn advance_by(&self, panic: &mut FirstPanic) -> usize {
        let mut state = self.lock();
        if state.reclaiming {
            return 0;
        }
        let Some(period) = state.waiting else {
            let send = self.close_lists(&mut state);
            drop(state);
            if send {
                self.queue_callback();
            }
            return 0;
        };
        let mut reclaiming = Reclaiming::begin(self, state);
        if !check!("reclaim: a grace period is over", period.poll()) {
            return 0;
        }
        reclaiming.run(panic)
    }

    /// Advances until every slot that was dead before this call has left the lists. Returns how many
    /// slots this thread reclaimed. Blocks for grace periods, and for another thread that reclaims.
    pub(super) fn flush(&self) -> Result<usize, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let (mut vacated, mut panic) = (0, FirstPanic::default());
        // Twice: for the waiting lists, and for the filling lists, which wait after that.
        for _ in 0..2 {
            let mut state = self.lock_reclaimed()?;
            let send = self.close_lists(&mut state);
            let waiting = state.waiting;
            drop(state);
            if send {
                self.queue_callback();
            }
            let Some(period) = waiting else { break };
            // Another thread may reclaim the lists meanwhile.
            if !period.poll() {
                rcu::synchronize()?;
            }
            let state = self.lock_reclaimed()?;
            if state.waiting == Some(period) {
                vacated += Reclaiming::begin(self, state).run(&mut panic);
            }
        }
        panic.resume();
        Ok(vacated)
    }

    /// Locks the state while no thread reclaims. Blocks until then.
    fn lock_reclaimed(&self) -> Result<WordGuard<'_, State<T>>, WaitError> {
        loop {
            let state = self.lock();
            if self.is_in_drop() {
                return Err(WaitError::InDrop);
            }
            if !state.reclaiming {
                return Ok(state);
            }
            drop(state);
            self.waiters.wait(None, || (!self.lock().reclaiming).then_some(()));
        }
    }

    /// Reclaims the slots in the waiting lists, which belong to the calling thread. Returns how many
    /// there were, and the slabs that were released.
    fn reclaim(&self, panic: &mut FirstPanic) -> (usize, Batch) {
        self.restart_sections();
        let mut vacated = Vacated::new(self);
        let mut found = [None; BATCH];
        for lists in self.all_lists() {
            let mut walk = Walk::new(&self.slabs, lists);
            loop {
                let number = walk.fill(&self.slabs, &mut found);
                if number == 0 {
                    break;
                }
                for (slab, index, gone) in found.iter_mut().filter_map(Option::take) {
                    self.fold(slab, index, gone, &mut vacated, panic);
                }
            }
            // Ordering: Relaxed; invariant 2.
            lists.waiting.iter().for_each(|list| list.store(EMPTY, Ordering::Relaxed));
        }
        let released = vacated.give_back();
        (vacated.total, released)
    }

    /// Restarts rseq sections. After this, no section changes the count of a slot that was dead before.
    pub(super) fn restart_sections(&self) {
        // Ordering: Acquire pairs with the Release in `make_refs`. Counts that are made after this load
        // never had a reference to a slot that was dead before. The lock, which the caller has taken,
        // does so, too, so no model can see it weakened.
        if self.has_refs.load(Ordering::Acquire) {
            step!("fold: no section still counts", heavy_rseq());
        }
    }

    /// Folds a dead slot's count. Drops the value and vacates the slot if there is no reference.
    #[inline]
    pub(super) fn fold(
        &self,
        slab: SlabPtr<T>,
        index: u32,
        state: NotLive,
        vacated: &mut Vacated<'_, T>,
        panic: &mut FirstPanic,
    ) {
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let it = unsafe { slab.as_ref() };
        if let Some(refs) = it.refs() {
            // Before the fold: the last reference may be put as soon as the count is folded.
            // Ordering: Release pairs with the Acquire in `CtxRef::is_removed`; it carries what the
            // removing thread did before.
            let order = order!(Release, "fold: the mark carries what came before the removal");
            it.slot(index).state.store(state.referenced().bits(), order);
            // Ordering: Relaxed; a statistic.
            self.counters.referenced.fetch_add(1, Ordering::Relaxed);
            if !check!("fold: no reference is left", refs.fold(index as usize % SLOTS)) {
                return;
            }
            self.counters.referenced.fetch_sub(1, Ordering::Relaxed);
        }
        self.drop_value(it, index, panic);
        vacated.add(slab, index, self.finish(it, index, state));
    }

    fn drop_value(&self, slab: &Slab<T>, index: u32, panic: &mut FirstPanic) {
        if std::mem::needs_drop::<T>() {
            let slot = slab.slot(index);
            // SAFETY: the slot was dead for a grace period and has no reference; only this thread drops
            // the value (invariant 3).
            panic.call(|| unsafe { slot.drop_value() });
        }
    }

    /// Opens the count of a slot again and makes its state vacant.
    fn finish(&self, slab: &Slab<T>, index: u32, state: NotLive) -> Finished {
        if let Some(refs) = slab.refs() {
            refs.open(index as usize % SLOTS);
        }
        // Ordering: Release pairs with the Acquire in `Core::not_live` and in `is_clear`; it carries the
        // drop of the value.
        let order = order!(Release, "finish: the drop has ended");
        slab.slot(index).state.store(NotLive::vacant(state.next()).bits(), order);
        if state.next() < MAX_GENERATION { Finished::Vacant } else { Finished::Exhausted }
    }

    /// Drops the value of a dead slot and vacates the slot, after the last reference was put.
    ///
    /// # Panics
    ///
    /// Panics if the drop of the value does, after the slot was vacated.
    ///
    /// # Safety
    ///
    /// `this` is the core of `slab`, and the calling thread has put the last reference to the dead slot
    /// `index`. The slot keeps the core alive until it is vacant. `this` is a pointer because another
    /// thread may free the core before this returns.
    #[cold]
    pub(super) unsafe fn last_put(this: NonNull<Self>, slab: SlabPtr<T>, index: u32) {
        // SAFETY: the dead slot keeps the core; it is not used after `vacate_last`.
        let core = unsafe { this.as_ref() };
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let it = unsafe { slab.as_ref() };
        // Ordering: Relaxed; the count of references orders it.
        let state = it.slot(index).state.load(Ordering::Relaxed);
        let Some(state) = NotLive::read(state) else {
            debug_assert!(false, "{index} is live, and its last reference was put");
            return;
        };
        let mut panic = FirstPanic::default();
        dropping(core.address(), || core.drop_value(it, index, &mut panic));
        // SAFETY: the contract of this function; the value is dropped.
        unsafe { Self::vacate_last(this, slab, index, state) };
        panic.resume();
    }

    /// Vacates a dead slot without a value, whose last reference the calling thread has put.
    ///
    /// # Safety
    ///
    /// That of [`last_put`](Self::last_put).
    unsafe fn vacate_last(this: NonNull<Self>, slab: SlabPtr<T>, index: u32, state: NotLive) {
        // SAFETY: the dead slot keeps the core until `guard` is pinned, which keeps it from then on
        // (invariant 3 of the core). It is not used after `end`.
        let core = unsafe { this.as_ref() };
        let guard = rcu::pin();
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let it = unsafe { slab.as_ref() };
        let mut vacated = Vacated::new(core);
        vacated.add(slab, index, core.finish(it, index, state));
        // Ordering: Relaxed; a statistic.
        core.counters.referenced.fetch_sub(1, Ordering::Relaxed);
        let released = vacated.give_back();
        core.waiters.wake_threads();
        // SAFETY: the guard was pinned before the slot was vacated.
        unsafe { Self::end(this, guard) };
        drop(released); // without the guard, because RCU may run drops
    }
}

/// Ownership of the waiting lists: invariant 2 of [`retire`](super::retire).
struct Reclaiming<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    done: bool,
    /// The slabs that were released. They are retired when no mark of the reclaim is left, because that may
    /// run drops of other objects.
    released: Batch,
}

impl<'a, T: Send + Sync + 'static> Reclaiming<'a, T> {
    /// Takes the waiting lists, which are not empty and which no thread owns.
    fn begin(core: &'a Core<T>, mut state: WordGuard<'a, State<T>>) -> Self {
        state.reclaiming = true;
        Self { core, done: false, released: Batch::new() }
    }

    /// Reclaims the slots in the waiting lists, whose grace period has ended. Returns how many there were.
    fn run(&mut self, panic: &mut FirstPanic) -> usize {
        let address = self.core.address();
        let (vacated, released) = dropping(address, || self.core.reclaim(panic));
        self.released = released;
        self.done = true;
        vacated
    }
}

impl<T: Send + Sync + 'static> Drop for Reclaiming<'_, T> {
    /// Returns the lists to the lock.
    fn drop(&mut self) {
        let core = self.core;
        let mut state = core.lock();
        state.reclaiming = false;
        let mut send = false;
        if self.done {
            state.waiting = None;
            send = core.close_lists(&mut state);
        }
        let dropped = state.dropped;
        drop(state);
        if send {
            core.queue_callback();
        }
        core.waiters.wake_threads();
        if dropped {
            // SAFETY: the caller of `begin` borrows the table, or is the reclaim callback. Both keep the
            // core until after this call.
            unsafe { Core::end(core.this(), rcu::pin()) };
        }
    }
}

/// Reclaimed slots that become vacant together, under one lock.
pub(super) struct Vacated<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slots: [Option<(SlabPtr<T>, u64)>; BATCH],
    number: usize,
    exhausted: u64,
    /// The number of reclaimed slots that `State::dead` still counts.
    dead: u64,
    total: usize,
    empties_queue: bool,
    /// The slabs that were released.
    released: Batch,
}

impl<'a, T: Send + Sync + 'static> Vacated<'a, T> {
    pub(super) fn new(core: &'a Core<T>) -> Self {
        Self {
            core,
            slots: [None; BATCH],
            number: 0,
            exhausted: 0,
            dead: 0,
            total: 0,
            empties_queue: true,
            released: Batch::new(),
        }
    }

    fn add(&mut self, slab: SlabPtr<T>, index: u32, finished: Finished) {
        if self.number == BATCH {
            self.give_back_some();
        }
        self.total += 1;
        self.dead += 1;
        if let Finished::Exhausted = finished {
            self.exhausted += 1;
            return;
        }
        let bit = 1 << (index as usize % SLOTS);
        if let Some(Some((last, bits))) = self.number.checked_sub(1).map(|n| &mut self.slots[n]) {
            if *last == slab {
                *bits |= bit;
                return;
            }
        }
        self.slots[self.number] = Some((slab, bit));
        self.number += 1;
    }

    /// Makes all slots vacant, and also those in the queue of vacant slots, which may be higher. Returns
    /// the slabs that were released, which the caller retires without a guard and outside of a drop.
    pub(super) fn give_back(&mut self) -> Batch {
        self.empties_queue = true;
        self.give_back_some();
        std::mem::take(&mut self.released)
    }

    fn give_back_some(&mut self) {
        // The queue is emptied in the first and in the last call. Between them, inserts may refill it
        // with the lowest vacant slots of that time.
        let empties_queue = std::mem::take(&mut self.empties_queue);
        let slots = &mut self.slots[..self.number];
        self.number = 0;
        let mut state = self.core.lock();
        let slots = slots.iter_mut().filter_map(Option::take);
        self.core.vacate(&mut state, slots, empties_queue, &mut self.released);
        state.exhaust(std::mem::take(&mut self.exhausted));
        state.dead = state.dead.saturating_sub(std::mem::take(&mut self.dead));
    }
}
