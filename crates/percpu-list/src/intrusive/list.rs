//! The list itself.

use std::fmt;
use std::pin::Pin;

use percpu::lglock::LockError;
use percpu::sync::{check, step};
use percpu::{AllocError, CpuId};

use crate::anchor::UNLINKED;
use crate::core::{Core, LockedShard, ShardRef, remove_from_home};
use crate::domain::Domain;
use crate::error::Refused;
use crate::stats::Stats;

use super::items::Items;
use super::iter::PinnedIter;
use super::link::{Linked, anchor_of, link_of};
use super::snapshot::IntrusiveSnapshot;

/// A registry of pinned items that embed a [`Link`](super::Link): nothing is allocated for an item.
///
/// ```
/// use std::pin::Pin;
/// use std::sync::Arc;
///
/// use percpu_list::{IntrusiveList, Link, linked};
///
/// struct Session {
///     name: &'static str,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// let sessions = IntrusiveList::new();
/// let alice: Pin<Arc<Session>> =
///     Arc::pin(Session { name: "alice", link: Link::new(sessions.domain()) });
/// sessions.insert(alice.as_ref())?;
/// sessions.for_each(|session| println!("{}", session.name))?;
/// assert_eq!(sessions.remove(&alice), Ok(true));
/// assert_eq!(sessions.remove(&alice), Ok(false));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Items stay their owners'. Dropping one takes it off the list first; dropping the list takes all
/// items off. Adding and removing block while another thread is at the same slot, for some
/// instructions of its; the array of pointers grows without a lock held.
///
/// An item that is **dropped inside a locked walk or a snapshot** of its own thread, while it is on a
/// list of that domain, ends the process: it cannot leave the list while the walk may be reading it.
///
/// Invariant in `T`. `Send` and `Sync`: items are `Sync`.
pub struct IntrusiveList<T: Linked> {
    items: Items<T>,
}

