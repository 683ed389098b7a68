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
//! [`poll`](super::CtxTable::poll) and [`flush`](super::CtxTable::flush). The *reclaim callback*
//! does too. It is an object of RCU in the core. The callback is queued while a list has a slot, so
//! the bounds that RCU keeps for its own objects ([`crate::rcu::Bounds`]) hold for the table's
//! slots too.
//!
//! # Invariants
//!
//! 1. A dead slot is in one list from its removal until its fold. The thread that adds it is pinned
//!    until the link is stored. Reclaim reads links only after a grace period, so it never sees a slot
//!    without its link.
//! 2. The waiting lists belong to the thread that set `State::reclaiming`, or, while it is not set, to
//!    the lock.
//! 3. A slot's value is dropped or moved out once: by the fold that finds no reference, or by the last put.
//! 4. No value is dropped under the lock.
//! 5. While anything is in the waiting lists, the callback is queued. While anything is in the filling
//!    lists, the callback is queued, or a thread that added a slot is about to queue it.

use percpu::fence::light;
use percpu::rcu;
use percpu::sync::atomic::Ordering;
use percpu::sync::{order, step};

use super::core::{Core, State};
use super::id::Id;
use super::retire_list::{LANES, RetireLists};
use super::slab::{NO_LINK, NotLive, SLOTS, Slab, Slot};

/// The minimum list length at which a removal advances reclaim. The length grows with the table, to
/// a sixteenth of the live contexts per CPU, up to `LARGEST`. Both are guesses: to advance costs
/// some microseconds of fences.
pub(super) const SMALLEST: u32 =
    if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 1024 / LANES as u32 };
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
