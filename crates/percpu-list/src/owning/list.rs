//! The owning list and its operations.

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

/// A registry of values with a list per CPU: a value is added to the list of the current CPU, and removed
/// from any CPU.
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
/// Adding and removing block while another thread holds the same slot, for some instructions. On
/// different CPUs they share no memory. A value is stored in a node, which takes 32 bytes more. Nodes are
/// allocated without a lock; each slot keeps up to 16 nodes for its next values. Values are dropped
/// without a lock.
///
/// Dropping the list drops the values of forgotten entries. All other entries borrow the list.
///
/// Walks share `&T` with other threads, and the thread with the last reference drops the `T`, so the list
/// is `Send` and `Sync` if `T` is both. It is invariant in `T`:
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
    /// Creates an empty list with a slot for each CPU, in a domain of its own.
    ///
    /// # Aborts
    ///
    /// Aborts like `Box::new` if there is no memory; [`try_new`](Self::try_new) returns an error instead.
    #[must_use]
    pub fn new() -> Self {
        Self::try_new().unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Creates an empty list with a slot for each CPU, in a domain of its own.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory.
    pub fn try_new() -> Result<Self, AllocError> {
        Self::try_new_in(&Domain::try_new()?)
    }

    /// Creates an empty list in a domain that other lists may share.
    ///
    /// # Aborts
    ///
    /// Aborts like [`new`](Self::new).
    #[must_use]
    pub fn new_in(domain: &Domain) -> Self {
        Self::try_new_in(domain).unwrap_or_else(|_| crate::out_of_memory::<Self>())
    }

    /// Creates an empty list in a domain that other lists may share.
    ///
    /// Allocates 8 bytes for each slot. The first entry in a slot allocates that slot's shard, of
    /// 256 bytes; each entry takes 8 bytes there.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory.
    pub fn try_new_in(domain: &Domain) -> Result<Self, AllocError> {
        Ok(Self { nodes: Nodes::try_new(domain, true)? })
    }

    /// Creates a list that does not count hits, to measure the cost of the counts.
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

    /// Returns the list's domain.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        self.core().domain()
    }

    /// Adds a value in the slot of the current CPU.
    ///
    /// Allocates if the slot has no spare node or no room, and for each value of more than 128 bytes.
    /// Blocks while another thread holds the slot. Performs the [deferred](Entry::defer_remove) removals
    /// of the slot, and drops their values after the unlock.
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns the value and the reason: the list is closed, there is no memory, or this
    /// thread holds the slot (it is inside a locked walk or has a [`Snapshot`]).
    #[inline(always)] // otherwise the entry is returned in memory, and store forwarding fails
    pub fn insert(&self, value: T) -> Result<Entry<&Self>, InsertError<T>> {
        let node = self.insert_node(self.core().domain().current_slot(), value)?;
        // SAFETY: the node was just inserted, and its count passes to the entry.
        Ok(unsafe { Entry::new(node, self) })
    }

    /// Adds a value in the slot of `cpu`.
    ///
    /// For programs that choose the slot themselves, and for replays. Otherwise the same as
    /// [`insert`](Self::insert).
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert), and [`LockError::NoSuchCpu`].
    pub fn insert_on(&self, cpu: CpuId, value: T) -> Result<Entry<&Self>, InsertError<T>> {
        let node = self.insert_node_on(cpu, value)?;
        // SAFETY: the node was just inserted, and its count passes to the entry.
        Ok(unsafe { Entry::new(node, self) })
    }

    /// Adds a value in the slot of the current CPU. The entry has an `Arc` of the list, so it borrows
    /// nothing.
    ///
    /// All CPUs write the count of that `Arc`. If entries are created often, borrow the list instead.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    #[cfg(not(offlock_loom))]
    pub fn insert_arc(self: &Arc<Self>, value: T) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = self.insert_node(self.core().domain().current_slot(), value)?;
        // SAFETY: the node was just inserted, and its count passes to the entry.
        Ok(unsafe { Entry::new(node, Arc::clone(self)) })
    }

    /// Adds a value in the slot of `cpu`. The entry has an `Arc` of the list.
    ///
    /// # Errors
    ///
    /// The errors of [`insert_on`](Self::insert_on).
    #[cfg(not(offlock_loom))]
    pub fn insert_arc_on(
        self: &Arc<Self>,
        cpu: CpuId,
        value: T,
    ) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = self.insert_node_on(cpu, value)?;
        // SAFETY: the node was just inserted, and its count passes to the entry.
        Ok(unsafe { Entry::new(node, Arc::clone(self)) })
    }

    /// Adds a value like the function of that name above. loom's `Arc` cannot be a receiver.
    #[cfg(offlock_loom)]
    pub fn insert_arc(this: &Arc<Self>, value: T) -> Result<Entry<Arc<Self>>, InsertError<T>> {
        let node = this.insert_node(this.core().domain().current_slot(), value)?;
        // SAFETY: the node was just inserted, and its count passes to the entry.
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

    /// Adds a value in a spare node, or in a new one if the slot has none.
    #[inline(always)]
    fn insert_pooled(
        &self,
        slot: NodeShard<'_, T>,
        value: T,
    ) -> Result<NodePtr<T>, InsertError<T>> {
        let mut removed = DropList::<T>::new(); // dropped after the lock
        if let Ok(mut locked) = slot.lock(&mut removed) {
            if !self.core().is_closed() && locked.array().has_room() {
                // SAFETY: `locked` is a shard of this list.
                if let Some(node) = unsafe { pool::acquire::<T, _>(&locked) } {
                    // SAFETY: a spare node has one count, which passes to the entry, and no value.
                    unsafe { node.write_value(value) };
                    // SAFETY: there is room; the node is unlinked, a spare node's home is this
                    // slot, and it lives until it is unlinked (node's invariant 2).
                    unsafe { locked.add(node.anchor_ptr()) };
                    drop(locked);
                    // SAFETY: the node was just inserted, and its count passes to the entry.
                    let entry = unsafe { Entry::new(node, self) };
                    drop(removed); // if a drop panics, the entry is dropped
                    return Ok(entry.into_node());
                }
            }
        }
        drop(removed); // if a drop panics, the value is dropped
        self.insert_allocated(slot.slot(), value)
    }

    /// Adds a value in a new node.
    #[inline(never)]
    fn insert_allocated(&self, slot: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        let node = NodePtr::try_new(slot, value)
            .map_err(|value| InsertError { value, reason: AllocError::new().into() })?;
        let mut removed = DropList::<T>::new();
        let inserted = match self.link(slot, node, &mut removed) {
            // SAFETY: the node was just inserted, and its count passes to the entry.
            Ok(()) => Ok(unsafe { Entry::new(node, self) }),
            Err(reason) => Err(Self::unwrap_node(node, reason)),
        };
        drop(removed); // if a drop panics, the entry or the value is dropped
        inserted.map(Entry::into_node)
    }

    #[cold]
    #[inline(never)]
    fn unwrap_node(node: NodePtr<T>, reason: Refused) -> InsertError<T> {
        // SAFETY: the node was never linked, so the caller has its only count.
        match unsafe { node.try_unwrap() } {
            Some(value) => InsertError { value, reason },
            None => unreachable!("a node that was never linked has one count"),
        }
    }

    /// Puts a new node on the list. What had been left to be removed is in `removed`, to be
    /// dropped.
    fn link(
        &self,
        slot: CpuId,
        node: NodePtr<T>,
        removed: &mut DropList<T>,
    ) -> Result<(), Refused> {
        // SAFETY: the shard belongs to this list.
        let slot = unsafe { NodeShard::new(self.core().shard_or_new(slot)?) };
        loop {
            let mut locked = slot.lock(removed)?;
            if self.core().is_closed() {
                return Err(Refused::Closed);
            }
            if locked.array().has_room() {
                // SAFETY: there is room. The node is new, its home is this slot, and it lives until it
                // is unlinked (invariant 2 of `node`).
                unsafe { locked.add(node.anchor_ptr()) };
                return Ok(());
            }
            drop(locked);
            slot.make_room()?;
        }
    }

    /// Removes the entry that `found` refers to, although its [`Entry`] still exists. Returns whether it
    /// was on this list.
    ///
    /// Blocks like [`insert`](Self::insert). If several threads remove the entry, one call returns true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds the slot; the entry stays on the list.
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
        // SAFETY: the reference keeps the node alive, and it was inserted into this list.
        unsafe { self.nodes.unlink(found.node(), self.core().domain().current_slot()) }
    }

    /// Closes the list: later additions are refused. Additions that other threads have begun are complete
    /// when this returns, so a [`drain`](Self::drain) after it leaves the list empty.
    ///
    /// Removals, walks and drains still work. Locks each slot in turn.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove). The list is closed then, but an addition that has begun in a
    /// slot that could not be locked may still succeed.
    pub fn close(&self) -> Result<(), LockError> {
        self.core().close()
    }

    /// Returns whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().is_closed()
    }

    /// Returns the sum of the lengths of the slots, which are read one after the other. Wait-free.
    /// [`lock_all`](Self::lock_all) shows one instant.
    #[must_use]
    pub fn len(&self) -> usize {
        self.core().len()
    }

    /// Returns whether [`len`](Self::len) is 0. It is not while an entry is on the list throughout the
    /// call. Wait-free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.core().len() == 0
    }

    /// Returns the statistics of the list. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Removes what was [deferred](Entry::defer_remove), and drops it; frees the nodes that slots
    /// keep for their next values.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove). The slots before the one that could not be locked are done.
    pub fn flush(&self) -> Result<(), LockError> {
        for slot in self.nodes.shards() {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let locked = slot.lock(&mut removed)?;
            // SAFETY: the shard belongs to this list.
            let spares = unsafe { pool::remove_all::<T, _>(&locked) };
            drop(locked);
            drop(spares); // after the unlock
        }
        Ok(())
    }

    /// Walks the list. No lock is held between the values: see [`Iter`].
    pub fn iter(&self) -> Iter<'_, T> {
        Iter::new(&self.nodes)
    }

    /// Calls `f` with every value, slot by slot, under the slot's lock.
    ///
    /// The cheapest walk: no references are counted. `f` should be short: all who add or remove in
    /// that slot wait, in all lists of the domain. In `f` an entry of the domain that is dropped is
    /// removed later: of this list at the end of the walk, of another by whoever comes to its slot
    /// next. Adding to lists of the domain may give [`LockError::Deadlock`]. An entry of another
    /// domain waits for its lock as anywhere: two threads that do so crosswise wait for ever. A
    /// panic of `f` unlocks the slot, and is the caller's to see.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove). `f` was called for the slots before the one that could not
    /// be locked.
    pub fn for_each(&self, mut f: impl FnMut(&T)) -> Result<(), LockError> {
        for slot in self.nodes.shards() {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let locked = slot.lock(&mut removed)?;
            locked.array().for_each(|anchor| {
                // SAFETY: the anchor is in a shard of this list, so it is that of a node of `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: the node is linked, and `locked` holds its slot during the call.
                f(unsafe { node.value() });
            });
        }
        self.nodes.flush_deferred();
        Ok(())
    }

    /// Locks all slots, in ascending order. The snapshot shows the list at one instant.
    ///
    /// Other threads wait, in all lists of the domain, until the snapshot is dropped. This thread gets
    /// [`LockError::Deadlock`] meanwhile from calls that lock a slot of the domain.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove).
    pub fn lock_all(&self) -> Result<Snapshot<'_, T>, LockError> {
        Snapshot::new(&self.nodes)
    }

    /// Removes every entry and returns the values: see [`Drain`].
    pub fn drain(&self) -> Drain<'_, T> {
        Drain::new(&self.nodes)
    }

    /// Checks the invariants of the list, for tests.
    ///
    /// # Panics
    ///
    /// Panics if an invariant does not hold.
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
