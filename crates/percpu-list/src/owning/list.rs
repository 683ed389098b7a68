//! The list itself.

use std::fmt;

use percpu::lglock::LockError;
use percpu::sync::Arc;
use percpu::{AllocError, CpuId};

use crate::core::Core;
use crate::domain::Domain;
use crate::error::{InsertError, Refused};
use crate::stats::Stats;

use super::drain::Drain;
use super::entry::{Entry, Holder, sealed};
use super::node::{DropList, NodePtr, Ref};
use super::node_shard::NodeShard;
use super::nodes::Nodes;
use super::pool;
use super::snapshot::Snapshot;
use super::walk::Iter;

/// A registry of values: add where you run, remove from anywhere, walk everything.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// let _bob = sessions.insert("bob")?;
/// assert_eq!((*alice, sessions.len()), ("alice", 2));
///
/// for session in sessions.iter() {
///     println!("{}", *session?); // no lock is held here
/// }
/// drop(alice); // removes it
/// assert_eq!(sessions.lock_all()?.iter().copied().collect::<Vec<_>>(), ["bob"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Adding and removing block while another thread is at the same slot, for some instructions of
/// its; on different CPUs they share nothing. A value has a node (of 32 bytes beside it), allocated
/// without a lock held; each slot keeps up to 16 nodes for its next values. Values are dropped
/// without a lock held.
///
/// Dropping the list drops what is on it: entries that were forgotten, since all others borrow it.
///
/// `T` is shared with whoever walks, and dropped by whoever has it last: the list is `Send` and
/// `Sync` if `T` is both. It is invariant in `T`:
///
/// ```compile_fail
/// fn shorten<'a>(list: percpu_list::PerCpuList<&'static str>) -> percpu_list::PerCpuList<&'a str> {
///     list
/// }
/// ```
pub struct PerCpuList<T> {
    nodes: Nodes<T>,
}

impl<T> PerCpuList<T> {
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

