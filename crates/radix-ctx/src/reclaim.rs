//! Reclaims the slots of removed contexts, in batches, after a grace period.
//!
//! ```text
//!  waiting -> s -> s -> s    after the grace period: one barrier that restarts rseq sections, then for
//!                            each slot: take it off its list, fold its count of references
//!                              none:  drop the value, vacate the slot
//!                              some:  the last put does that
//! ```
//!
//! Four calls advance reclaim: a removal whose CPU's list is full ([`remove`](crate::remove)), an insert
//! that needs a new slab, [`is_done`](crate::Removal::is_done) and [`flush`](crate::CtxTable::flush). The
//! *reclaim callback* does too. It is an object of RCU in the core, and is queued while a list has a slot,
//! so a table is reclaimed wherever RCU is. The last callback frees the core.
//!
//! If the drop of a value panics, the panic ends the call. Its slot becomes vacant all the same, and the slots behind
//! it stay in their lists for the next call. The callback is queued meanwhile.
//!
//! # Invariants
//!
//! 1. A dead slot is in one list from its removal until its fold, or until the end of its dropped table begins.
//!    The thread that adds it is pinned until the link is stored. Reclaim reads links only after a grace period, so it never sees a slot
//!    without its link.
//! 2. The waiting lists belong to the thread that set `State::reclaiming`, or, while it is not set, to
//!    the lock.
//! 3. A slot's value is dropped once: by the fold that finds no reference, or by the last put.
//! 4. No value is dropped under the lock.
//! 5. While anything is in the waiting lists, or a dropped table has contexts without a reference, the
//!    callback is queued, or the table's drop is running. While anything is in the filling lists, the callback is queued,
//!    or a thread that added a slot is about to queue it.
//! 6. No guard of this crate is held, and no thread owns the waiting lists, when slabs are retired or the
//!    callback is queued: RCU may run drops of other objects in those calls. A thread that has marked the
//!    callback as queued keeps the core until it has queued it.

use std::mem::{needs_drop, offset_of, take};
use std::ptr::NonNull;

use offlock_percpu::fence::{heavy, heavy_rseq};
use offlock_percpu::rcu::{self, Batch, Guard, RetireHead};
use offlock_sync::atomic::Ordering;
use offlock_sync::quarantine;
use offlock_sync::{Wakers, WordGuard, check, order, step};

use crate::core::{Core, LANES, RetireLists, State, VacantBits};
use crate::error::WaitError;
use crate::id::{Id, MAX_GENERATION};
use crate::slab::{NO_LINK, NotLive, Refs, SLAB_BITS, SLOTS, Slab, SlabPtr, SlabTree, slab_of};

/// The number of slabs whose slots a reclaim makes vacant under one lock: some hundred nanoseconds.
const BATCH: usize = 32;

/// The minimum list length at which a removal advances reclaim. The length grows with the table, to
/// a sixteenth of the live contexts per CPU, up to `LARGEST`. To advance costs some microseconds of fences.
pub(super) const SMALLEST: u32 = if cfg!(offlock_model) { 2 } else { 1024 / LANES as u32 };
const LARGEST: u64 = (1 << 16) / LANES as u64;

