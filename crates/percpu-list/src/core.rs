//! The core of a list: a shard for each slot, which holds anchors.
//!
//! ```text
//!  list -> locks:  | slot 0 | slot 1 | ...
//!       -> shards: |   *    |  null  | ...           8 bytes each, read-mostly
//!                      v
//!                    shard: array of anchors, counters
//! ```
//!
//! | | takes | excludes |
//! |---|---|---|
//! | add | the slot's lock | adds, removals and walks in that slot |
//! | remove | the home slot's lock | the same |
//! | walk | the slot's lock, once for each chunk | the same, during a chunk |
//! | snapshot | all locks, ascending | every add, removal and walk |
//!
//! # Invariants
//!
//! 1. A shard pointer changes once, from null to a shard, and the shard lives as long as the list.
//! 2. The home of an anchor in the array of a shard is the slot of that shard.
//! 3. After `closed` was set and the lock of a slot was then acquired, no add succeeds in that
//!    slot.

use std::ops::Deref;
use std::ptr::{self, NonNull};

use offlock_percpu::lglock::{GlobalGuard, LocalGuard, LockError};
use offlock_percpu::{AllocError, CpuId};
use offlock_sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use offlock_sync::{check, order, step};

use crate::anchor::{Anchor, UNLINKED};
use crate::array::{Array, Growth, Segment};
use crate::error::Refused;
use crate::shard::Shard;
use crate::slots::Slots;
use crate::stats::Stats;

/// A list of anchors: the pointers to its shards, and the locks that protect them.
#[derive(Debug)]
pub(crate) struct Core {
    slots: Slots,
    shards: Box<[AtomicPtr<Shard>]>,
    closed: AtomicBool,
    counts_hits: bool,
}

impl Core {
    pub(crate) fn new(counts_hits: bool) -> Self {
        let slots = Slots::new();
        if counts_hits {
            // The first question about a node reads files and allocates, and a removal asks under
            // the slot's lock.
            slots.same_node(CpuId::new(0), CpuId::new(0));
        }
        Self {
            shards: (0..slots.count()).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            slots,
            closed: AtomicBool::new(false),
            counts_hits,
        }
    }