    /// Makes an empty list in a domain, which other lists may share.
    ///
    /// Allocates 8 bytes for each slot. The first entry in a slot allocates that slot's shard, of 256
    /// bytes; each entry takes 8 bytes there.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new_in(domain: &Domain) -> Result<Self, AllocError> {
        Ok(Self { nodes: Nodes::try_new(domain, true)? })
    }

    /// One that does not count hits, to measure what that costs.
    #[doc(hidden)]
    #[must_use]
    pub fn new_uncounted_in(domain: &Domain) -> Self {
        let nodes = Nodes::try_new(domain, false);
        Self { nodes: nodes.unwrap_or_else(|_| crate::out_of_memory::<Self>()) }
    }

    #[inline(always)]
    fn core(&self) -> &Core {
        self.nodes.core()
    }

    /// The list's domain.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        self.core().domain()
    }

    /// Adds a value in the slot of the CPU that the caller runs on.
    ///
    /// Allocates only where the slot has no spare node, or no room; and always for a value of more
    /// than 128 bytes. Blocks while another thread holds the slot's lock. Removes what was
    /// [deferred](Entry::defer_remove) in the slot, and drops it once that is unlocked.
    ///
    /// # Errors
    ///
    /// The value and why it was refused: the list is closed, memory is out, or this thread holds
    /// the slot's lock already (it is inside a locked walk or has a [`Snapshot`]).
    #[inline(always)] // else the entry goes through memory, in other pieces than it is read in
    pub fn insert(&self, value: T) -> Result<Entry<&Self>, InsertError<T>> {
        let node = self.insert_node(self.core().domain().current_slot(), value)?;
        // SAFETY: its count is the entry's, and it was just inserted.
        Ok(unsafe { Entry::new(node, self) })
    }

    /// Adds a value in the slot of `cpu`.
    ///
    /// For who knows better, and for replays. Otherwise as [`insert`](Self::insert).
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert), and [`LockError::NoSuchCpu`].
    pub fn insert_on(&self, cpu: CpuId, value: T) -> Result<Entry<&Self>, InsertError<T>> {
        let node = self.insert_node_on(cpu, value)?;
        // SAFETY: as in `insert`.
        Ok(unsafe { Entry::new(node, self) })
    }

    /// [`insert`](Self::insert) with an entry that holds the list by an `Arc`, and may go anywhere.
    ///
    /// All CPUs count such entries on one line: where millions come and go, borrow the list.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    #[cfg(not(offlock_loom))]
    pub fn insert_arc(self: &Arc<Self>, value: T) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = self.insert_node(self.core().domain().current_slot(), value)?;
        // SAFETY: as in `insert`.
        Ok(unsafe { Entry::new(node, Arc::clone(self)) })
    }

    /// [`insert_on`](Self::insert_on) with an entry that holds the list by an `Arc`.
    ///
    /// # Errors
    ///
    /// As [`insert_on`](Self::insert_on).
    #[cfg(not(offlock_loom))]
    pub fn insert_arc_on(
        self: &Arc<Self>,
        cpu: CpuId,
        value: T,
    ) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = self.insert_node_on(cpu, value)?;
        // SAFETY: as in `insert`.
        Ok(unsafe { Entry::new(node, Arc::clone(self)) })
    }

    /// The same for loom, whose `Arc` cannot be a receiver.
    #[cfg(offlock_loom)]
    pub fn insert_arc(this: &Arc<Self>, value: T) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = this.insert_node(this.core().domain().current_slot(), value)?;
        // SAFETY: as in `insert`.
        Ok(unsafe { Entry::new(node, Arc::clone(this)) })
    }

    fn insert_node_on(&self, cpu: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        match self.core().domain().slot_of(cpu) {
            Ok(slot) => self.insert_node(slot, value),
            Err(error) => Err(InsertError { value, reason: error.into() }),
        }
    }

    #[inline(always)]
    fn insert_node(&self, slot: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        match self.nodes.shard(slot) {
            Some(here) if pool::may_have_node::<T>(&here) => self.insert_pooled(here, value),
            _ => self.insert_allocated(slot, value),
        }
    }

    /// Adds a value in a spare node, where everything is at hand.
    #[inline(always)]
    fn insert_pooled(
        &self,
        slot: NodeShard<'_, T>,
        value: T,
    ) -> Result<NodePtr<T>, InsertError<T>> {
        let mut removed = DropList::<T>::new(); // dropped after the lock
        if let Ok(mut locked) = slot.lock(&mut removed) {
            if !self.core().is_closed() && locked.array().has_room() {
                // SAFETY: of this list.
                if let Some(node) = unsafe { pool::acquire::<T, _>(&locked) } {
                    // SAFETY: a spare node's only count is the entry's, and it has no value.
                    unsafe { node.write_value(value) };
                    // SAFETY: there is room; the node is unlinked, a spare node's home is this slot,
                    // and it lives until it is unlinked (node's invariant 2).
                    unsafe { locked.add(node.anchor_ptr()) };
                    drop(locked);
                    // SAFETY: its count is the entry's.
                    let entry = unsafe { Entry::new(node, self) };
                    drop(removed); // a panic there drops the entry
                    return Ok(entry.into_node());
                }
            }
        }
        drop(removed); // a panic there drops the value
        self.insert_allocated(slot.slot(), value)
    }

    /// Adds a value in a node of its own.
    #[inline(never)]
    fn insert_allocated(&self, slot: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        let node = NodePtr::try_new(slot, value)
            .map_err(|value| InsertError { value, reason: AllocError::new().into() })?;
        let mut removed = DropList::<T>::new();
        let inserted = match self.link(slot, node, &mut removed) {
            // SAFETY: its count is the entry's, and it was just inserted.
            Ok(()) => Ok(unsafe { Entry::new(node, self) }),
            Err(reason) => Err(Self::unwrap_node(node, reason)),
        };
        drop(removed); // a panic there drops the entry, or the value
        inserted.map(Entry::into_node)
    }

    #[cold]
    #[inline(never)]
    fn unwrap_node(node: NodePtr<T>, reason: Refused) -> InsertError<T> {
        // SAFETY: the only count, of a node that nobody has seen.
        match unsafe { node.try_unwrap() } {
            Some(value) => InsertError { value, reason },
            None => unreachable!("a node that was never linked has one count"),
        }
    }

    /// Puts a new node on the list. What had been left to be removed is in `removed`, to be dropped.
    fn link(
        &self,
        slot: CpuId,
        node: NodePtr<T>,
        removed: &mut DropList<T>,
    ) -> Result<(), Refused> {
        // SAFETY: of this list.
        let slot = unsafe { NodeShard::new(self.core().shard_or_new(slot)?) };
        loop {
            let mut locked = slot.lock(removed)?;
            if self.core().is_closed() {
                return Err(Refused::Closed);
            }
            if locked.array().has_room() {
                // SAFETY: there is room; the node is new, its home is this slot, and it lives until
                // it is unlinked (node's invariant 2).
                unsafe { locked.add(node.anchor_ptr()) };
                return Ok(());
            }
            drop(locked);
            slot.make_room()?;
        }
    }

    /// Takes what `found` refers to off this list, though its [`Entry`] still exists. False if it
    /// is not on it: taken off before, or never there.
    ///
    /// Blocks like [`insert`](Self::insert). Of all that try, one gets true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`]: nothing was removed.
    pub fn remove(&self, found: &Ref<T>) -> Result<bool, LockError> {
        // SAFETY: the reference keeps the node alive.
        let anchor = unsafe { found.node().anchor() };
        // SAFETY: `found` is a reference to the node of the anchor.
        let held_by = unsafe { anchor.shard() };
        let own = self.core().shard(anchor.home());
        let ours = own.is_some_and(|own| own.as_anchor_ptr() == held_by);
        if !ours {
            return Ok(false);
        }
        // SAFETY: the reference's count, and it was inserted into this list.
        unsafe { self.nodes.unlink(found.node(), self.core().domain().current_slot()) }
    }

    /// Refuses additions from now on. Those under way are complete when it returns, so a
    /// [`drain`](Self::drain) after it leaves nothing.
    ///
    /// Removals, walks and [`drain`](Self::drain) go on as before. Locks each slot in turn.
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

    /// How many entries there are, slot by slot: a moving target. Wait-free; see
    /// [`lock_all`](Self::lock_all) for an instant.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core().len()
    }

    /// True if there was no entry: never while one is on the list throughout. Wait-free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.core().len() == 0
    }

    /// What was counted so far. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Removes what was [deferred](Entry::defer_remove), and drops it; frees the nodes that slots keep
    /// for their next values.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove); the slots before were done.
    pub fn flush(&self) -> Result<(), LockError> {
        for slot in self.nodes.shards() {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let locked = slot.lock(&mut removed)?;
            // SAFETY: of this list.
            let spares = unsafe { pool::remove_all::<T, _>(&locked) };
            drop(locked);
            drop(spares); // after the unlock
        }
        Ok(())
    }

    /// Walks the list without a lock while the caller's code runs: see [`Iter`].
    pub fn iter(&self) -> Iter<'_, T> {
        Iter::new(&self.nodes)
    }

    /// Calls `f` with every value, slot by slot, under the slot's lock.
    ///
    /// The cheapest walk: no references are counted. `f` should be short: all who add or remove in that
    /// slot wait, in all lists of the domain. In `f` an entry of the domain that is dropped is
    /// removed later: of this list at the end of the walk, of another by whoever comes to its slot
    /// next. Adding to lists of the domain may give [`LockError::Deadlock`]. An entry of another
    /// domain waits for its lock as anywhere: two threads that do so crosswise wait for ever. A panic
    /// of `f` unlocks the slot, and is the caller's to see.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove); `f` has seen the slots before.
    pub fn for_each(&self, mut f: impl FnMut(&T)) -> Result<(), LockError> {
        for slot in self.nodes.shards() {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let locked = slot.lock(&mut removed)?;
            locked.array().for_each(|anchor| {
                // SAFETY: an entry of this list is a node of its `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: linked, and we hold the slot's lock for the whole call.
                f(unsafe { node.value() });
            });
        }
        self.nodes.flush_deferred();
        Ok(())
    }

    /// Locks all slots, ascending: what it shows is the list at one instant.
    ///
    /// Everybody else waits, in all lists of the domain, until the snapshot is dropped. This thread
    /// meanwhile gets [`LockError::Deadlock`] from whatever locks a slot of the domain: a snapshot
    /// shows one list.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove).
    pub fn lock_all(&self) -> Result<Snapshot<'_, T>, LockError> {
        Snapshot::new(&self.nodes)
    }

    /// Takes everything off the list: see [`Drain`].
    pub fn drain(&self) -> Drain<'_, T> {
        Drain::new(&self.nodes)
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

impl<T> Default for PerCpuList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a, T> IntoIterator for &'a PerCpuList<T> {
    type Item = Result<Ref<T>, LockError>;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T> fmt::Debug for PerCpuList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuList")
            .field("len", &self.len())
            .field("closed", &self.is_closed())
            .field("domain", self.domain())
            .finish_non_exhaustive()
    }
}

impl<T> sealed::Sealed for &PerCpuList<T> {}

impl<T> Holder for &PerCpuList<T> {
    type Value = T;

    #[inline(always)]
    fn nodes(&self) -> &Nodes<T> {
        &self.nodes
    }
}

impl<T> sealed::Sealed for Arc<PerCpuList<T>> {}

impl<T> Holder for Arc<PerCpuList<T>> {
    type Value = T;

    #[inline(always)]
    fn nodes(&self) -> &Nodes<T> {
        &self.nodes
    }
}
