//! Reclaims the slots of removed contexts, in batches, after a grace period.
//!
//! A removal only makes the slot's state dead and adds the slot to a list of its CPU. The rest is done
//! for many slots at once:
//!
//! ```text
//!  removal        cpu 0: filling -> s -> s -> s      under the lock, if nothing waits:
//!                 cpu 1: filling -> s                filling -> waiting, for a new grace period
//!
//!  reclaim        waiting -> s -> s -> s             after the grace period: one barrier that
//!                                                    restarts rseq sections, then for each slot
//!                                                    fold its count of references
//!                                                      none:  drop the value, vacate the slot
//!                                                      some:  the last put does that
//! ```
//!
//! Four calls advance reclaim: a removal whose CPU's list is full, an insert that needs a new slab,
//! [`poll`](crate::CtxTable::poll) and [`flush`](crate::CtxTable::flush). The *reclaim callback*
//! does too. It is an object of RCU in the core, and is queued while a list has a slot, so a table is
//! reclaimed wherever RCU is. The last callback frees the core.
//!
//! # Invariants
//!
//! 1. A dead slot is in one list from its removal until its fold. The thread that adds it is pinned
//!    until the link is stored. Reclaim reads links only after a grace period, so it never sees a slot
//!    without its link.
//! 2. The waiting lists belong to the thread that set `State::reclaiming`, or, while it is not set, to
//!    the lock.
//! 3. A slot's value is dropped once: by the fold that finds no reference, or by the last put.
//! 4. No value is dropped under the lock.
//! 5. While anything is in the waiting lists, the callback is queued. While anything is in the filling
//!    lists, the callback is queued, or a thread that added a slot is about to queue it.
//! 6. No guard of this crate is held, and no thread owns the waiting lists, when slabs are retired or the
//!    callback is queued: RCU may run drops of other objects in those calls. A thread that has marked the
//!    callback as queued keeps the core until it has queued it.

use std::ptr::NonNull;

use offlock_percpu::fence::{heavy, heavy_rseq, light};
use offlock_percpu::rcu::{self, Batch, Guard, RetireHead};
use offlock_sync::atomic::Ordering;
use offlock_sync::quarantine::{self, Watched};
use offlock_sync::{WordGuard, check, order, step};

use crate::core::{Core, State};
use crate::error::WaitError;
use crate::id::{Id, MAX_GENERATION};
use crate::retire_list::{BATCH, EMPTY, LANES, RetireLists, Walk};
use crate::slab::{LAST_KEY, NO_LINK, NotLive, SLOTS, Slab, SlabPtr, Slot};
use crate::user_code::{FirstPanic, dropping};

/// The minimum list length at which a removal advances reclaim. The length grows with the table, to
/// a sixteenth of the live contexts per CPU, up to `LARGEST`. Both are guesses: to advance costs
/// some microseconds of fences.
pub(super) const SMALLEST: u32 = if cfg!(offlock_model) { 2 } else { 1024 / LANES as u32 };
const LARGEST: u64 = (1 << 16) / LANES as u64;