    #[inline(always)]
    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) fn slot_count(&self) -> u32 {
        self.shards.len() as u32
    }

    /// Iterates over the slots in ascending order.
    pub(crate) fn all_slots(&self) -> impl Iterator<Item = CpuId> + use<> {
        (0..self.slot_count()).map(CpuId::new)
    }

    /// Returns the shard of a slot. There is none before the first add in that slot.
    #[inline(always)]
    pub(crate) fn shard(&self, slot: CpuId) -> Option<ShardRef<'_>> {
        // Ordering: Acquire pairs with the Release in `make_shard`; it carries the new shard.
        let shard = self.shards.get(slot.index())?.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or by invariant 1 that of a shard that lives as long as
        // `self`.
        unsafe { shard.as_ref() }.map(|shard| ShardRef { core: self, shard })
    }

    #[cold]
    #[inline(never)]
    fn make_shard(&self, slot: CpuId) -> Result<ShardRef<'_>, Refused> {
        let pointer = self.shards.get(slot.index()).ok_or(LockError::NoSuchCpu(slot))?;
        let made = offlock_sync::alloc::try_box(Shard::new(slot, self.counts_hits))
            .map_err(|_| AllocError::new())?;
        made.array_mut_ptr(); // counts as a write, so a model checks that the shard is published
        let made = Box::into_raw(made);
        // Ordering: Release on success pairs with the Acquire in `shard` and on failure here; it
        // carries `*made`. Acquire on failure pairs with that Release of another thread; it carries
        // the shard that is used below.
        let shard = match pointer.compare_exchange(
            ptr::null_mut(),
            made,
            order!(Release, "first entry: publish the shard"),
            order!(Acquire, "first entry: use the other thread's shard"),
        ) {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: the pointer is from `into_raw` above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
        // SAFETY: by invariant 1 the shard lives as long as `self`.
        Ok(ShardRef { core: self, shard: unsafe { &*shard } })
    }

    /// Returns the shard of a slot, and makes it if there is none.
    #[inline(always)]
    pub(crate) fn shard_or_new(&self, slot: CpuId) -> Result<ShardRef<'_>, Refused> {
        match self.shard(slot) {
            Some(shard) => Ok(shard),
            None => self.make_shard(slot),
        }
    }

    /// Iterates over the shards that exist, by ascending slot.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardRef<'_>> {
        self.all_slots().filter_map(|slot| self.shard(slot))
    }

    /// Locks all slots.
    pub(crate) fn lock_all(&self) -> Result<GlobalGuard<'_, ()>, LockError> {
        self.slots.lock_all()
    }

    /// Returns whether adds are refused. The result is final under a slot's lock (invariant 3).
    #[inline(always)]
    pub(crate) fn is_closed(&self) -> bool {
        // Ordering: Relaxed; `close` acquires every slot's lock after its store, which orders that
        // store before a later holder of the lock.
        self.closed.load(Ordering::Relaxed)
    }

    /// Refuses adds from now on. Adds that have begun are complete when it returns.
    pub(crate) fn close(&self) -> Result<(), LockError> {
        // Ordering: Relaxed; the locks below carry it to the loads in `is_closed`.
        self.closed.store(true, Ordering::Relaxed);
        let mut waited = Ok(());
        for slot in self.all_slots() {
            // After an error the loop goes on, because adds in the later slots must end too.
            step!(
                "close: wait for the adds that have begun",
                waited = waited.and(self.slots.lock(slot).map(drop))
            );
        }
        waited
    }

    /// Returns the number of entries, summed slot by slot. It may be out of date, but is never 0
    /// while one entry stays on the list.
    pub(crate) fn len(&self) -> usize {
        self.shards().map(|shard| shard.entries() as usize).sum()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.shards().for_each(|shard| sum += shard.stats());
        sum
    }

    /// Checks the invariants of all slots, under their locks.
    ///
    /// # Panics
    ///
    /// Panics if an invariant does not hold.
    pub(crate) fn validate(&self) {
        for shard in self.shards() {
            let Ok(locked) = shard.lock() else { continue };
            let array = locked.array();
            array.validate();
            assert_eq!(shard.entries(), u64::from(array.entries()), "adds - removals");
            array.for_each(|anchor| {
                // SAFETY: an anchor in the array is linked, so it is alive.
                let anchor = unsafe { anchor.as_ref() };
                assert_eq!(anchor.home(), shard.slot(), "an entry's home");
                // SAFETY: `locked` holds the lock of the home slot, which was just compared.
                let held_by = unsafe { anchor.shard() };
                assert_eq!(held_by, shard.as_anchor_ptr(), "an entry's shard");
            });
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        for shard in &self.shards {
            // Ordering: Relaxed; `&mut self` orders every store before this load.
            let shard = shard.load(Ordering::Relaxed);
            if !shard.is_null() {
                // SAFETY: the pointer is from `Box::into_raw` in `make_shard`. The drop of the list
                // type has unlinked every anchor that pointed to the shard, and `&mut self`
                // excludes other references.
                drop(unsafe { Box::from_raw(shard) });
            }
        }
    }
}

/// A reference to a shard, with the core that it belongs to. Only that core makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardRef<'a> {
    core: &'a Core,
    shard: &'a Shard,
}

impl Deref for ShardRef<'_> {
    type Target = Shard;

    #[inline(always)]
    fn deref(&self) -> &Shard {
        self.shard
    }
}

impl<'a> ShardRef<'a> {
    #[inline(always)]
    pub(crate) fn core(self) -> &'a Core {
        self.core
    }

    #[inline(always)]
    pub(crate) fn get(self) -> &'a Shard {
        self.shard
    }

    /// Locks the slot. Blocks while another thread holds it.
    #[inline(always)]
    pub(crate) fn lock(self) -> Result<LockedShard<'a>, LockError> {
        let (guard, contended) = self.core.slots.lock(self.shard.slot())?;
        if contended {
            self.shard.count_contended();
        }
        // SAFETY: `guard` holds the lock of the shard's slot in its list, and is used
        // for this shard only.
        Ok(unsafe { LockedShard::new(self.shard, guard) })
    }

    /// Makes room for one more entry, if there is none. Allocates and frees with no lock held.
    #[cold]
    #[inline(never)]
    pub(crate) fn make_room(self) -> Result<(), Refused> {
        let size = {
            let locked = self.lock()?;
            if locked.array().has_room() {
                return Ok(());
            }
            locked.array().growth_size()?
        };
        let mut growth = Growth::allocate(size)?;
        let mut locked = self.lock()?;
        if !locked.array().has_room() {
            locked.array_mut().install(&mut growth);
        }
        drop(locked);
        drop(growth); // after the unlock
        Ok(())
    }

    /// Frees the surplus segments of the array, each after the slot was unlocked.
    pub(crate) fn shrink(self) {
        while let Ok(mut locked) = self.lock() {
            let surplus = locked.array_mut().pop_surplus();
            drop(locked);
            if surplus.is_none() {
                break;
            }
        }
    }
}

