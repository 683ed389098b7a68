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
//! time wherever RCU is ([`crate::rcu::Bounds`], [`crate::rcu::Reclaimer`]).
//!
//! # Invariants
//!
//! 1. A dead slot is in one list from its removal until its fold. Who pushes it is pinned until the
//!    link is stored; so links are read after a grace period only.
//! 2. The `waiting` lists belong to the thread that set `State::reclaiming`, or, while it is not set,
//!    to the lock.
//! 3. A slot's value is dropped once: by who folded it to none, or by the last reference put.
//! 4. No value is dropped under the lock.
//! 5. While anything is waiting the tick is on its way; while anything is in a list that fills, it is
//!    or whoever pushed is about to look.

use percpu::fence::light;
use percpu::rcu;
use percpu::sync::atomic::{AtomicU64, Ordering};

use super::core::{Core, State};
use super::id::Id;
use super::reclaim::TOGETHER;
use super::slab::{Gone, NO_LINK, SLAB_BITS, SLOTS, Slab, SlabPtr, Slot};

/// No list: no slots, no first one.
pub(super) const EMPTY: u64 = NO_LINK as u64;

/// Lists of one CPU, so that reclaim follows as many links at a time: each is a miss.
const LANES: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 8 };

/// One CPU's dead slots.
///
/// A list is how many there are, and the index of the first.
#[derive(Debug)]
pub(super) struct Limbo {
    filling: [AtomicU64; LANES],
    /// Invariant 2.
    pub(super) waiting: [AtomicU64; LANES],
}

impl Limbo {
    /// Dead slots in one list that are worth a look; what that makes for a CPU is a sixteenth of the
    /// live ones if that is more, up to the second number. Guesses: some microseconds of fences for
    /// each.
    pub(super) const BATCH: u32 =
        if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 1024 / LANES as u32 };
    const LARGEST: u64 = (1 << 16) / LANES as u64;

    pub(super) fn new() -> Self {
        let lists = || std::array::from_fn(|_| AtomicU64::new(EMPTY));
        Self { filling: lists(), waiting: lists() }
    }

    /// How many slots are in the lists that it fills.
    fn filled(&self) -> u64 {
        // Ordering: Relaxed; a hint, or ordered by the caller's fence.
        self.filling.iter().map(|list| list.load(Ordering::Relaxed) >> 32).sum()
    }

    /// Adds a dead slot, and tells how many there are now in its list. Lock-free.
    ///
    /// # Safety
    ///
    /// As for `splice`.
    #[inline]
    unsafe fn push<T>(&self, slot: &Slot<T>, id: Id) -> u32 {
        // SAFETY: as the caller says.
        unsafe { self.splice(1, id.index(), slot, id) }
    }

    /// Adds `number` dead slots of one lane: the first, and those that it is linked to, the last of
    /// which is `last`. Tells how many there are now in the list.
    ///
    /// # Safety
    ///
    /// The caller has killed them, and since then holds an RCU guard: invariant 1.
    #[inline]
    unsafe fn splice<T>(&self, number: u32, first: u32, last: &Slot<T>, last_id: Id) -> u32 {
        let lane = &self.filling[first as usize % self.filling.len()];
        // Ordering: Relaxed; the exchange checks it.
        let mut list = lane.load(Ordering::Relaxed);
        loop {
            let longer = ((list >> 32) + u64::from(number)) << 32 | u64::from(first);
            // Ordering: Release pairs with the Acquire in `close`; it carries the dead states. Relaxed
            // on failure: the next attempt checks again.
            let pushed =
                lane.compare_exchange_weak(list, longer, Ordering::Release, Ordering::Relaxed);
            match pushed {
                Ok(_) => break,
                Err(now) => list = now,
            }
        }
        // Ordering: Relaxed; invariant 1: a grace period orders it.
        last.state.store(Gone::dead(last_id, list as u32).bits(), Ordering::Relaxed);
        (list >> 32) as u32 + number
    }

    /// Makes what it has filled with wait; how many slots that are.
    fn close(&self) -> u64 {
        let mut slots = 0;
        for (filling, waiting) in self.filling.iter().zip(&self.waiting) {
            // Ordering: Acquire pairs with the Release in `push`; it carries the dead states to the
            // grace period, which begins after it.
            let list = filling.swap(EMPTY, Ordering::AcqRel);
            slots += list >> 32;
            // Ordering: Relaxed; invariant 2.
            waiting.store(list, Ordering::Relaxed);
        }
        slots
    }

    /// Forgets what is in its lists.
    pub(super) fn clear(&self) {
        for list in self.filling.iter().chain(&self.waiting) {
            // Ordering: Relaxed; nobody else has the lists.
            list.store(EMPTY, Ordering::Relaxed);
        }
    }
}

/// The `waiting` lists of a CPU, being followed.
pub(super) struct Walk<T: Send + Sync + 'static> {
    /// The next of each list, and its slab.
    next: [(u32, Option<SlabPtr<T>>); LANES],
}

/// A dead slot, found.
pub(super) type Dead<T> = (SlabPtr<T>, u32, Gone);

