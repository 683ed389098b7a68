//! The reclaim callback, which RCU runs for a table, and the end of a table.
//!
//! The callback is an RCU object in the core. It is queued while anything is in the lists of
//! [`retire`](super::retire), so that a table is reclaimed wherever RCU is. The last callback frees the
//! core.

use std::ptr::NonNull;

use percpu::fence::heavy;
use percpu::rcu::{self, Guard, RetireHead};
use percpu::sync::atomic::Ordering;
use percpu::sync::quarantine::{self, Watched};
use percpu::sync::{order, step};

use super::core::Core;
use super::id::Id;
use super::reclaim::Vacated;
use super::retire_list::RetireLists;
use super::slab::{NO_LINK, NotLive, SLOTS, SlabPtr};
use super::slab_tree::LAST_KEY;
use super::user_code::{FirstPanic, dropping};

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
        // While the callback is not queued nothing waits (invariant 5 of `retire`). So the lists are
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
        // SAFETY: the guard was pinned before `dropped` was set.
        unsafe { Self::end(this, guard) };
    }

    /// Ends a dropped table, unless another thread does. Queues the callback that frees the core once
    /// the table is over.
    ///
    /// `this` is a pointer because another thread may free the core when the guard has ended, before
    /// this returns. A `&self` would promise that the core outlives the call.
    ///
    /// # Safety
    ///
    /// `this` is a live core, and the guard was pinned before the caller gave up its borrow, its slot or
    /// its right to reclaim: invariant 3 of the core.
    pub(super) unsafe fn end(this: NonNull<Self>, mut guard: Guard) {
        // SAFETY: the guard keeps the core (invariant 3 of the core). Below, it ends only while
        // `reclaiming` is set, which keeps the core, and at the end.
        let it = unsafe { this.as_ref() };
        let mut panic = FirstPanic::default();
        let mut state = it.lock();
        if state.dropped && !state.reclaiming && !state.ended {
            state.ended = true;
            state.dead = state.in_use();
            state.reclaiming = true;
            drop(state);
            drop(guard); // drops of values may wait for readers; `reclaiming` keeps the core
            dropping(it.address(), || it.reclaim_all(&mut panic));
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
        panic.resume();
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
        // A thread that added a slot just before may have seen the flag set: invariant 5 of `retire`.
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
