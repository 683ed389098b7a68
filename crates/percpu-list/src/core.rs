//! What the owning and the intrusive list have in common: anchors, in a shard for each slot.
//!
//! ```text
//!  list -> domain -> locks: | slot 0 | slot 1 | ...           shared by all lists of the domain
//!       -> shards:          |   *    |  null  | ...           8 bytes each, read-mostly
//!                               v
//!                             shard: array of anchors, counters
//! ```
//!
//! | | takes | excludes |
//! |---|---|---|
//! | add | the slot's lock | all that changes or walks that slot, of any list of the domain |
//! | remove | the home slot's lock, then looks whether it is still the home | the same |
//! | walk | the slot's lock for each chunk | the same, during a chunk |
//! | snapshot | all locks, ascending | everything |
//!
//! # Invariants
//!
//! 1. A shard pointer goes from null to a shard once, and the shard lives as long as the list.
//! 2. An anchor in a shard's array has the shard's slot for its home.
//! 3. Once `closed` was set and a slot's lock taken after that, nothing is added there any more.

use std::ops::Deref;
use std::ptr::{self, NonNull};

use percpu::lglock::{GlobalGuard, LocalGuard, LockError};
use percpu::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use percpu::sync::{check, order, step};
use percpu::{AllocError, CpuId};

use crate::anchor::{Anchor, UNLINKED};
use crate::array::{Array, Growth, Segment};
use crate::domain::Domain;
use crate::error::Refused;
use crate::shard::Shard;
use crate::stats::Stats;

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    domain: Domain,
    shards: Box<[AtomicPtr<Shard>]>,
    closed: AtomicBool,
    counts_hits: bool,
}

impl Core {
    pub(crate) fn new(domain: &Domain, counts_hits: bool) -> Result<Self, AllocError> {
        let mut shards = Vec::new();
        shards.try_reserve_exact(domain.slots()).map_err(|_| AllocError::new())?;
        shards.extend((0..domain.slots()).map(|_| AtomicPtr::new(ptr::null_mut())));
        Ok(Self {
            domain: domain.clone(),
            shards: shards.into_boxed_slice(),
            closed: AtomicBool::new(false),
            counts_hits,
        })
    }

    #[inline(always)]
    pub(crate) fn domain(&self) -> &Domain {
        &self.domain
    }

    pub(crate) fn slot_count(&self) -> u32 {
        self.shards.len() as u32
    }