impl<T: Send + Sync + 'static> Core<T> {
    /// Reclaims the slots in the waiting lists if their grace period has ended, and then moves the filling
    /// lists to the waiting lists and starts their grace period. Never blocks for a grace period. Returns how many
    /// slots it reclaimed: none if the calling thread holds a guard, because drops may wait for readers.
    ///
    /// # Panics
    ///
    /// Panics if the drop of a context does.
    pub(super) fn advance(&self) -> usize {
        let mut state = self.lock();
        if state.reclaiming {
            return 0;
        }
        let Some(period) = state.waiting else {
            let queue = self.close_lists(&mut state);
            drop(state);
            if queue {
                self.queue_callback();
            }
            return 0;
        };
        if rcu::is_pinned() {
            return 0;
        }
        let reclaiming = Reclaiming::begin(self, state); // the poll does not run under the lock
        if check!("reclaim: a grace period is over", period.poll()) { reclaiming.run() } else { 0 }
    }

    /// Advances until every slot that was dead before this call has left the lists, or until `done` returns true
    /// after a period. Returns how many slots this thread reclaimed. Blocks for at most two grace periods, and for
    /// another thread that reclaims.
    pub(super) fn flush(&self, mut done: impl FnMut() -> bool) -> Result<usize, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let mut vacated = 0;
        for round in 1..=2 {
            let mut state = self.lock_reclaimed()?;
            // If lists wait already, the slots in the filling lists wait for the period after that.
            let is_last = round == 2 || state.waiting.is_none();
            let queue = self.close_lists(&mut state);
            let waiting = state.waiting;
            drop(state);
            if queue {
                self.queue_callback();
            }
            let Some(period) = waiting else { break };
            if !period.poll() {
                rcu::synchronize()?;
            }
            let state = self.lock_reclaimed()?;
            // Meanwhile another thread may have reclaimed these lists, and others wait for a later period.
            let is_same = state.waiting == Some(period);
            if check!("flush: the lists still wait for the period that has ended", is_same) {
                vacated += Reclaiming::begin(self, state).run();
            } else {
                drop(state);
            }
            if is_last || done() {
                break;
            }
        }
        Ok(vacated)
    }

    /// Locks the state while no thread reclaims. Blocks until then.
    fn lock_reclaimed(&self) -> Result<WordGuard<'_, State<T>>, WaitError> {
        loop {
            if self.is_in_drop() {
                return Err(WaitError::InDrop);
            }
            let state = self.lock();
            if !state.reclaiming {
                return Ok(state);
            }
            drop(state);
            self.changes.wait(None, || (!self.lock().reclaiming).then_some(()));
        }
    }

    /// Moves the filling lists to the waiting lists and starts a grace period for them. Does
    /// nothing while an earlier batch waits or is reclaimed.
    ///
    /// Returns whether the caller must queue the callback, after it has unlocked.
    #[must_use = "a callback that is marked as queued must be queued"]
    fn close_lists(&self, state: &mut State<T>) -> bool {
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

    /// Takes each slot off the waiting lists, which belong to the calling thread, and reclaims it.
    fn reclaim(&self, vacated: &mut VacatedSlots<T>) {
        self.restart_sections();
        for lists in self.all_lists() {
            let mut waiting = Waiting::new(&self.slabs, lists);
            while let Some((slab, index, state)) = waiting.take_next(&self.slabs) {
                self.fold(slab, index, state, vacated);
            }
        }
    }

    /// Restarts rseq sections. After this, no section changes the count of a slot that was dead before.
    fn restart_sections(&self) {
        // Ordering: Acquire pairs with the Release in `make_refs`. Counts that are made after this load
        // never had a reference to a slot that was dead before. The lock, which the caller has taken,
        // orders them as well, so no model fails with a weaker load.
        if self.has_refs.load(Ordering::Acquire) {
            step!("fold: no section still counts", heavy_rseq());
        }
    }

    /// Folds the count of a dead slot that is in no list. Drops the value and vacates the slot if there is
    /// no reference.
    #[inline]
    fn fold(&self, slab: SlabPtr<T>, index: u32, state: NotLive, vacated: &mut VacatedSlots<T>) {
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let it = unsafe { slab.as_ref() };
        let refs = it.refs();
        if let Some(refs) = refs {
            // Before the fold: the last reference may be put as soon as the count is folded.
            // Ordering: Release pairs with the Acquire in `CtxRef::is_removed`; it carries what the
            // removing thread did before.
            let order = order!(Release, "fold: the mark carries what came before the removal");
            it.slot(index).state.store(state.referenced().bits(), order);
            // Ordering: Relaxed; a statistic.
            self.referenced.fetch_add(1, Ordering::Relaxed);
            if !check!("fold: no reference is left", refs.counts.fold(index as usize % SLOTS)) {
                return;
            }
            self.referenced.fetch_sub(1, Ordering::Relaxed);
        }
        let _vacate = VacateOnDrop { core: self, slab, refs, index, state, vacated };
        if needs_drop::<T>() {
            // SAFETY: the slot was dead for a grace period and has no reference; only this thread drops
            // the value (invariant 3).
            unsafe { it.slot(index).drop_value() };
        }
    }

    /// Opens the count of a slot again and makes its state vacant. Its value is dropped.
    #[inline]
    fn finish(slab: &Slab<T>, refs: Option<&Refs>, index: u32, state: NotLive) {
        if let Some(refs) = refs {
            refs.counts.open(index as usize % SLOTS);
        }
        // Ordering: Release pairs with the Acquire in `Core::not_live` and in `is_clear`; it carries the
        // drop of the value.
        let order = order!(Release, "finish: the drop has ended");
        slab.slot(index).state.store(NotLive::vacant(state.next(), index).bits(), order);
    }
}

