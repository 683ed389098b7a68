//! What is done with dead slots when their grace period is over, and how that is waited for.
//!
//! The stages, and the invariants, are those of [`limbo`](super::retire).

use std::ptr::NonNull;

use percpu::fence::heavy_rseq;
use percpu::panics::drop_payload;
use percpu::rcu::{self, Batch};
use percpu::sync::atomic::Ordering;
use percpu::sync::{WordGuard, check, step};

use super::core::{Core, State};
use super::dropping::dropping;
use super::error::WaitError;
use super::panics::{Payload, caught};
use super::retire_list::{BATCH, EMPTY, Walk};
use super::slab::{NotLive, SLOTS, Slab, SlabPtr};

/// What [`Core::finish`] did with a dead slot.
enum Finished {
    Vacant,
    /// Its index will not be used again.
    Retired,
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Reclaims what has waited for long enough, and starts a grace period for the rest. Never
    /// blocks on one. Returns how many slots came free.
    pub(super) fn advance(&self) -> usize {
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
        reclaiming.run()
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
            let send = self.close_lists(&mut state);
            let waiting = state.waiting;
            drop(state);
            if send {
                self.queue_callback();
            }
            let Some(period) = waiting else { break };
            // Others may reclaim it meanwhile.
            if !period.poll() {
                rcu::synchronize()?;
            }
            let state = self.lock_reclaimed()?;
            if state.waiting == Some(period) {
                vacated += Reclaiming::begin(self, state).run();
            }
        }
        Ok(vacated)
    }

    /// The lock, at a moment when nobody reclaims. Blocks until then.
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

    /// Reclaims the slots in the `waiting` lists, which are the caller's.
    fn reclaim(&self) -> usize {
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
                    self.fold(slab, index, gone, &mut vacated);
                }
            }
            // Ordering: Relaxed; invariant 2.
            lists.waiting.iter().for_each(|list| list.store(EMPTY, Ordering::Relaxed));
        }
        vacated.give_back();
        vacated.total
    }

    /// After this no count of a slot that was dead before is open to a section.
    pub(super) fn restart_sections(&self) {
        // Ordering: Acquire pairs with the Release in `make_refs`; a count that is made after this
        // never had a reference of a slot that was dead before.
        if self.has_refs.load(Ordering::Acquire) {
            step!("fold: no section still counts", heavy_rseq());
        }
    }

    /// Folds a dead slot's count; vacates the slot if nobody has a reference.
    #[inline]
    pub(super) fn fold(
        &self,
        slab: SlabPtr<T>,
        index: u32,
        gone: NotLive,
        vacated: &mut Vacated<'_, T>,
    ) {
        // SAFETY: invariant 4 of `slab`: the slot is dead, and used until its vacancy.
        let it = unsafe { slab.as_ref() };
        if let Some(refs) = it.refs() {
            // First, as the last reference may be put as soon as the count is folded.
            // Ordering: Release pairs with the Acquire in `is_reclaimed`.
            it.slot(index).state.store(gone.referenced().bits(), Ordering::Release);
            // Ordering: Relaxed; a statistic.
            self.counters.referenced.fetch_add(1, Ordering::Relaxed);
            if !check!("fold: no reference is left", refs.fold(index as usize % SLOTS)) {
                return;
            }
            self.counters.referenced.fetch_sub(1, Ordering::Relaxed);
        }
        if let Err(payload) = self.drop_value(it, index) {
            // Ordering: Relaxed; a statistic.
            self.counters.panics.fetch_add(1, Ordering::Relaxed);
            drop_payload(payload);
        }
        vacated.add(slab, index, self.finish(it, index, gone));
        drop(self.waiters.take_slot(index));
    }

    fn drop_value(&self, slab: &Slab<T>, index: u32) -> Result<(), Payload> {
        if !std::mem::needs_drop::<T>() {
            return Ok(());
        }
        let slot = slab.slot(index);
        // SAFETY: dead for a grace period and without a reference, and ours: invariant 3.
        caught(|| unsafe { slot.drop_value() })
    }

    /// The end of a slot's life: its count is open again, its state vacant.
    fn finish(&self, slab: &Slab<T>, index: u32, gone: NotLive) -> Finished {
        if let Some(refs) = slab.refs() {
            refs.open(index as usize % SLOTS);
        }
        // Ordering: Release pairs with the Acquire of whoever asks whether it is reclaimed; it
        // carries the drop.
        slab.slot(index).state.store(NotLive::vacant(gone.next()).bits(), Ordering::Release);
        if gone.next() < self.limits.generations { Finished::Vacant } else { Finished::Retired }
    }

    /// The last reference to a dead slot was put: drops the value and vacates the slot.
    ///
    /// # Panics
    ///
    /// With the panic of the value's drop.
    ///
    /// # Safety
    ///
    /// `this` is a live core, which the dead slot keeps until it is vacant. A pointer, as for
    /// [`end`](Self::end): another thread may free the core before this returns.
    #[cold]
    pub(super) unsafe fn last_put(this: NonNull<Self>, slab: SlabPtr<T>, index: u32) {
        // SAFETY: the slot keeps it until the guard below is there. It is not used after the end.
        let core = unsafe { this.as_ref() };
        // Invariant 3 of the core: the table may be gone, and with it the borrow.
        // SAFETY: invariant 4 of `slab`: the slot is dead, and used until its vacancy.
        let it = unsafe { slab.as_ref() };
        // Ordering: Relaxed; the count of references orders it.
        let state = it.slot(index).state.load(Ordering::Relaxed);
        let Some(gone) = NotLive::read(state) else {
            debug_assert!(false, "{index} is live, and nobody has a reference");
            return;
        };
        let dropped = dropping(core.address(), || core.drop_value(it, index));
        let guard = rcu::pin();
        let mut vacated = Vacated::new(core);
        vacated.add(slab, index, core.finish(it, index, gone));
        let woken = core.waiters.take_slot(index);
        // Ordering: Relaxed; a statistic.
        core.counters.referenced.fetch_sub(1, Ordering::Relaxed);
        vacated.give_back();
        let threads = core.waiters.take_threads();
        // SAFETY: the guard is from before the slot was vacated.
        unsafe { Self::end(this, guard) };
        drop((woken, threads)); // wakers run without the guard
        if let Err(panic) = dropped {
            std::panic::resume_unwind(panic);
        }
    }
}