impl<T: Send + Sync + 'static> Core<T> {
    /// Adds a dead slot to a list. Returns whether reclaim must advance, and the callback be queued, after
    /// the guard has ended.
    ///
    /// # Safety
    ///
    /// The calling thread has just changed the state from `id` to dead, and since then holds an RCU
    /// guard.
    #[inline]
    pub(super) unsafe fn retire(&self, slot: &Slot<T>, id: Id) -> bool {
        self.quota.give_back(1);
        let Some(lists) = self.lists.get() else {
            return false; // always `Some` here: making the first slab creates the lists
        };
        // SAFETY: the caller has made the slot dead, under its guard.
        let length = unsafe { lists.local().splice(1, id.index(), slot, id) };
        // Pairs with the `heavy` in `run_callback`: either `run_callback` sees the slot, or this
        // thread sees `callback_queued == false` and queues the callback.
        step!("retire: the slot is in its list before the look for the callback", light());
        // Ordering: Relaxed, both; a hint, and ordered by the fence.
        let batch = self.batch.load(Ordering::Relaxed);
        length & (batch - 1) == 0 || !self.callback_queued.load(Ordering::Relaxed)
    }

    /// Makes every live slot of a slab dead and adds them to lists. Returns how many there were.
    ///
    /// If there were any, reclaim must advance, and the callback be queued, after the guard has ended.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    pub(super) unsafe fn retire_all(&self, slab: &Slab<T>) -> usize {
        let Some(lists) = self.lists.get() else {
            return 0; // always `Some` here: making the first slab creates the lists
        };
        let lists = lists.local();
        let mut killed = 0;
        for lane in 0..LANES {
            let (mut first, mut last, mut count) = (NO_LINK, None, 0);
            for at in (lane..SLOTS).step_by(LANES) {
                let slot = slab.slot(at as u32);
                // Ordering: Relaxed; the exchange in `kill` checks it.
                let state = slot.state.load(Ordering::Relaxed);
                if NotLive::read(state).is_some() || !slot.kill(Id::from_live(state)) {
                    continue;
                }
                let id = Id::from_live(state);
                // Ordering: Release, like the store of the link in `RetireLists::splice`.
                let order = order!(Release, "retire all: the link carries what came before");
                slot.state.store(NotLive::dead(id, first).bits(), order);
                first = id.index();
                last = last.or(Some((slot, id)));
                count += 1;
            }
            if let Some((slot, id)) = last {
                // SAFETY: the slots were made dead above, under the caller's guard, and are linked.
                unsafe { lists.splice(count, first, slot, id) };
                killed += count as usize;
            }
        }
        self.quota.give_back(killed as u64);
        killed
    }

    /// Returns the number of slots in the filling lists. Wait-free. Exact only if the removals
    /// happen before this call.
    pub(super) fn filled(&self) -> u64 {
        self.all_lists().map(RetireLists::filled).sum()
    }

    /// Returns the number of dead slots. Exact while no thread removes a context.
    pub(super) fn pending(&self, state: &State<T>) -> u64 {
        state.dead + self.filled()
    }

    /// Returns the number of live contexts. Exact while no thread inserts or removes one.
    pub(super) fn len(&self, state: &State<T>) -> u64 {
        state.in_use().saturating_sub(self.pending(state))
    }

    /// Iterates over the lists of every CPU. There are none before the first slab.
    pub(super) fn all_lists(&self) -> impl Iterator<Item = &RetireLists> {
        self.lists.get().into_iter().flat_map(|lists| lists.iter()).map(|(_, lists)| lists)
    }

    /// Moves the filling lists to the waiting lists and starts a grace period for them. Does
    /// nothing while an earlier batch waits or is reclaimed.
    ///
    /// Returns whether the caller must queue the callback, after it has unlocked.
    #[must_use = "a callback that is marked as queued must be queued"]
    pub(super) fn close_lists(&self, state: &mut State<T>) -> bool {
        if state.waiting.is_some() || state.reclaiming {
            return false;
        }
        let slots: u64 = self.all_lists().map(RetireLists::close).sum();
        if slots == 0 {
            return false;
        }
        state.dead += slots;
        state.waiting = Some(rcu::start_grace_period());
        let live = state.in_use() / 16 / LANES as u64;
        let batch = live.clamp(u64::from(SMALLEST), LARGEST).next_power_of_two();
        // Ordering: Relaxed, both; a hint, and a flag that changes under the lock.
        self.batch.store(batch as u32, Ordering::Relaxed);
        !self.callback_queued.swap(true, Ordering::Relaxed)
    }
}

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
        let mut reclaiming = Reclaiming::begin(self, state, panic);
        if !check!("reclaim: a grace period is over", period.poll()) {
            return 0;
        }
        reclaiming.run()
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
                vacated += Reclaiming::begin(self, state, &mut panic).run();
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
            self.wait_change(None, || (!self.lock().reclaiming).then_some(()));
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
        unsafe { Self::vacate_last(this, slab, index, state, &mut panic) };
        panic.resume();
    }

    /// Vacates a dead slot without a value, whose last reference the calling thread has put.
    ///
    /// # Safety
    ///
    /// That of [`last_put`](Self::last_put).
    unsafe fn vacate_last(
        this: NonNull<Self>,
        slab: SlabPtr<T>,
        index: u32,
        state: NotLive,
        panic: &mut FirstPanic,
    ) {
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
        unsafe { Self::end(this, guard, panic) };
        drop(released); // without the guard, because RCU may run drops
    }
}

/// Ownership of the waiting lists: invariant 2 of [`reclaim`](crate::reclaim).
struct Reclaiming<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    /// The panics of drops, in the reclaim and in the end of the table.
    panic: &'a mut FirstPanic,
    done: bool,
    /// The slabs that were released. They are retired when no mark of the reclaim is left, because that may
    /// run drops of other objects.
    released: Batch,
}