impl<T: Send + Sync + 'static> Walk<T> {
    /// The lists are the caller's, and their grace period is over.
    pub(super) fn new(core: &Core<T>, limbo: &Limbo) -> Self {
        let _guard = rcu::pin();
        let next = |list: &AtomicU64| {
            // Ordering: Relaxed; invariant 2.
            let first = list.load(Ordering::Relaxed) as u32;
            // SAFETY: the guard.
            unsafe { Self::at(core, first) }
        };
        Self { next: std::array::from_fn(|lane| next(&limbo.waiting[lane])) }
    }

    /// The slab of a slot in a list, which stays after the guard: its slot is used.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    unsafe fn at(core: &Core<T>, index: u32) -> (u32, Option<SlabPtr<T>>) {
        if index == NO_LINK {
            return (index, None);
        }
        // SAFETY: the caller's guard.
        let slab = unsafe { core.slab(index) };
        if let Some(slab) = slab {
            slab.prefetch(index);
        }
        (index, slab.map(SlabPtr::from))
    }

    /// Finds some more; how many of `found` that are.
    pub(super) fn fill(
        &mut self,
        core: &Core<T>,
        found: &mut [Option<Dead<T>>; TOGETHER],
    ) -> usize {
        let _guard = rcu::pin();
        let mut number = 0;
        loop {
            let before = number;
            for next in &mut self.next {
                let (index, Some(slab)) = *next else { continue };
                if number == TOGETHER {
                    return number;
                }
                // SAFETY: invariant 4 of `slab`: what is in a list is dead, so used.
                let slot = unsafe { slab.as_ref() }.slot(index);
                // Ordering: Relaxed; the grace period orders the link.
                let state = slot.state.load(Ordering::Relaxed);
                let Some(gone) = Gone::read(state) else {
                    debug_assert!(false, "{index} is in a list, and live");
                    *next = (NO_LINK, None);
                    continue;
                };
                let link = gone.link();
                let is_near = link != NO_LINK && link >> SLAB_BITS == index >> SLAB_BITS;
                *next = if is_near {
                    (link, Some(slab))
                } else {
                    // SAFETY: the guard.
                    unsafe { Self::at(core, link) }
                };
                found[number] = Some((slab, index, gone));
                number += 1;
            }
            if number == before {
                return number;
            }
        }
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Puts a slot that was made dead on a list. True if the lists deserve a look now.
    ///
    /// The caller notifies after that.
    ///
    /// # Safety
    ///
    /// The caller has just changed the state from `id` to dead, and since then holds an RCU guard.
    #[inline]
    pub(super) unsafe fn bury(&self, slab: &Slab<T>, slot: &Slot<T>, id: Id) -> bool {
        if self.quota.is_limited() {
            self.quota.give_back(slab.weight(id.index()));
        }
        let Some(limbo) = self.limbo.get() else { return false }; // there is: a slab was made
        // SAFETY: killed by the caller, and under his guard since then.
        let length = unsafe { limbo.local().push(slot, id) };
        // Pairs with the `heavy` in `run_tick`: it sees the slot in its list, or we see that there is
        // no tick.
        light();
        // Ordering: Relaxed, both; a hint, and ordered by the fence.
        let batch = self.batch.load(Ordering::Relaxed);
        length & (batch - 1) == 0 || !self.ticking.load(Ordering::Relaxed)
    }

    /// Makes every live slot of a slab dead and puts them on lists; how many there were. The caller
    /// notifies and has a [`look`](Self::look) after it.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    pub(super) unsafe fn bury_all(&self, slab: &Slab<T>) -> usize {
        let Some(limbo) = self.limbo.get() else { return 0 }; // there is: a slab was made
        let limbo = limbo.local();
        let mut killed = 0;
        for lane in 0..LANES {
            let (mut first, mut last, mut number) = (NO_LINK, None, 0);
            for at in (lane..SLOTS).step_by(LANES) {
                let slot = slab.slot(at as u32);
                // Ordering: Relaxed; the exchange checks it.
                let state = slot.state.load(Ordering::Relaxed);
                if Gone::read(state).is_some() || !slot.kill(Id::from_live(state)) {
                    continue;
                }
                let id = Id::from_live(state);
                if self.quota.is_limited() {
                    self.quota.give_back(slab.weight(id.index()));
                }
                // Ordering: Relaxed; invariant 1: a grace period orders it.
                slot.state.store(Gone::dead(id, first).bits(), Ordering::Relaxed);
                first = id.index();
                last = last.or(Some((slot, id)));
                number += 1;
            }
            if let Some((slot, id)) = last {
                // SAFETY: killed above, and linked to each other; the caller's guard.
                unsafe { limbo.splice(number, first, slot, id) };
                killed += number as usize;
            }
        }
        killed
    }

    /// After [`bury`](Self::bury) said so, without a guard: moves reclaim on if a list is full, and has
    /// the tick sent.
    #[cold]
    #[inline(never)]
    pub(super) fn look(&self) {
        self.advance();
        self.send_tick();
    }

    /// Dead slots in the lists that are being filled. Wait-free; exact where that is ordered.
    pub(super) fn filled(&self) -> u64 {
        self.limbos().map(Limbo::filled).sum()
    }

    /// The lists of every CPU; none before there is a slab.
    pub(super) fn limbos(&self) -> impl Iterator<Item = &Limbo> {
        self.limbo.get().into_iter().flat_map(|limbo| limbo.iter()).map(|(_, limbo)| limbo)
    }

    /// Starts a grace period for what the CPUs' lists have filled with, unless another is not over.
    ///
    /// True if no tick was on its way: then the caller sends it, after the lock.
    #[must_use = "a tick that is said to be on its way has to be sent"]
    pub(super) fn close(&self, state: &mut State<T>) -> bool {
        if state.waiting.is_some() || state.reclaiming {
            return false;
        }
        let slots: u64 = self.limbos().map(Limbo::close).sum();
        if slots == 0 {
            return false;
        }
        state.dead += slots;
        state.waiting = Some(rcu::start_grace_period());
        let live = state.in_use() / 16 / LANES as u64;
        let batch = live.clamp(u64::from(Limbo::BATCH), Limbo::LARGEST).next_power_of_two();
        // Ordering: Relaxed, both; a hint, and under the lock.
        self.batch.store(batch as u32, Ordering::Relaxed);
        !self.ticking.swap(true, Ordering::Relaxed)
    }
}
