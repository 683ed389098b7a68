//! The public type of the intrusive list.

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

/// A registry of pinned items that embed a [`Link`](super::Link). Adding an item allocates nothing
/// for it.
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
/// The items belong to their owners. The drop of an item first removes it from its list, and the
/// drop of the list removes all items. An add or a removal blocks while another thread adds,
/// removes or walks in the same slot. The array of pointers grows with no lock held.
///
/// If an item is **dropped inside a locked walk or a snapshot** of its own thread, while it is on a
/// list of that domain, the process aborts: the item cannot be removed while the walk may be
/// reading it.
///
/// The list is `Send` and `Sync`, because items are `Sync`. It is invariant in `T`.
pub struct IntrusiveList<T: Linked> {
    items: Items<T>,
}

impl<T: Linked> IntrusiveList<T> {
    /// Creates an empty list with a slot for each CPU, in a domain of its own.
    ///
    /// # Aborts
    ///
    /// If memory is out, like `Box::new`; [`try_new`](Self::try_new) returns an error instead.
    #[must_use]
    pub fn new() -> Self {
        Self::try_new().unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Creates a list like [`new`](Self::new), and returns an error if there is no memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        Self::try_new_in(&Domain::try_new()?)
    }

    /// Creates an empty list in a domain, which other lists may share.
    ///
    /// # Aborts
    ///
    /// If memory is out, like `Box::new`; [`try_new_in`](Self::try_new_in) returns an error
    /// instead.
    #[must_use]
    pub fn new_in(domain: &Domain) -> Self {
        Self::try_new_in(domain).unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Creates a list like [`new_in`](Self::new_in), and returns an error if there is no memory.
    /// Allocates 8 bytes for each slot.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new_in(domain: &Domain) -> Result<Self, AllocError> {
        Ok(Self { items: Items::try_new(domain, true)? })
    }

    /// Creates a list that does not count hits, to measure what counting costs.
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