impl<'a, T: Send + Sync + 'static> Reclaiming<'a, T> {
    /// Takes the waiting lists, which are not empty and which no thread owns.
    fn begin(
        core: &'a Core<T>,
        mut state: WordGuard<'a, State<T>>,
        panic: &'a mut FirstPanic,
    ) -> Self {
        state.reclaiming = true;
        Self { core, panic, done: false, released: Batch::new() }
    }

    /// Reclaims the slots in the waiting lists, whose grace period has ended. Returns how many there were.
    fn run(&mut self) -> usize {
        let address = self.core.address();
        let (vacated, released) = dropping(address, || self.core.reclaim(self.panic));
        self.released = released;
        self.done = true;
        vacated
    }
}

impl<T: Send + Sync + 'static> Drop for Reclaiming<'_, T> {
    /// Returns the lists to the lock, and ends the table if it was dropped meanwhile.
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
            unsafe { Core::end(core.this(), rcu::pin(), self.panic) };
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

impl<T: Send + Sync + 'static> Core<T> {
    /// Queues the callback if a list has slots and the callback is not queued. The caller holds no guard.
    pub(super) fn queue_callback_for_lists(&self) {
        if self.claim_callback() {
            self.queue_callback();
        }
    }

    /// Closes the lists if they have slots and the callback is not queued. Returns whether the caller must
    /// queue it, after its guard has ended.
    #[must_use = "a callback that is marked as queued must be queued"]
    fn claim_callback(&self) -> bool {
        let mut state = self.lock();
        // While the callback is not queued nothing waits (invariant 5 of `reclaim`). So the lists are
        // closed, unless `end` reclaims, which empties the lists itself. A thread that adds a slot behind
        // that finds the flag clear.
        // Ordering: Relaxed; under the lock.
        !self.callback_queued.load(Ordering::Relaxed) && self.close_lists(&mut state)
    }

    /// Queues the callback. The caller has set `callback_queued`, and holds no guard, because RCU may run
    /// drops in the call.
    pub(super) fn queue_callback(&self) {
        queue_callback(self.this());
    }

    /// Ends a table that is dropped: makes every live context dead and reclaims all that have no
    /// reference. No grace period is necessary, because no borrow of the table is left. If another
    /// thread reclaims at this moment, that thread ends the table. The core lives on until the last
    /// reference is put.
    ///
    /// # Safety
    ///
    /// `this` is the core of the table that is dropped, and the caller does not use it after this call.
    pub(super) unsafe fn end_table(this: NonNull<Self>) {
        let guard = rcu::pin(); // invariant 3 of the core
        // SAFETY: the table keeps the core until `guard` is pinned, which keeps it from then on.
        unsafe { this.as_ref() }.lock().dropped = true;
        let mut panic = FirstPanic::default();
        // SAFETY: the guard was pinned before `dropped` was set.
        unsafe { Self::end(this, guard, &mut panic) };
        panic.resume();
    }

    /// Ends a dropped table, unless another thread does. Queues the callback that frees the core once
    /// the table is over. Leaves the first panic of a drop or a waker to the caller, which goes on with it
    /// when it has nothing left to do.
    ///
    /// `this` is a pointer because another thread may free the core when the guard has ended, before
    /// this returns. A `&self` would promise that the core outlives the call.
    ///
    /// # Safety
    ///
    /// `this` is a live core, and the guard was pinned before the caller gave up its borrow, its slot or
    /// its right to reclaim: invariant 3 of the core.
    pub(super) unsafe fn end(this: NonNull<Self>, mut guard: Guard, panic: &mut FirstPanic) {
        // SAFETY: the guard keeps the core (invariant 3 of the core). Below, it ends only while
        // `reclaiming` is set, which keeps the core, and at the end.
        let it = unsafe { this.as_ref() };
        let mut state = it.lock();
        if state.dropped && !state.reclaiming && !state.ended {
            state.ended = true;
            state.dead = state.in_use();
            state.reclaiming = true;
            drop(state);
            drop(guard); // drops of values may wait for readers; `reclaiming` keeps the core
            dropping(it.address(), || it.reclaim_all(panic));
            guard = rcu::pin();
            state = it.lock();
            state.reclaiming = false;
        }
        // Ordering: Relaxed, both; under the lock.
        let over = state.is_over() && !it.callback_queued.load(Ordering::Relaxed);
        if over {
            it.callback_queued.store(true, Ordering::Relaxed);
            state.callback_frees = true;
        }
        drop(state);
        drop(guard); // RCU may run drops when the callback is queued
        if over {
            // The core stays until this thread has queued the callback that frees it.
            queue_callback(this);
        }
    }