/// The right to the `waiting` lists: invariant 2 of [`limbo`](super::retire).
struct Reclaiming<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    done: bool,
}

impl<'a, T: Send + Sync + 'static> Reclaiming<'a, T> {
    /// Nobody has it, and something is waiting.
    fn begin(core: &'a Core<T>, mut state: WordGuard<'a, State<T>>) -> Self {
        state.reclaiming = true;
        Self { core, done: false }
    }

    /// Reclaims what waits, whose grace period is over.
    fn run(&mut self) -> usize {
        let vacated = dropping(self.core.address(), || self.core.reclaim());
        self.done = true;
        vacated
    }
}

impl<T: Send + Sync + 'static> Drop for Reclaiming<'_, T> {
    /// Gives the lists back to the lock.
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
        if dropped {
            // SAFETY: the caller of `begin` has a borrow of the table, or is the tick. Both keep the
            // core until after this.
            unsafe { Core::end(core.this(), rcu::pin()) };
        }
        core.waiters.notify();
    }
}

/// Slots to be given back together, so that the lock is taken once for some.
pub(super) struct Vacated<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slots: [Option<(SlabPtr<T>, u64)>; BATCH],
    number: usize,
    retired: u64,
    /// In `slots`, and retired.
    dead: u64,
    total: usize,
    empties_queue: bool,
}

impl<'a, T: Send + Sync + 'static> Vacated<'a, T> {
    pub(super) fn new(core: &'a Core<T>) -> Self {
        Self {
            core,
            slots: [None; BATCH],
            number: 0,
            retired: 0,
            dead: 0,
            total: 0,
            empties_queue: true,
        }
    }

    fn add(&mut self, slab: SlabPtr<T>, index: u32, finished: Finished) {
        if self.number == BATCH {
            self.give_back_some();
        }
        self.total += 1;
        self.dead += 1;
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
        self.slots[self.number] = Some((slab, bit));
        self.number += 1;
    }

    /// Gives all back, and with them what is in the queue of vacant slots, which may be higher.
    pub(super) fn give_back(&mut self) {
        self.empties_queue = true;
        self.give_back_some();
    }

    fn give_back_some(&mut self) {
        let mut batch = Batch::new();
        // The queue is emptied at the begin and at the end: in between others may refill it with what
        // is the lowest at that time.
        let empties_queue = std::mem::take(&mut self.empties_queue);
        let slots = &mut self.slots[..self.number];
        self.number = 0;
        let mut state = self.core.lock();
        let slots = slots.iter_mut().filter_map(Option::take);
        self.core.vacate(&mut state, slots, empties_queue, &mut batch);
        state.exhaust(std::mem::take(&mut self.retired));
        state.dead = state.dead.saturating_sub(std::mem::take(&mut self.dead));
    }
}