/// The waiting lists of a CPU during their reclaim. The lists begin with the slots that were not taken,
/// so the next reclaim goes on there after a panic.
struct Waiting<'a, T: Send + Sync + 'static> {
    lists: &'a RetireLists,
    /// The first slot of each list, and its slab.
    first: [Option<(u32, SlabPtr<T>)>; LANES],
    /// The list of the next slot: each in turn, because each slot is a cache miss.
    lane: usize,
}

/// A dead slot that is in no list: its slab, its index and its state.
type Dead<T> = (SlabPtr<T>, u32, NotLive);

impl<'a, T: Send + Sync + 'static> Waiting<'a, T> {
    fn new(slabs: &SlabTree<T>, lists: &'a RetireLists) -> Self {
        let first = lists.waiting.each_ref().map(|list| {
            // Ordering: Relaxed; invariant 2.
            Self::find(slabs, list.load(Ordering::Relaxed) as u32)
        });
        Self { lists, first, lane: 0 }
    }

    fn find(slabs: &SlabTree<T>, index: u32) -> Option<(u32, SlabPtr<T>)> {
        if index == NO_LINK {
            return None;
        }
        // SAFETY: invariant 4 of `slab`: a slot in a list is dead, so used.
        let slab = unsafe { slabs.slab(index) }?;
        slab.prefetch(index);
        Some((index, slab.into()))
    }

    /// Takes a slot off its list.
    #[inline]
    fn take_next(&mut self, slabs: &SlabTree<T>) -> Option<Dead<T>> {
        for _ in 0..LANES {
            let lane = self.lane;
            self.lane = (lane + 1) % LANES;
            let Some((index, slab)) = self.first[lane] else { continue };
            // SAFETY: invariant 4 of `slab`: a slot in a list is dead, so used.
            let slot = unsafe { slab.as_ref() }.slot(index);
            // Ordering: Relaxed; the grace period orders the link.
            let state = NotLive::read(slot.state.load(Ordering::Relaxed));
            debug_assert!(state.is_some(), "{index} is in a list, and live");
            let link = state.map_or(NO_LINK, NotLive::link);
            let is_near = link != NO_LINK && link >> SLAB_BITS == index >> SLAB_BITS;
            self.first[lane] = if is_near { Some((link, slab)) } else { Self::find(slabs, link) };
            // Ordering: Relaxed; invariant 2.
            self.lists.waiting[lane].store(u64::from(link), Ordering::Relaxed);
            if let Some(state) = state {
                return Some((slab, index, state));
            }
        }
        None
    }
}

/// Ownership of the waiting lists: invariant 2.
struct Reclaiming<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    vacated: VacatedSlots<T>,
    /// The waiting lists are empty.
    done: bool,
}

