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

use std::ptr::{self, NonNull};

use percpu::lglock::{GlobalGuard, LocalGuard, LockError};
use percpu::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use percpu::sync::mutant;
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

    /// The slots, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = CpuId> + use<> {
        (0..self.shards.len() as u32).map(CpuId::new)
    }

    /// The list's part of a slot, if it ever had an entry there.
    #[inline(always)]
    pub(crate) fn shard(&self, slot: CpuId) -> Option<&Shard> {
        // Ordering: Acquire pairs with the Release in `make_shard`; it carries the empty shard.
        let shard = self.shards.get(slot.index())?.load(Ordering::Acquire);
        // SAFETY: null, or by invariant 1 a shard that lives as long as `self`.
        unsafe { shard.as_ref() }
    }

    #[cold]
    #[inline(never)]
    fn make_shard(&self, slot: CpuId) -> Result<&Shard, Refused> {
        let pointer = self.shards.get(slot.index()).ok_or(LockError::NoSuchCpu(slot))?;
        let made = crate::alloc::try_box(Shard::new(slot, self.counts_hits))
            .map_err(|_| AllocError::new())?;
        let made = Box::into_raw(made);
        // Ordering: Release on success pairs with the Acquire in `shard`; it carries `*made`.
        // Acquire on failure: another thread's shard is used below.
        let order = if mutant("list-publishes-a-shard-relaxed") {
            (Ordering::Relaxed, Ordering::Acquire)
        } else if mutant("list-takes-their-shard-relaxed") {
            (Ordering::Release, Ordering::Relaxed)
        } else {
            (Ordering::Release, Ordering::Acquire)
        };
        let shard = match pointer.compare_exchange(ptr::null_mut(), made, order.0, order.1) {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: from `into_raw` above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
        // SAFETY: by invariant 1 it lives as long as `self`.
        Ok(unsafe { &*shard })
    }

    /// The list's part in a slot, made if there is none.
    #[inline(always)]
    pub(crate) fn shard_or_new(&self, slot: CpuId) -> Result<&Shard, Refused> {
        match self.shard(slot) {
            Some(shard) => Ok(shard),
            None => self.make_shard(slot),
        }
    }

    /// Locks the slot of a shard of this list.
    #[inline(always)]
    pub(crate) fn lock_shard<'a>(&'a self, shard: &'a Shard) -> Result<Locked<'a>, LockError> {
        let (guard, contended) = self.domain.lock(shard.slot())?;
        if contended {
            shard.count_contended();
        }
        // SAFETY: its slot's lock.
        Ok(unsafe { Locked::new(shard, guard) })
    }

    /// Locks the slot of a shard of this list, if it is free.
    pub(crate) fn try_lock_shard<'a>(&'a self, shard: &'a Shard) -> Result<Locked<'a>, LockError> {
        let (guard, _) = self.domain.try_lock(shard.slot())?;
        // SAFETY: its slot's lock.
        Ok(unsafe { Locked::new(shard, guard) })
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
        if mutant("list-close-does-not-wait") {
            return Ok(());
        }
        let locked = self.slots().map(|slot| self.domain.lock(slot).map(drop));
        locked.fold(Ok(()), Result::and) // all of them, whichever is refused
    }

    /// Makes room in a slot that had none, with no lock held.
    #[cold]
    #[inline(never)]
    pub(crate) fn make_room(&self, shard: &Shard) -> Result<(), Refused> {
        let wanted = {
            let locked = self.lock_shard(shard)?;
            if locked.array().has_room() {
                return Ok(());
            }
            locked.array().wanted()?
        };
        let mut growth = Growth::allocate(wanted)?;
        let mut locked = self.lock_shard(shard)?;
        if !locked.array().has_room() {
            locked.array_mut().install(&mut growth);
        }
        drop(locked);
        drop(growth); // after the unlock
        Ok(())
    }

    /// Frees what the entries of a slot do not need any more, a segment at a time.
    pub(crate) fn shrink(&self, shard: &Shard) {
        while let Ok(mut locked) = self.lock_shard(shard) {
            let surplus = locked.array_mut().surplus();
            drop(locked);
            if surplus.is_none() {
                break;
            }
        }
    }

    /// How many entries there are, added up slot by slot: a moving target, but never 0 while one
    /// stays throughout.
    pub(crate) fn len(&self) -> usize {
        self.all_shards().map(|shard| shard.entries() as usize).sum()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.all_shards().for_each(|shard| sum += shard.stats());
        sum
    }

    /// The parts of all slots that ever had an entry, ascending.
    pub(crate) fn all_shards(&self) -> impl Iterator<Item = &Shard> {
        self.slots().filter_map(|slot| self.shard(slot))
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
        for shard in self.all_shards() {
            let Ok(locked) = self.lock_shard(shard) else { continue };
            let array = locked.array();
            array.validate();
            assert_eq!(shard.entries(), u64::from(array.entries()), "additions - removals");
            array.for_each(|anchor| {
                // SAFETY: in the array, so alive.
                let anchor = unsafe { anchor.as_ref() };
                assert_eq!(anchor.home(), shard.slot(), "an entry's home");
                assert!(ptr::eq(anchor.shard(), shard), "an entry's list");
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

/// A slot of a list, locked by the guard `G`; unlocks on drop.
pub(crate) struct Locked<'a, G = LocalGuard<'a, ()>> {
    shard: &'a Shard,
    _guard: G,
}

impl<'a, G> Locked<'a, G> {
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
        unsafe { &*self.shard.array() }
    }

    #[inline(always)]
    pub(crate) fn array_mut(&mut self) -> &mut Array {
        // SAFETY: we hold the slot's lock, and `&mut self` keeps other references away.
        unsafe { &mut *self.shard.array_mut() }
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
        unsafe { anchor.as_ref() }.set_shard(self.shard);
        // SAFETY: the caller's.
        unsafe { self.array_mut().put(anchor) };
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
        let may_move = self.shard.may_move() || mutant("list-moves-behind-walkers");
        // SAFETY: it is linked, so in this shard, where its index says (anchor's invariant 2).
        unsafe { self.array_mut().take(index, may_move) };
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
        if self.array().may_shrink() { self.array_mut().surplus() } else { None }
    }
}

/// Places that a walk looks at under one lock, holes and what is left out among them. A guess, as
/// [`CHUNK`](crate::chunk::CHUNK) is.
const PLACES: u32 = 128;

/// Where a walk is: in front of a place of a slot.
///
/// While it is in a slot, entries there do not move.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    core: &'a Core,
    next_slot: u32,
    within: Option<Within<'a>>,
}

/// A place in a slot; counted among its walkers.
#[derive(Debug)]
pub(crate) struct Within<'a> {
    shard: &'a Shard,
    index: u32,
    /// What was added since the walk came here may be left out, and is: so the walk ends.
    end: u32,
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.shard.walk_ends();
    }
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        Self { core, next_slot: 0, within: None }
    }

    /// Shows up to `count` entries to `pin`, under their slot's lock; fewer at the end only, or where
    /// a lock is refused, which ends the walk.
    ///
    /// `prepare` is called with each slot that was locked, before its entries.
    pub(crate) fn chunk(
        &mut self,
        count: usize,
        mut prepare: impl FnMut(&mut Locked<'_>),
        mut pin: impl FnMut(NonNull<Anchor>) -> bool,
    ) -> Result<(), LockError> {
        let mut left = count;
        while left != 0 {
            let mut places = PLACES;
            let Some(shard) = self.shard() else { break };
            let mut locked = self.core.lock_shard(shard).inspect_err(|_| self.end())?;
            prepare(&mut locked);
            let array = locked.array();
            let within = self.within.get_or_insert_with(|| Within::new(shard, array.len()));
            let end = within.end.min(array.len());
            while left != 0 && within.index < end && places != 0 {
                let entry = array.get(within.index);
                within.index += 1;
                places -= 1;
                left -= usize::from(entry.is_some_and(&mut pin));
            }
            if within.index >= end {
                self.within = None;
                self.next_slot += 1;
            }
        }
        Ok(())
    }

    /// Leaves the slots that are left out.
    fn end(&mut self) {
        self.within = None;
        self.next_slot = self.core.shards.len() as u32;
    }

    /// The slot where the walk is, or the next that ever had an entry.
    fn shard(&mut self) -> Option<&'a Shard> {
        while (self.next_slot as usize) < self.core.shards.len() {
            if let Some(shard) = self.core.shard(CpuId::new(self.next_slot)) {
                return Some(shard);
            }
            self.next_slot += 1;
        }
        None
    }
}