    /// The slots, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = CpuId> + use<> {
        (0..self.slot_count()).map(CpuId::new)
    }

    /// The list's part of a slot, if it ever had an entry there.
    #[inline(always)]
    pub(crate) fn shard(&self, slot: CpuId) -> Option<ShardRef<'_>> {
        // Ordering: Acquire pairs with the Release in `make_shard`; it carries the empty shard.
        let shard = self.shards.get(slot.index())?.load(Ordering::Acquire);
        // SAFETY: null, or by invariant 1 a shard that lives as long as `self`.
        unsafe { shard.as_ref() }.map(|shard| ShardRef { core: self, shard })
    }

    #[cold]
    #[inline(never)]
    fn make_shard(&self, slot: CpuId) -> Result<ShardRef<'_>, Refused> {
        let pointer = self.shards.get(slot.index()).ok_or(LockError::NoSuchCpu(slot))?;
        let made = percpu::alloc::try_box(Shard::new(slot, self.counts_hits))
            .map_err(|_| AllocError::new())?;
        made.array_mut_ptr(); // a first write, so that a model sees whether it was published
        let made = Box::into_raw(made);
        // Ordering: Release on success pairs with the Acquire in `shard`; it carries `*made`.
        // Acquire on failure: another thread's shard is used below.
        let shard = match pointer.compare_exchange(
            ptr::null_mut(),
            made,
            order!(Release, "first entry: publish the shard"),
            order!(Acquire, "first entry: use the other thread's shard"),
        ) {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: from `into_raw` above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
        // SAFETY: by invariant 1 it lives as long as `self`.
        Ok(ShardRef { core: self, shard: unsafe { &*shard } })
    }

    /// The list's part of a slot, made if there is none.
    #[inline(always)]
    pub(crate) fn shard_or_new(&self, slot: CpuId) -> Result<ShardRef<'_>, Refused> {
        match self.shard(slot) {
            Some(shard) => Ok(shard),
            None => self.make_shard(slot),
        }
    }

    /// The parts of all slots that ever had an entry, ascending.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardRef<'_>> {
        self.slots().filter_map(|slot| self.shard(slot))
    }

    /// Locks everything.
    pub(crate) fn lock_all(&self) -> Result<GlobalGuard<'_, ()>, LockError> {
        self.domain.lock_all()
    }

    /// Whether additions are refused.
    #[inline(always)]
    pub(crate) fn is_closed(&self) -> bool {
        // Ordering: Relaxed; under a slot's lock, `close` orders it (invariant 3).
        self.closed.load(Ordering::Relaxed)
    }

    /// Refuses additions from now on; those under way are complete when it returns.
    pub(crate) fn close(&self) -> Result<(), LockError> {
        // Ordering: Relaxed; every slot's lock below carries it.
        self.closed.store(true, Ordering::Relaxed);
        let mut waited = Ok(());
        for slot in self.slots() {
            // An error of one slot is no reason to skip the next.
            step!(
                "close: wait for the additions under way",
                waited = waited.and(self.domain.lock(slot).map(drop))
            );
        }
        waited
    }

    /// How many entries there are, added up slot by slot: a moving target, but never 0 while one
    /// stays throughout.
    pub(crate) fn len(&self) -> usize {
        self.shards().map(|shard| shard.entries() as usize).sum()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.shards().for_each(|shard| sum += shard.stats());
        sum
    }

    /// Forgets the shard of a slot that could not be locked when its list was dropped: entries may
    /// still point to it.
    pub(crate) fn leak_shard(&mut self, slot: CpuId) {
        if let Some(shard) = self.shards.get_mut(slot.index()) {
            *shard = AtomicPtr::new(ptr::null_mut());
        }
    }

    /// Checks the invariants of all slots, under their locks.
    ///
    /// # Panics
    ///
    /// Panics with the one that does not hold.
    pub(crate) fn validate(&self) {
        for shard in self.shards() {
            let Ok(locked) = shard.lock() else { continue };
            let array = locked.array();
            array.validate();
            assert_eq!(shard.entries(), u64::from(array.entries()), "additions - removals");
            array.for_each(|anchor| {
                // SAFETY: in the array, so alive.
                let anchor = unsafe { anchor.as_ref() };
                assert_eq!(anchor.home(), shard.slot(), "an entry's home");
                assert!(anchor.shard() == shard.as_anchor_ptr(), "an entry's list");
            });
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        for shard in &self.shards {
            // Ordering: Relaxed; `&mut self` orders it.
            let shard = shard.load(Ordering::Relaxed);
            if !shard.is_null() {
                // SAFETY: made by `Box::into_raw` in `make_shard`; the list type has unlinked all
                // that pointed to it, and nobody else has a reference, by `&mut self`.
                drop(unsafe { Box::from_raw(shard) });
            }
        }
    }
}

/// A list's part of a slot: only a list makes one, of its own shards.
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

    /// Locks the slot.
    #[inline(always)]
    pub(crate) fn lock(self) -> Result<LockedShard<'a>, LockError> {
        let (guard, contended) = self.core.domain.lock(self.shard.slot())?;
        if contended {
            self.shard.count_contended();
        }
        // SAFETY: its slot's lock, of its list's domain.
        Ok(unsafe { LockedShard::new(self.shard, guard) })
    }

    /// Locks the slot if it is free.
    pub(crate) fn try_lock(self) -> Result<LockedShard<'a>, LockError> {
        let guard = self.core.domain.try_lock(self.shard.slot())?;
        // SAFETY: as in `lock`.
        Ok(unsafe { LockedShard::new(self.shard, guard) })
    }

    /// Makes room where there was none, with no lock held.
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

    /// Frees what the entries do not need any more, a segment at a time.
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

/// A slot of a list, locked by the guard `G`; unlocks on drop.
pub(crate) struct LockedShard<'a, G = LocalGuard<'a, ()>> {
    shard: &'a Shard,
    _guard: G,
}