impl<'a, T: Send + Sync + 'static> Reclaiming<'a, T> {
    /// Takes the waiting lists, which are not empty and which no thread owns.
    fn begin(core: &'a Core<T>, mut state: WordGuard<'a, State<T>>) -> Self {
        state.reclaiming = true;
        Self { core, vacated: VacatedSlots::new(), done: false }
    }

    /// Reclaims the slots in the waiting lists, whose grace period has ended. Returns how many there were.
    fn run(mut self) -> usize {
        self.core.dropping(|| self.core.reclaim(&mut self.vacated));
        self.done = true;
        (self.vacated.total + self.vacated.dead) as usize
    }
}

impl<T: Send + Sync + 'static> Drop for Reclaiming<'_, T> {
    /// Returns the lists to the lock. Retires the slabs that were released after that (invariant 6).
    fn drop(&mut self) {
        let core = self.core;
        let mut state = core.lock();
        self.vacated.end(core, &mut state);
        state.reclaiming = false;
        let mut queue = false;
        if self.done {
            state.waiting = None;
            queue = core.close_lists(&mut state);
        }
        drop(state);
        core.changes.wake_all();
        if queue {
            core.queue_callback();
        }
    }
}

/// Makes a slot vacant whose value is dropped, also if its drop panics.
struct VacateOnDrop<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    slab: SlabPtr<T>,
    refs: Option<&'a Refs>,
    index: u32,
    state: NotLive,
    vacated: &'a mut VacatedSlots<T>,
}

impl<T: Send + Sync + 'static> Drop for VacateOnDrop<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: invariant 4 of `slab`: the slot is used until its bit is cleared.
        Core::finish(unsafe { self.slab.as_ref() }, self.refs, self.index, self.state);
        self.vacated.add(self.core, self.slab, self.index, self.state);
    }
}

/// Reclaimed slots whose bits in `used` are cleared together, under one lock.
struct VacatedSlots<T: Send + Sync + 'static> {
    slots: [VacantBits<T>; BATCH],
    number: usize,
    exhausted: u64,
    /// The number of reclaimed slots that `State::dead` still counts.
    dead: u64,
    /// The number of the others.
    total: u64,
    /// The slabs that were released. The drop retires them: invariant 6.
    released: Batch,
}

impl<T: Send + Sync + 'static> VacatedSlots<T> {
    fn new() -> Self {
        let (slots, released) = ([(NonNull::dangling(), 0); BATCH], Batch::new());
        Self { slots, number: 0, exhausted: 0, dead: 0, total: 0, released }
    }

    #[inline]
    fn add(&mut self, core: &Core<T>, slab: SlabPtr<T>, index: u32, state: NotLive) {
        self.dead += 1;
        if state.next() >= MAX_GENERATION {
            self.exhausted += 1;
            return;
        }
        let bit = 1 << (index as usize % SLOTS);
        if let Some((last, bits)) = self.slots[..self.number].last_mut() {
            if *last == slab {
                *bits |= bit;
                return;
            }
        }
        self.slots[self.number] = (slab, bit);
        self.number += 1;
        if self.number == BATCH {
            self.clear_bits(core, &mut core.lock());
        }
    }

    /// Makes all slots vacant, and also those in the queue of vacant slots, which may be higher.
    fn end(&mut self, core: &Core<T>, state: &mut State<T>) {
        if self.total + self.dead != 0 {
            core.empty_queue(state, &mut self.released);
            self.clear_bits(core, state);
        }
    }

    fn clear_bits(&mut self, core: &Core<T>, state: &mut State<T>) {
        for &(slab, bits) in &self.slots[..take(&mut self.number)] {
            core.mark_vacant(state, slab, bits, &mut self.released);
        }
        let dead = take(&mut self.dead);
        self.total += dead;
        state.used -= dead;
        state.exhausted += take(&mut self.exhausted);
        state.dead = state.dead.saturating_sub(dead);
    }
}

/// The last reference to a dead slot was put: the slot belongs to the calling thread, and keeps the core
/// until the drop of this, which makes the slot vacant.
struct LastPut<T: Send + Sync + 'static> {
    this: NonNull<Core<T>>,
    slab: SlabPtr<T>,
    index: u32,
    state: NotLive,
}