impl<'a> Within<'a> {
    /// The caller holds the slot's lock.
    pub(crate) fn new(shard: &'a Shard, end: u32) -> Self {
        shard.walk_begins();
        Self { shard, index: 0, end }
    }
}

/// Locks the slot where an anchor is, looks whether it still is, and removes it if it is linked.
/// Where `lock` would not wait, neither does this. Without `frees` it frees no memory, for signal
/// handlers.
///
/// # Safety
///
/// The anchor is alive until this returns, and lists that hold it are of `domain`.
#[inline(always)]
pub(crate) unsafe fn remove_anywhere<'d, G>(
    domain: &'d Domain,
    anchor: &Anchor,
    from: CpuId,
    on: Option<&Core>,
    frees: bool,
    lock: impl Fn(&'d Domain, CpuId) -> Result<(G, bool), LockError>,
) -> Result<bool, LockError> {
    loop {
        let home = anchor.home();
        let (guard, contended) =
            lock(domain, if mutant("list-locks-the-current-slot") { domain.here() } else { home })?;
        if anchor.home() != home && !mutant("list-skips-the-second-look") {
            continue; // it was added elsewhere meanwhile
        }
        if anchor.index() == UNLINKED {
            return Ok(false);
        }
        // SAFETY: linked, under the home slot's lock: a list lives until it has unlinked all entries.
        let shard = unsafe { &*anchor.shard() };
        if contended {
            shard.count_contended();
        }
        let theirs = |core: &Core| !core.shard(home).is_some_and(|ours| ptr::eq(ours, shard));
        if on.is_some_and(theirs) && !mutant("list-removes-from-another-list") {
            return Ok(false);
        }
        // SAFETY: an anchor's home is its shard's slot, and that is locked.
        let mut locked = unsafe { Locked::new(shard, guard) };
        // SAFETY: its home is this slot, and it is in this shard.
        unsafe { locked.remove(anchor, from, domain) };
        let surplus = if frees { locked.surplus() } else { None };
        drop(locked);
        drop(surplus); // after the unlock
        return Ok(true);
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    /// A walk that leaves nearly all out lets go of the lock now and then all the same.
    #[test]
    fn inv11_a_walk_that_takes_little_locks_anew_for_every_few_places() {
        let slot = CpuId::new(0);
        let core = Core::new(&Domain::new(), true).unwrap();
        let anchors: Vec<Anchor> = (0..1000).map(|_| Anchor::new(slot)).collect();
        let shard = core.shard_or_new(slot).unwrap();
        for anchor in &anchors {
            if !core.lock_shard(shard).unwrap().array().has_room() {
                core.make_room(shard).unwrap();
            }
            // SAFETY: there is room, and the anchor is new and outlives `core`'s use of it.
            unsafe { core.lock_shard(shard).unwrap().add(NonNull::from(anchor)) };
        }
        let (mut locks, mut looked) = (0, 0);
        let mut cursor = Cursor::new(&core);
        let leave_out = |_| {
            looked += 1;
            looked == 1000
        };
        cursor.chunk(32, |_| locks += 1, leave_out).unwrap();
        assert_eq!((locks, looked), (1000_u32.div_ceil(PLACES), 1000));
    }
}