impl<'a, G> LockedShard<'a, G> {
    /// # Safety
    ///
    /// The guard holds the lock of the shard's slot, and nobody uses it for the same shard.
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
        // SAFETY: we hold the slot's lock, and `&self` keeps `array_mut` away.
        unsafe { &*self.shard.array_ptr() }
    }

    #[inline(always)]
    pub(crate) fn array_mut(&mut self) -> &mut Array {
        // SAFETY: we hold the slot's lock, and `&mut self` keeps other references away.
        unsafe { &mut *self.shard.array_mut_ptr() }
    }

    /// Adds an anchor.
    ///
    /// # Safety
    ///
    /// There is room. The anchor is unlinked, its home is this slot, and it stays alive and in place
    /// until it is removed.
    #[inline(always)]
    pub(crate) unsafe fn add(&mut self, anchor: NonNull<Anchor>) {
        // SAFETY: alive, says the caller.
        // Stored each time: a shard that it had before may be gone, and this one be in its place.
        unsafe { anchor.as_ref() }.set_shard(self.shard.as_anchor_ptr());
        // SAFETY: the caller's.
        unsafe { self.array_mut().insert(anchor) };
        self.shard.count_added();
    }

    /// Removes an anchor, if it is linked. `from` is the slot of the CPU that does it.
    ///
    /// # Safety
    ///
    /// The anchor's home is this slot, and if it is linked it is in this shard.
    #[inline(always)]
    pub(crate) unsafe fn remove(&mut self, anchor: &Anchor, from: CpuId, domain: &Domain) -> bool {
        let index = anchor.index();
        if index == UNLINKED {
            return false;
        }
        let may_move = check!("remove: no walk is under way", self.shard.may_move());
        // SAFETY: it is linked, so in this shard, where its index says (anchor's invariant 2).
        unsafe { self.array_mut().remove(index, may_move) };
        anchor.set_index(UNLINKED);
        self.shard.count_removed();
        if from != self.shard.slot() && self.shard.counts_hits() {
            self.shard.count_miss(!domain.same_node(from, self.shard.slot()));
        }
        true
    }

    /// Memory that is not needed any more, now and then: to be dropped after the unlock.
    #[inline(always)]
    pub(crate) fn surplus(&mut self) -> Option<Segment> {
        if self.array().may_shrink() { self.array_mut().pop_surplus() } else { None }
    }
}

/// Locks the slot where an anchor is, looks whether it still is, and removes it if it is linked.
/// Unless it `may_wait` it does not, and frees no memory: for signal handlers.
///
/// # Safety
///
/// The anchor is alive until this returns, and lists that hold it are of `domain`.
#[inline(always)]
pub(crate) unsafe fn remove_from_home(
    domain: &Domain,
    anchor: &Anchor,
    from: CpuId,
    on: Option<&Core>,
    may_wait: bool,
) -> Result<bool, LockError> {
    loop {
        let home = anchor.home();
        let (guard, contended) =
            if may_wait { domain.lock(home)? } else { (domain.try_lock(home)?, false) };
        if !check!("remove: the locked slot is still the home", anchor.home() == home) {
            continue;
        }
        if !check!("remove: the anchor is still linked", anchor.index() != UNLINKED) {
            return Ok(false);
        }
        // SAFETY: linked, under the home slot's lock: a list lives until it has unlinked all entries.
        let shard = unsafe { Shard::of(anchor) };
        if contended {
            shard.count_contended();
        }
        let holds = |list: &Core| list.shard(home).is_some_and(|own| ptr::eq(own.shard, shard));
        if !check!("remove: the anchor is on this list", on.is_none_or(holds)) {
            return Ok(false);
        }
        // SAFETY: an anchor's home is its shard's slot, and that is locked.
        let mut locked = unsafe { LockedShard::new(shard, guard) };
        // SAFETY: its home is this slot, and it is in this shard.
        unsafe { locked.remove(anchor, from, domain) };
        let surplus = if may_wait { locked.surplus() } else { None };
        drop(locked);
        drop(surplus); // after the unlock
        return Ok(true);
    }
}