impl<T: Send + Sync + 'static> Drop for LastPut<T> {
    fn drop(&mut self) {
        // SAFETY: the dead slot keeps the core until `guard` is pinned, which keeps it from then on
        // (invariant 3 of the core). It is not used after `settle`.
        let core = unsafe { self.this.as_ref() };
        let guard = rcu::pin();
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let slab = unsafe { self.slab.as_ref() };
        Core::finish(slab, slab.refs(), self.index, self.state);
        // Ordering: Relaxed; a statistic.
        core.referenced.fetch_sub(1, Ordering::Relaxed);
        let mut released = Batch::new();
        let mut state = core.lock();
        state.dead = state.dead.saturating_sub(1);
        core.vacate(&mut state, self.slab, self.index, self.state, &mut released);
        // SAFETY: the guard was pinned before the slot was vacated.
        unsafe { Core::settle(self.this, guard, state) };
        drop(released); // without the guard (invariant 6)
    }
}

impl<T: Send + Sync + 'static> Core<T> {
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
        // SAFETY: the dead slot keeps the core; it is not used after the drop of `LastPut`.
        let core = unsafe { this.as_ref() };
        // SAFETY: invariant 4 of `slab`: a dead slot is used until it is vacant.
        let slot = unsafe { slab.as_ref() }.slot(index);
        // Ordering: Relaxed; the count of references orders it.
        let state = slot.state.load(Ordering::Relaxed);
        let Some(state) = NotLive::read(state) else {
            debug_assert!(false, "{index} is live, and its last reference was put");
            return;
        };
        let _vacate = LastPut { this, slab, index, state };
        // SAFETY: no reference is left, and only this thread drops the value (invariant 3).
        core.dropping(|| unsafe { slot.drop_value() });
    }

    /// Unlocks, and wakes the threads that wait for a change. If the table is dropped, queues the callback
    /// for what is left to do: the end that a panic has stopped, or the free of the core.
    ///
    /// `this` is a pointer because another thread may free the core when the guard has ended, before
    /// this returns. A `&self` would promise that the core outlives the call.
    ///
    /// # Safety
    ///
    /// `this` is a live core, `state` its state, and the guard was pinned before the caller gave up its
    /// borrow, its slot or its right to reclaim: invariant 3 of the core.
    unsafe fn settle(this: NonNull<Self>, guard: Guard, mut state: WordGuard<'_, State<T>>) {
        // SAFETY: the guard keeps the core (invariant 3 of the core).
        let core = unsafe { this.as_ref() };
        // Ordering: Relaxed; under the lock.
        let queue = (state.is_over() || state.must_end())
            && !core.callback_queued.swap(true, Ordering::Relaxed);
        state.callback_frees |= queue && state.is_over();
        drop(state);
        core.changes.wake_all();
        core.lives();
        drop(guard); // invariant 6
        if queue {
            // SAFETY: the core stays until this thread has queued the callback, which was marked above.
            unsafe { Self::queue(this) };
        }
    }

    /// Closes the lists if they have slots and the callback is not queued. Returns whether the caller must
    /// queue it, after its guard has ended.
    #[must_use = "a callback that is marked as queued must be queued"]
    pub(super) fn claim_callback(&self) -> bool {
        let mut state = self.lock();
        // While the callback is not queued nothing waits (invariant 5). So the lists are closed, unless the
        // end of the table reclaims, which empties the lists itself. A thread that adds a slot behind that
        // finds the flag clear.
        // Ordering: Relaxed; under the lock.
        !self.callback_queued.load(Ordering::Relaxed) && self.close_lists(&mut state)
    }

    /// Queues the callback. The caller has set `callback_queued`, and holds no guard (invariant 6).
    pub(super) fn queue_callback(&self) {
        // SAFETY: the flag was set by the caller.
        unsafe { Self::queue(self.this()) };
    }

    /// Queues the callback.
    ///
    /// # Safety
    ///
    /// `this` is a live core, and the calling thread has set its `callback_queued`.
    unsafe fn queue(this: NonNull<Self>) {
        // SAFETY: the field lies within the core.
        let callback = unsafe { this.byte_add(offset_of!(Self, callback)) }.cast();
        // SAFETY: the flag `callback_queued` keeps it from being queued twice at a time. Its function is
        // `run_callback`, which frees the core only when no other thread uses it.
        unsafe { rcu::retire_raw(callback, size_of::<Self>()) };
    }

    /// Ends a table that is dropped: removes every context, and drops those without a reference. No grace
    /// period is necessary, because no borrow of the table is left. If the callback reclaims at this moment, it
    /// ends the table. The core lives on until the last reference is put.
    ///
    /// # Panics
    ///
    /// Panics if the drop of a context or a waker does. The callback drops the other contexts then.
    ///
    /// # Safety
    ///
    /// `this` is the core of the table that is dropped, and the caller does not use it after this call.
    pub(super) unsafe fn end_table(this: NonNull<Self>) {
        let guard = rcu::pin(); // invariant 3 of the core
        // SAFETY: the table keeps the core until `guard` is pinned, which keeps it from then on.
        let mut state = unsafe { this.as_ref() }.lock();
        state.dropped = true;
        let ending = Ending::begin(this, &mut state);
        drop(state);
        drop(guard); // drops of values may wait for readers; `ending` keeps the core
        if let Some(ending) = ending {
            ending.run();
        }
    }
}