/// A shard whose slot is locked by the guard `G`; unlocks on drop.
pub(crate) struct LockedShard<'a, G = LocalGuard<'a, ()>> {
    shard: &'a Shard,
    _guard: G,
}

impl<'a, G> LockedShard<'a, G> {
    /// # Safety
    ///
    /// `guard` holds the lock of the shard's slot, or other proof that no other thread uses the
    /// shard. While the result lives, no other `LockedShard` of the same shard is used.
    #[inline(always)]
    pub(crate) unsafe fn new(shard: &'a Shard, guard: G) -> Self {
        Self { shard, _guard: guard }
    }

    #[inline(always)]
    pub(crate) fn shard(&self) -> &'a Shard {
        self.shard
    }

    #[inline(always)]
    pub(crate) fn array(&self) -> &Array {
        // SAFETY: by the contract of `new` no other thread uses the array; `&self` excludes
        // `array_mut`.
        unsafe { &*self.shard.array_ptr() }
    }

    #[inline(always)]
    pub(crate) fn array_mut(&mut self) -> &mut Array {
        // SAFETY: by the contract of `new` no other thread uses the array; `&mut self` excludes
        // other references.
        unsafe { &mut *self.shard.array_mut_ptr() }
    }

    /// Adds an anchor.
    ///
    /// # Safety
    ///
    /// The array has room. The anchor is unlinked, its home is this slot, and it stays alive and in
    /// place until it is removed.
    #[inline(always)]
    pub(crate) unsafe fn add(&mut self, anchor: NonNull<Anchor>) {
        // SAFETY: by the contract of this function the anchor is alive.
        let anchor_ref = unsafe { anchor.as_ref() };
        // The store is not skipped if the pointer is equal: the shard that the anchor was on before
        // may be freed, and this shard may have its address without its provenance.
        // SAFETY: this thread holds the lock of the home slot, and the anchor is unlinked.
        unsafe { anchor_ref.set_shard(self.shard.as_anchor_ptr()) };
        // SAFETY: by the contract of this function there is room, and the anchor is in no array and
        // stays alive and in place until it is removed.
        unsafe { self.array_mut().insert(anchor) };
        self.shard.count_added();
    }

    /// Removes an anchor, and returns whether it was linked. `from` is the slot of the removing
    /// CPU.
    ///
    /// # Safety
    ///
    /// The home of the anchor is this slot. If it is linked, it is in this shard.
    #[inline(always)]
    pub(crate) unsafe fn remove(&mut self, anchor: &Anchor, from: CpuId, slots: &Slots) -> bool {
        let index = anchor.index();
        if index == UNLINKED {
            return false;
        }
        let may_move = check!("remove: no walk is under way", self.shard.may_move());
        // SAFETY: the anchor is linked, so by the contract of this function it is in this shard, at
        // its index (invariant 2 of the anchor).
        unsafe { self.array_mut().remove(index, may_move) };
        anchor.set_index(UNLINKED);
        self.shard.count_removed();
        if from != self.shard.slot() && self.shard.counts_hits() {
            self.shard.count_miss(!slots.same_node(from, self.shard.slot()));
        }
        true
    }

    /// Takes a surplus segment from the array, if it may have one. The caller drops it after the
    /// unlock.
    #[inline(always)]
    pub(crate) fn surplus(&mut self) -> Option<Segment> {
        if self.array().may_shrink() { self.array_mut().pop_surplus() } else { None }
    }
}