    /// Makes every live slot dead, and reclaims the dead slots that have no reference.
    fn reclaim_all(&self, panic: &mut FirstPanic) {
        let for_each = |f: &mut dyn FnMut(SlabPtr<T>, u32, u64)| {
            let mut from = 0;
            while let Some((key, slab)) = self.slabs.next_slab(from, LAST_KEY) {
                // SAFETY: invariant 4 of `slab`: the table is dropped, so all its slabs stay.
                let it = unsafe { slab.as_ref() };
                for number in 0..SLOTS {
                    let index = it.index(number);
                    // Ordering: Acquire pairs with the Release in `Claim::fill`; it carries the value.
                    f(slab, index, it.slot(index).state.load(Ordering::Acquire));
                }
                from = key + 1;
            }
        };
        for_each(&mut |slab, index, state| {
            if NotLive::read(state).is_none() {
                let id = Id::from_bits(state).expect("a live state is an id");
                // SAFETY: invariant 4 of `slab`: the table is dropped, so all its slabs stay.
                let slot = unsafe { slab.as_ref() }.slot(index);
                // Ordering: Release pairs with the Acquire in `CtxRef::is_removed`; it carries what this
                // thread did before. After the barrier below, no section finds the slot live.
                let order = order!(Release, "end: the state carries what came before the drop");
                slot.state.store(NotLive::dead(id, NO_LINK).bits(), order);
            }
        });
        panic.call(|| self.waiters.wake_all_tasks());
        self.restart_sections();
        let mut vacated = Vacated::new(self);
        for_each(&mut |slab, index, state| {
            if let Some(state) = NotLive::read(state) {
                if state.is_dead() && !state.is_referenced() {
                    self.fold(slab, index, state, &mut vacated, panic);
                }
            }
        });
        self.all_lists().for_each(RetireLists::clear);
        drop(vacated.give_back()); // empty, because a dropped table keeps its slabs
    }
}

/// Queues the callback of a core. The caller has set `callback_queued`, and holds no guard.
fn queue_callback<T: Send + Sync + 'static>(core: NonNull<Core<T>>) {
    let offset = std::mem::offset_of!(Core<T>, callback);
    // SAFETY: the field lies within the core.
    let callback = unsafe { core.byte_add(offset) }.cast();
    // SAFETY: the flag `callback_queued` keeps it from being queued twice at a time. Its function is
    // `run_callback`, which frees the core only when no other thread uses it.
    unsafe { rcu::retire_raw(callback, size_of::<Core<T>>()) };
}

/// The function of the callback. RCU calls it a grace period after the callback was queued.
///
/// # Safety
///
/// `head` is the callback of a core and was queued.
pub(super) unsafe fn run_callback<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    let offset = std::mem::offset_of!(Core<T>, callback);
    // SAFETY: the head lies at that offset of a core.
    let core = unsafe { head.byte_sub(offset) }.cast::<Core<T>>();
    // SAFETY: only the callback frees the core.
    let it = unsafe { core.as_ref() };
    let mut panic = FirstPanic::default();
    it.advance_by(&mut panic);
    let guard = rcu::pin(); // invariant 3 of the core
    let mut state = it.lock();
    if state.callback_frees {
        drop(state);
        drop(guard); // the core may have many slabs: their frees need not delay a grace period
        // SAFETY: the core lies in the `Watched` that `Builder::build` made.
        let core = unsafe { core.byte_sub(Watched::<Core<T>>::OFFSET) }.cast::<Watched<Core<T>>>();
        // SAFETY: a box of `Builder::build`. The table and every context are gone. Since the last of
        // them went, a grace period has ended, for which every thread that used the core was pinned.
        quarantine::free(unsafe { Box::from_raw(core.as_ptr()) });
        return panic.resume();
    }
    // If the table is over, one more callback frees the core: the grace period of this one may have
    // begun before the end.
    state.callback_frees = state.is_over();
    let again = state.callback_frees || it.close_lists(&mut state) || state.waiting.is_some();
    if !again {
        // Ordering: Relaxed; under the lock.
        it.callback_queued.store(false, Ordering::Relaxed);
    }
    drop(state);
    let mut queue = again;
    if !again {
        // A thread that added a slot just before may have seen the flag set: invariant 5 of `reclaim`.
        // Pairs with the `light` in `Core::retire`.
        step!("callback: the flag is clear before the look at the lists", heavy());
        if it.filled() != 0 {
            step!(
                "callback: queue it for slots that were added meanwhile",
                queue = it.claim_callback()
            );
        }
    }
    drop(guard); // RCU may run drops when the callback is queued
    if queue {
        // The core stays until this thread has queued the callback.
        queue_callback(core);
    }
    panic.resume(); // RCU catches it
}