/// The end of a dropped table, on the thread that has set `State::reclaiming`, which keeps the core.
struct Ending<T: Send + Sync + 'static> {
    this: NonNull<Core<T>>,
    vacated: VacatedSlots<T>,
    /// No context without a reference is left.
    done: bool,
}

impl<T: Send + Sync + 'static> Ending<T> {
    /// Begins the end, if the table is dropped and no other thread reclaims or has ended it.
    fn begin(this: NonNull<Core<T>>, state: &mut State<T>) -> Option<Self> {
        let begins = state.must_end();
        if begins {
            state.reclaiming = true;
            state.dead = state.in_use();
            // The end finds the dead slots by their states. A list that keeps a slot would reclaim it once more.
            // SAFETY: the mark keeps the core until the drop of the result.
            unsafe { this.as_ref() }.all_lists().for_each(RetireLists::clear);
            state.waiting = None;
        }
        begins.then(|| Self { this, vacated: VacatedSlots::new(), done: false })
    }

    fn run(mut self) {
        // SAFETY: the mark keeps the core until the drop of this.
        let core = unsafe { self.this.as_ref() };
        core.dropping(|| core.reclaim_all(&mut self.vacated));
        self.done = true;
    }
}

impl<T: Send + Sync + 'static> Drop for Ending<T> {
    fn drop(&mut self) {
        // SAFETY: the mark keeps the core until `guard` is pinned, which keeps it from then on. It is not
        // used after `settle`.
        let core = unsafe { self.this.as_ref() };
        let guard = rcu::pin();
        let mut state = core.lock();
        self.vacated.end(core, &mut state);
        state.reclaiming = false;
        state.ended = self.done;
        // SAFETY: the guard was pinned before the mark was cleared.
        unsafe { Core::settle(self.this, guard, state) };
        // `vacated` has no slab, because a dropped table keeps its slabs.
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Iterates over the slabs of a dropped table, which all stay.
    fn slabs_of_dropped(&self) -> impl Iterator<Item = SlabPtr<T>> {
        self.slabs.tree().iter_from(0).filter_map(|(_, word)| slab_of(word))
    }

    /// Makes every live slot dead, and reclaims the dead slots that have no reference. May be called again
    /// if it has panicked.
    fn reclaim_all(&self, vacated: &mut VacatedSlots<T>) {
        for slab in self.slabs_of_dropped() {
            // SAFETY: invariant 4 of `slab`: the table is dropped, so all its slabs stay.
            for slot in unsafe { slab.as_ref() }.slots() {
                // Ordering: Acquire pairs with the Release in `Claim::publish`; it carries the value.
                let state = slot.state.load(Ordering::Acquire);
                if NotLive::read(state).is_none() {
                    // Ordering: Release pairs with the Acquire in `CtxRef::is_removed`; it carries what this
                    // thread did before. After the barrier below, no section finds the slot live.
                    let order = order!(Release, "end: the state carries what came before the drop");
                    slot.state.store(NotLive::dead(Id::from_live(state), NO_LINK).bits(), order);
                }
            }
        }
        for slab in self.slabs_of_dropped() {
            // SAFETY: invariant 4 of `slab`: the table is dropped, so all its slabs stay.
            self.take_tasks(unsafe { slab.as_ref() }, None).into_iter().for_each(Wakers::wake);
        }
        self.restart_sections();
        for slab in self.slabs_of_dropped() {
            // SAFETY: invariant 4 of `slab`: the table is dropped, so all its slabs stay.
            let it = unsafe { slab.as_ref() };
            for (number, slot) in it.slots().iter().enumerate() {
                // Ordering: Acquire pairs with the Release in `Claim::publish`; it carries the value.
                let state = NotLive::read(slot.state.load(Ordering::Acquire));
                if let Some(state) = state.filter(|it| it.is_dead() && !it.is_referenced()) {
                    self.fold(slab, it.index(number), state, vacated);
                }
            }
        }
    }
}

