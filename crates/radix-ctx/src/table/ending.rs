//! The tick, which RCU runs for a table, and the end of a table.
//!
//! The *tick* is an object of RCU's that lies in the core. It is retired while anything is in the
//! lists of [`limbo`](super::retire), so that a table is reclaimed wherever RCU is; and at the end it is
//! what frees the core.

use std::ptr::NonNull;

use percpu::fence::heavy;
use percpu::rcu::{self, Guard, RetireHead};
use percpu::sync::atomic::Ordering;
use percpu::sync::quarantine::{self, Watched};
use percpu::sync::step;

use super::core::Core;
use super::dropping::dropping;
use super::id::Id;
use super::reclaim::Vacated;
use super::retire_list::RetireLists;
use super::slab::{NO_LINK, NotLive, SLOTS, SlabPtr};
use super::slab_tree::LAST_KEY;

impl<T: Send + Sync + 'static> Core<T> {
    /// Sends the tick if something is in the lists, and none is on its way.
    pub(super) fn queue_callback_for_lists(&self) {
        let mut state = self.lock();
        // Ordering: Relaxed, both; under the lock.
        if self.callback_queued.load(Ordering::Relaxed) {
            return;
        }
        let mut send = self.close_lists(&mut state);
        if !send && self.filled() != 0 {
            // Another thread reclaims, so that nothing may wait yet.
            send = !self.callback_queued.swap(true, Ordering::Relaxed);
        }
        drop(state);
        if send {
            self.queue_callback();
        }
    }

    /// Sends the tick; the caller has set `callback_queued`.
    pub(super) fn queue_callback(&self) {
        queue_callback(self.this());
    }

    /// The table goes: kills what is live and reclaims all that has no reference, with no grace
    /// period, as nobody has a borrow of the table; then the rest of the core's life is that of the
    /// references. Another thread that reclaims just now does it in our place.
    ///
    /// # Safety
    ///
    /// `this` is the core of the table that is dropped, and the caller does not use it any more.
    pub(super) unsafe fn end_table(this: NonNull<Self>) {
        let guard = rcu::pin(); // invariant 3 of the core
        // SAFETY: the table keeps the core until the guard is there, and the guard does after that.
        unsafe { this.as_ref() }.lock().dropped = true;
        // SAFETY: the guard is from before `dropped` was set.
        unsafe { Self::end(this, guard) };
    }

    /// Moves on the end of a dropped table, if nobody else is at it.
    ///
    /// Another thread may free the core as soon as the guard is gone, before this returns. A `&self`
    /// would promise that the core outlives the call, so it is a pointer.
    ///
    /// # Safety
    ///
    /// `this` is a live core, and the guard is from before the caller gave up what it had of the core:
    /// invariant 3 of the core.
    pub(super) unsafe fn end(this: NonNull<Self>, mut guard: Guard) {
        // SAFETY: invariant 3 of the core, by the guard. It is let go of below only while
        // `reclaiming` is set, which keeps the core, and at the end.
        let it = unsafe { this.as_ref() };
        let mut state = it.lock();
        if state.dropped && !state.reclaiming && !state.ended {
            state.ended = true;
            state.dead = state.in_use();
            state.reclaiming = true;
            drop(state);
            drop(guard); // drops of values may wait for readers; the reclaimer keeps the core
            dropping(it.address(), || it.reclaim_all());
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
        if over {
            it.queue_callback();
        }
        drop(guard);
    }

    /// Kills everything, and reclaims what has no reference.
    fn reclaim_all(&self) {
        let for_each = |f: &mut dyn FnMut(SlabPtr<T>, u32, u64)| {
            let mut from = 0;
            while let Some((key, slab)) = self.slabs.next_slab(from, LAST_KEY) {
                // SAFETY: invariant 4 of `slab`: the table is dropped, the core is ours.
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
            if NotLive::read(state).is_none() {
                let id = Id::from_bits(state).expect("a live state is an id");
                // SAFETY: as above.
                let slot = unsafe { slab.as_ref() }.slot(index);
                // Ordering: Release, with the barrier below: no section finds it open after that.
                slot.state.store(NotLive::dead(id, NO_LINK).bits(), Ordering::Release);
            }
        });
        self.waiters.notify_all();
        self.restart_sections();
        let mut vacated = Vacated::new(self);
        for_each(&mut |slab, index, state| {
            if let Some(gone) = NotLive::read(state) {
                if gone.is_dead() && !gone.is_referenced() {
                    self.fold(slab, index, gone, &mut vacated);
                }
            }
        });
        self.all_lists().for_each(RetireLists::clear);
        vacated.give_back();
    }
}

/// Retires the tick of a core; the caller has set `callback_queued`.
fn queue_callback<T: Send + Sync + 'static>(core: NonNull<Core<T>>) {
    let offset = std::mem::offset_of!(Core<T>, callback);
    // SAFETY: within the core.
    let tick = unsafe { core.byte_add(offset) }.cast();
    // SAFETY: one at a time, that of who set `callback_queued`. Its `free` is `run_callback`, which frees the
    // core only where nobody else has it.
    unsafe { rcu::retire_raw(tick, size_of::<Core<T>>()) };
}

/// What a retired tick runs, a grace period later.
///
/// # Safety
///
/// `head` is the tick of a core that was retired.
pub(super) unsafe fn run_callback<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    let offset = std::mem::offset_of!(Core<T>, callback);
    // SAFETY: the head lies at that offset of a core.
    let core = unsafe { head.byte_sub(offset) }.cast::<Core<T>>();
    // SAFETY: it is freed by its tick only, so not while `callback_queued` is set.
    let it = unsafe { core.as_ref() };
    it.advance();
    let guard = rcu::pin(); // invariant 3 of the core
    let mut state = it.lock();
    if state.callback_frees {
        drop(state);
        drop(guard);
        // SAFETY: it is in the `Watched` that `Builder::build` made.
        let core = unsafe { core.byte_sub(Watched::<Core<T>>::OFFSET) }.cast::<Watched<Core<T>>>();
        // SAFETY: a box of `Builder::build`. The table and every context are gone, and since the last
        // of them a grace period is over, for which everybody was pinned who had to do with it.
        quarantine::free(unsafe { Box::from_raw(core.as_ptr()) });
        return;
    }
    // This one may have been on its way for long: its grace period is not that of the end.
    state.callback_frees = state.is_over();
    let again = state.callback_frees || it.close_lists(&mut state) || state.waiting.is_some();
    if !again {
        // Ordering: Relaxed; under the lock.
        it.callback_queued.store(false, Ordering::Relaxed);
    }
    drop(state);
    if again {
        queue_callback(core);
    } else {
        // Who pushed just before has seen a tick that is over: invariant 5 of `limbo`.
        heavy(); // pairs with the `light` in `retire`
        if it.filled() != 0 {
            step!("tick: another one for what was pushed meanwhile", it.queue_callback_for_lists());
        }
    }
    drop(guard);
}