impl<T: Linked> IntrusiveList<T> {
    /// Makes an empty list with a slot for each CPU, in a domain of its own.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory; [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new() -> Self {
        Self::try_new().unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Makes an empty list with a slot for each CPU, in a domain of its own.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        Self::try_new_in(&Domain::try_new()?)
    }

    /// Makes an empty list in a domain, which other lists may share.
    ///
    /// # Aborts
    ///
    /// As [`new`](Self::new).
    #[must_use]
    pub fn new_in(domain: &Domain) -> Self {
        Self::try_new_in(domain).unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Makes an empty list in a domain, which other lists may share. Allocates 8 bytes for each slot.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new_in(domain: &Domain) -> Result<Self, AllocError> {
        Ok(Self { items: Items::try_new(domain, true)? })
    }

    /// One that does not count hits, to measure what that costs.
    #[doc(hidden)]
    #[must_use]
    pub fn new_uncounted_in(domain: &Domain) -> Self {
        let items = Items::try_new(domain, false);
        Self { items: items.unwrap_or_else(|_| crate::out_of_memory::<Self>()) }
    }

    #[inline(always)]
    fn core(&self) -> &Core {
        self.items.core()
    }

    /// The list's domain, for which items make their links.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        self.core().domain()
    }

    /// Adds an item in the slot of the CPU that the caller runs on.
    ///
    /// Blocks while another thread holds the slot's lock; an item that was on another slot last
    /// takes both locks. Allocates now and then, with no lock held.
    ///
    /// # Errors
    ///
    /// [`Refused`]; the item is where it was.
    #[inline]
    pub fn insert(&self, item: Pin<&T>) -> Result<(), Refused> {
        self.insert_in(self.core().domain().current_slot(), item.get_ref())
    }

    /// Adds an item in the slot of `cpu`: for who knows better, and for replays.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert), and [`LockError::NoSuchCpu`].
    pub fn insert_on(&self, cpu: CpuId, item: Pin<&T>) -> Result<(), Refused> {
        self.insert_in(self.core().domain().slot_of(cpu)?, item.get_ref())
    }

    #[inline(always)]
    fn insert_in(&self, slot: CpuId, item: &T) -> Result<(), Refused> {
        let link = link_of(item);
        if !link.domain().is_same(self.core().domain()) {
            return Err(Refused::OtherDomain);
        }
        let shard = self.core().shard_or_new(slot)?;
        loop {
            let home = link.anchor().home();
            let added = if check!("add: the home is this slot", home == slot) {
                self.add(shard.lock()?, home, item)
            } else {
                self.move_in(shard, home, item)
            };
            match added? {
                Added::Yes => return Ok(()),
                Added::Moved => {}
                Added::Full => shard.make_room()?,
            }
        }
    }

    /// Adds an item whose home is another slot: under both locks.
    #[cold]
    #[inline(never)]
    fn move_in(&self, shard: ShardRef<'_>, home: CpuId, item: &T) -> Result<Added, Refused> {
        let guard = self.core().domain().lock_pair(home, shard.slot())?;
        // SAFETY: one of the two is its slot's lock.
        self.add(unsafe { LockedShard::new(shard.get(), guard) }, home, item)
    }

    /// Adds an item under the lock of its home, and of the slot that it is added to.
    #[inline(always)]
    fn add<G>(
        &self,
        mut locked: LockedShard<'_, G>,
        home: CpuId,
        item: &T,
    ) -> Result<Added, Refused> {
        let anchor = link_of(item).anchor();
        if !check!("add: the home is still the same", anchor.home() == home) {
            return Ok(Added::Moved);
        }
        if anchor.index() != UNLINKED {
            return Err(Refused::Linked);
        }
        if self.core().is_closed() {
            return Err(Refused::Closed);
        }
        if !locked.array().has_room() {
            return Ok(Added::Full);
        }
        if home != locked.shard().slot() {
            step!("add: record the new home", anchor.set_home(locked.shard().slot()));
        }
        // SAFETY: there is room; the anchor is unlinked, under its home's lock. It is pinned (the
        // callers' `Pin`), so it stays alive and in place until its drop has unlinked it.
        unsafe { locked.add(anchor_of(item)) };
        Ok(Added::Yes)
    }

    /// Takes an item off this list. False if it is not on it.
    ///
    /// Blocks while another thread holds the slot's lock. Of all that try, one gets true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds the slot, in a locked walk or a snapshot. The
    /// item is where it was.
    #[inline]
    pub fn remove(&self, item: &T) -> Result<bool, LockError> {
        self.remove_from(self.core().domain().current_slot(), item)
    }

    /// Removes an item as if the caller ran on `cpu`: that is what the hits are counted by.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove), and [`LockError::NoSuchCpu`].
    pub fn remove_on(&self, cpu: CpuId, item: &T) -> Result<bool, LockError> {
        self.remove_from(self.core().domain().slot_of(cpu)?, item)
    }

    /// Removes an item if its slot's lock is free. Never blocks: for signal handlers.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove), and [`LockError::WouldBlock`].
    pub fn try_remove(&self, item: &T) -> Result<bool, LockError> {
        let (link, domain) = (link_of(item), self.core().domain());
        if !link.domain().is_same(domain) {
            return Ok(false);
        }
        let on = Some(self.core());
        // SAFETY: the item is borrowed, and its lists are of this domain.
        unsafe { remove_from_home(domain, link.anchor(), domain.current_slot(), on, false) }
    }

    #[inline(always)]
    fn remove_from(&self, from: CpuId, item: &T) -> Result<bool, LockError> {
        let (link, domain) = (link_of(item), self.core().domain());
        if !link.domain().is_same(domain) {
            return Ok(false);
        }
        let on = Some(self.core());
        // SAFETY: the item is borrowed, and its lists are of this domain.
        unsafe { remove_from_home(domain, link.anchor(), from, on, true) }
    }

    /// Refuses additions from now on. Those under way are complete when it returns, so a
    /// [`drain`](Self::drain) after it leaves nothing.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove). The list is closed, but an addition to a slot that could not be
    /// locked may yet succeed.
    pub fn close(&self) -> Result<(), LockError> {
        self.core().close()
    }

    /// True once [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().is_closed()
    }

    /// How many items there are, slot by slot: a moving target. Wait-free.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core().len()
    }

    /// True if there was no item: never while one is on the list throughout. Wait-free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.core().len() == 0
    }

    /// What was counted so far. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Calls `f` with every item, slot by slot, under the slot's lock.
    ///
    /// `f` should be short: all who add or remove in that slot wait, in all lists of the domain. In
    /// `f`, adding to them and removing from them may give [`LockError::Deadlock`], and dropping an
    /// item that is on one ends the process. A panic of `f` unlocks the slot, and is the caller's to
    /// see.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove); `f` has seen the slots before.
    pub fn for_each(&self, mut f: impl FnMut(Pin<&T>)) -> Result<(), LockError> {
        for shard in self.core().shards() {
            let locked = shard.lock()?;
            locked.array().for_each(|anchor| {
                // SAFETY: linked, and we hold the slot's lock for the whole call.
                f(unsafe { self.items.item(anchor) });
            });
        }
        Ok(())
    }

    /// Takes the items off for which `keep` is false, slot by slot, under the slot's lock; returns
    /// how many.
    ///
    /// Once `keep` has returned false the item's owner may destroy it. Otherwise as
    /// [`for_each`](Self::for_each).
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove); the slots before were done.
    pub fn retain(&self, mut keep: impl FnMut(Pin<&T>) -> bool) -> Result<usize, LockError> {
        let domain = self.core().domain();
        let from = domain.current_slot();
        let mut removed = 0;
        for shard in self.core().shards() {
            let mut locked = shard.lock()?;
            // As for a walk nothing moves, so that none is asked about twice.
            let walk = shard.begin_walk();
            for index in (0..locked.array().len()).rev() {
                let Some(anchor) = locked.array().get(index) else { continue };
                // SAFETY: linked, and we hold the slot's lock.
                if !keep(unsafe { self.items.item(anchor) }) {
                    // SAFETY: linked, so it is alive.
                    let anchor = unsafe { anchor.as_ref() };
                    // SAFETY: found in this shard's array.
                    removed += usize::from(unsafe { locked.remove(anchor, from, domain) });
                }
            }
            drop(walk);
            if shard.may_move() {
                locked.array_mut().close_holes();
            }
            drop(locked);
            shard.shrink();
        }
        Ok(removed)
    }

    /// Takes all items off; returns how many. To leave nothing, [`close`](Self::close) the list
    /// before.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove); the slots before were done.
    pub fn drain(&self) -> Result<usize, LockError> {
        self.retain(|_| false)
    }

    /// Walks the list without a lock while the caller's code runs: see [`PinnedIter`].
    pub fn iter_pinned<P, F>(&self, pin: F) -> PinnedIter<'_, T, P, F>
    where
        F: FnMut(Pin<&T>) -> Option<P>,
    {
        PinnedIter::new(&self.items, pin)
    }

    /// Locks all slots, ascending: what it shows is the list at one instant.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove).
    pub fn lock_all(&self) -> Result<IntrusiveSnapshot<'_, T>, LockError> {
        IntrusiveSnapshot::new(&self.items)
    }

    /// Checks the structure, for tests.
    ///
    /// # Panics
    ///
    /// Panics with what does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.core().validate();
    }
}

/// What became of an addition.
enum Added {
    Yes,
    /// The item was added elsewhere, or taken off there, meanwhile.
    Moved,
    Full,
}

impl<T: Linked> Default for IntrusiveList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Linked> fmt::Debug for IntrusiveList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntrusiveList")
            .field("len", &self.len())
            .field("closed", &self.is_closed())
            .field("domain", self.domain())
            .finish_non_exhaustive()
    }
}