/// The function of the callback. RCU calls it a grace period after the callback was queued, and drops its
/// panic.
///
/// # Safety
///
/// `head` is the callback of a core and was queued.
pub(super) unsafe fn run_callback<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    // SAFETY: the head lies at that offset of a core.
    let this = unsafe { head.byte_sub(offset_of!(Core<T>, callback)) }.cast::<Core<T>>();
    let _end = CallbackEnd(this);
    // SAFETY: only the callback frees the core, in the drop of `_end`.
    let core = unsafe { this.as_ref() };
    core.advance();
    let ending = Ending::begin(this, &mut core.lock());
    if let Some(ending) = ending {
        ending.run();
    }
}

/// The end of a callback, also of one that panics: frees the core, or queues the callback again if there
/// is something left to do.
struct CallbackEnd<T: Send + Sync + 'static>(NonNull<Core<T>>);

impl<T: Send + Sync + 'static> Drop for CallbackEnd<T> {
    fn drop(&mut self) {
        // SAFETY: only the callback frees the core.
        let core = unsafe { self.0.as_ref() };
        let guard = rcu::pin(); // invariant 3 of the core
        let mut state = core.lock();
        if state.callback_frees {
            drop(state);
            drop(guard); // the core may have many slabs: their frees need not delay a grace period
            let core = Core::allocation(self.0);
            // SAFETY: a box of `Builder::build`. The table and every context are gone. Since the last of
            // them went, a grace period has ended, for which every thread that used the core was pinned.
            return quarantine::free(unsafe { Box::from_raw(core.as_ptr()) });
        }
        // If the table is over, one more callback frees the core: the grace period of this one may have
        // begun before the end.
        state.callback_frees = state.is_over();
        let mut queue = state.callback_frees
            || state.must_end()
            || core.close_lists(&mut state)
            || state.waiting.is_some();
        if !queue {
            // Ordering: Relaxed; under the lock.
            core.callback_queued.store(false, Ordering::Relaxed);
        }
        drop(state);
        if !queue {
            // A thread that added a slot just before may have seen the flag set (invariant 5).
            // Pairs with the `light` in `Core::kill`.
            step!("callback: the flag is clear before the look at the lists", heavy());
            if core.filled() != 0 {
                step!(
                    "callback: queue it for slots that were added meanwhile",
                    queue = core.claim_callback()
                );
            }
        }
        drop(guard); // invariant 6
        if queue {
            // SAFETY: the core stays until this thread has queued the callback, which is marked as queued.
            unsafe { Core::queue(self.0) };
        }
    }
}