    /// Returns the domain of the list, for which items make their links.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        self.core().domain()
    }

    /// Adds an item in the slot of the current CPU.
    ///
    /// Blocks while another thread holds the slot. If the item was last on another slot, the call
    /// locks both slots. It allocates when the array must grow, with no lock held.
    ///
    /// # Errors
    ///
    /// [`Refused`] says why the item was not added.
    #[inline]
    pub fn insert(&self, item: Pin<&T>) -> Result<(), Refused> {
        self.insert_in(self.core().domain().current_slot(), item.get_ref())
    }

    /// Adds an item in the slot of `cpu`, for replays, tests and callers that know a better CPU.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert), and [`LockError::NoSuchCpu`].
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

    /// Adds an item whose home is another slot, under both locks.
    #[cold]
    #[inline(never)]
    fn move_in(&self, shard: ShardRef<'_>, home: CpuId, item: &T) -> Result<Added, Refused> {
        let guard = self.core().domain().lock_pair(home, shard.slot())?;
        // SAFETY: `guard` holds two locks, of which one is that of the shard's slot.
        self.add(unsafe { LockedShard::new(shard.get(), guard) }, home, item)
    }

    /// Adds an item. `locked` holds the lock of its home, and of the slot that it is added to.
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
        // SAFETY: the array has room, and the anchor is unlinked, both checked under the lock of
        // its home, which is this slot now. Both callers took the item pinned, so it stays alive
        // and in place until its drop has unlinked it.
        unsafe { locked.add(anchor_of(item)) };
        Ok(Added::Yes)
    }

    /// Removes an item from this list, and returns whether it was on it.
    ///
    /// Blocks while another thread holds the item's slot. If several threads remove the item, one
    /// call returns true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds the slot, in a locked walk or a snapshot. The
    /// item stays on its list.
    #[inline]
    pub fn remove(&self, item: &T) -> Result<bool, LockError> {
        self.remove_from(self.core().domain().current_slot(), item)
    }

    /// Removes an item as if the thread ran on `cpu`, which decides whether the removal counts as a
    /// hit.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove), and [`LockError::NoSuchCpu`].
    pub fn remove_on(&self, cpu: CpuId, item: &T) -> Result<bool, LockError> {
        self.remove_from(self.core().domain().slot_of(cpu)?, item)
    }

    /// Removes an item if its slot is free. Never blocks, and may be called in a signal handler.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove), and [`LockError::WouldBlock`] where that waits.
    pub fn try_remove(&self, item: &T) -> Result<bool, LockError> {
        let (link, domain) = (link_of(item), self.core().domain());
        if !link.domain().is_same(domain) {
            return Ok(false);
        }
        let on = Some(self.core());
        // SAFETY: `item` keeps the anchor alive, and its link is only on lists of this domain.
        unsafe { remove_from_home(domain, link.anchor(), domain.current_slot(), on, false) }
    }

    #[inline(always)]
    fn remove_from(&self, from: CpuId, item: &T) -> Result<bool, LockError> {
        let (link, domain) = (link_of(item), self.core().domain());
        if !link.domain().is_same(domain) {
            return Ok(false);
        }
        let on = Some(self.core());
        // SAFETY: `item` keeps the anchor alive, and its link is only on lists of this domain.
        unsafe { remove_from_home(domain, link.anchor(), from, on, true) }
    }

    /// Refuses adds from now on. Adds that have begun are complete when it returns, so a
    /// [`drain`](Self::drain) that follows leaves the list empty.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds a slot, in a locked walk or a snapshot. The
    /// list is closed, but an add in that slot that has begun may still succeed.
    pub fn close(&self) -> Result<(), LockError> {
        self.core().close()
    }

    /// Returns whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().is_closed()
    }

    /// Returns the number of items, summed slot by slot while other threads may add and remove.
    /// Wait-free.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core().len()
    }

    /// Returns whether [`len`](Self::len) is 0. Never true while one item stays on the list.
    /// Wait-free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.core().len() == 0
    }

    /// Returns the counters of the list. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Calls `f` with every item, slot by slot, under the slot's lock.
    ///
    /// `f` should be short, because other threads that add or remove in that slot wait, in all
    /// lists of the domain. In `f`, adds and removals in these lists may return
    /// [`LockError::Deadlock`], and the drop of an item that is on one of them aborts the process.
    /// If `f` panics, the slot is unlocked and the panic goes on.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds a slot, in a locked walk or a snapshot. `f` was
    /// called with the items of the slots before it.
    pub fn for_each(&self, mut f: impl FnMut(Pin<&T>)) -> Result<(), LockError> {
        for shard in self.core().shards() {
            let locked = shard.lock()?;
            locked.array().for_each(|anchor| {
                // SAFETY: the anchor is in the array of this shard, and `locked` holds the lock of
                // its slot during the call of `f`.
                f(unsafe { self.items.item(anchor) });
            });
        }
        Ok(())
    }

    /// Removes the items for which `keep` returns false, slot by slot, under the slot's lock.
    /// Returns how many it removed.
    ///
    /// After `keep` has returned false, the item's owner may destroy the item. The conditions for
    /// `keep` are those for the closure of [`for_each`](Self::for_each).
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds a slot, in a locked walk or a snapshot. The
    /// slots before it are done.
    pub fn retain(&self, mut keep: impl FnMut(Pin<&T>) -> bool) -> Result<usize, LockError> {
        let domain = self.core().domain();
        let from = domain.current_slot();
        let mut removed = 0;
        for shard in self.core().shards() {
            let mut locked = shard.lock()?;
            // Entries must not move, or `keep` could get an item twice.
            let walk = shard.begin_walk();
            for index in (0..locked.array().len()).rev() {
                let Some(anchor) = locked.array().get(index) else { continue };
                // SAFETY: the anchor is in the array of this shard, and `locked` holds the lock of
                // its slot during the call of `keep`.
                if !keep(unsafe { self.items.item(anchor) }) {
                    // SAFETY: the anchor is linked, so it is alive.
                    let anchor = unsafe { anchor.as_ref() };
                    // SAFETY: the anchor was found in the array of this shard.
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

    /// Removes all items, and returns how many. Items that are added at the same time may stay,
    /// unless the list is [closed](Self::close) before.
    ///
    /// # Errors
    ///
    /// The errors of [`retain`](Self::retain).
    pub fn drain(&self) -> Result<usize, LockError> {
        self.retain(|_| false)
    }

    /// Walks the list, with no lock held between items. `pin` returns what keeps an item alive: see
    /// [`PinnedIter`].
    pub fn iter_pinned<P, F>(&self, pin: F) -> PinnedIter<'_, T, P, F>
    where
        F: FnMut(Pin<&T>) -> Option<P>,
    {
        PinnedIter::new(&self.items, pin)
    }

    /// Locks all slots, in ascending order. The snapshot shows the list at one instant.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds a slot, in a locked walk or a snapshot.
    pub fn lock_all(&self) -> Result<IntrusiveSnapshot<'_, T>, LockError> {
        IntrusiveSnapshot::new(&self.items)
    }

    /// Checks the structure, for tests.
    ///
    /// # Panics
    ///
    /// Panics if an invariant does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.core().validate();
    }
}

/// The result of an attempt to add.
enum Added {
    Yes,
    /// The home of the item has changed, so the attempt held the wrong lock.
    Moved,
    /// The array has no room.
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
