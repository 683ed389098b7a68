//! The public type of the owning list.

use std::fmt;

use offlock_percpu::lglock::LockError;
use offlock_percpu::{AllocError, CpuId};
use offlock_sync::Arc;

use crate::core::{Core, ShardRef};
use crate::error::{InsertError, Refused};
use crate::stats::Stats;

use super::drain::Drain;
use super::entry::{Entry, Holder, sealed};
use super::node::{NodePtr, Ref};
use super::nodes::Nodes;
use super::pool;
use super::snapshot::Snapshot;
use super::walk::Iter;

/// A registry of values, with one list per CPU. A thread adds on its CPU, and removes from any.
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
/// An add or a removal blocks while another thread adds, removes or walks in the same slot. Threads
/// on different CPUs share nothing. A value has a node, of 32 bytes beside the value, which is
/// allocated with no lock held. Each slot pools up to 16 nodes for its next values. Values are
/// dropped with no lock held.
///
/// The drop of the list drops the values of forgotten entries. There are no other entries, because
/// an entry borrows or holds the list.
///
/// The list is `Send` and `Sync` if `T` is both, because walks share values, and any thread may
/// drop the last reference to one. It is invariant in `T`:
///
/// ```compile_fail
/// fn shorten<'a>(list: percpu_list::PerCpuList<&'static str>) -> percpu_list::PerCpuList<&'a str> {
///     list
/// }
/// ```
pub struct PerCpuList<T> {
    nodes: Nodes<T>,
}

/// The [`Entry`] of [`PerCpuList::insert_arc`], which holds an
/// `Arc` of its list and can be stored anywhere.
///
/// ```
/// use std::sync::Arc;
///
/// use percpu_list::{ArcEntry, PerCpuList};
///
/// struct Connection {
///     registered: ArcEntry<u32>, // removed from the list with the connection
/// }
///
/// let connections = Arc::new(PerCpuList::new());
/// let connection = Connection { registered: connections.insert_arc(7)? };
/// assert_eq!((*connection.registered, connections.len()), (7, 1));
/// drop(connection);
/// assert!(connections.is_empty());
/// # Ok::<(), percpu_list::InsertError<u32>>(())
/// ```
pub type ArcEntry<T> = Entry<Arc<PerCpuList<T>>>;

impl<T> PerCpuList<T> {
    /// Creates an empty list with a slot for each CPU.
    ///
    /// Allocates 136 bytes for each slot. The first add in a slot allocates 256 bytes more, and each
    /// entry takes 8 bytes in the array of its slot.
    #[must_use]
    pub fn new() -> Self {
        Self { nodes: Nodes::new(true) }
    }

    /// Creates a list that does not count hits, to measure what counting costs.
    #[doc(hidden)]
    #[must_use]
    pub fn new_uncounted() -> Self {
        Self { nodes: Nodes::new(false) }
    }

    #[inline(always)]
    fn core(&self) -> &Core {
        self.nodes.core()
    }

    /// Adds a value in the slot of the current CPU.
    ///
    /// Allocates if the pool of the slot has no node, if the array must grow, and for every value
    /// of more than 128 bytes. Blocks while another thread holds the slot.
    ///
    /// # Errors
    ///
    /// [`InsertError`] contains the value and the reason: the list is closed, memory is out, or
    /// this thread has a [`Snapshot`].
    #[inline(always)] // otherwise the entry is stored and reloaded in parts of different sizes
    pub fn insert(&self, value: T) -> Result<Entry<&Self>, InsertError<T>> {
        let node = self.insert_node(self.core().slots().current(), value)?;
        // SAFETY: `insert_node` inserted the node into this list, and returned the entry's count.
        Ok(unsafe { Entry::new(node, self) })
    }

    /// Adds a value like [`insert`](Self::insert), with an entry that holds an `Arc` of the list
    /// and can be stored anywhere.
    ///
    /// All CPUs change the count of the `Arc`, on one cache line. If entries are added and removed
    /// very often, use [`insert`](Self::insert), which borrows the list.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    #[cfg(not(offlock_loom))]
    pub fn insert_arc(self: &Arc<Self>, value: T) -> Result<ArcEntry<T>, InsertError<T>> {
        let node = self.insert_node(self.core().slots().current(), value)?;
        // SAFETY: the node was inserted into this list, and comes with the entry's count.
        Ok(unsafe { Entry::new(node, Arc::clone(self)) })
    }

    /// Adds a value, with an entry that holds an `Arc` of the list. For loom, whose `Arc` cannot be
    /// a receiver.
    #[cfg(offlock_loom)]
    pub fn insert_arc(this: &Arc<Self>, value: T) -> Result<ArcEntry<T>, InsertError<T>> {
        let node = this.insert_node(this.core().slots().current(), value)?;
        // SAFETY: the node was inserted into this list, and comes with the entry's count.
        Ok(unsafe { Entry::new(node, Arc::clone(this)) })
    }

    #[inline(always)]
    fn insert_node(&self, slot: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        match self.core().shard(slot) {
            Some(here) if pool::may_have_node::<T>(&here) => self.insert_pooled(here, value),
            _ => self.insert_allocated(slot, value),
        }
    }

    /// Adds a value in a pooled node. Falls back to a new node if the pool is empty, the array has
    /// no room, or the add is refused.
    #[inline(always)]
    fn insert_pooled(&self, slot: ShardRef<'_>, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        if let Ok(mut locked) = slot.lock() {
            if !self.core().is_closed() && locked.array().has_room() {
                // SAFETY: the shard belongs to this list of `T`.
                if let Some(node) = unsafe { pool::acquire::<T, _>(&locked) } {
                    // SAFETY: a pooled node has no value, and its only count is the entry's.
                    unsafe { node.write_value(value) };
                    // SAFETY: the array has room. A pooled node is unlinked, its home is this slot,
                    // and it lives until it is unlinked (invariant 2 of the node).
                    unsafe { locked.add(node.anchor_ptr()) };
                    return Ok(node);
                }
            }
        }
        self.insert_allocated(slot.slot(), value)
    }

    /// Adds a value in a newly allocated node.
    #[inline(never)]
    fn insert_allocated(&self, slot: CpuId, value: T) -> Result<NodePtr<T>, InsertError<T>> {
        let node = NodePtr::try_new(slot, value)
            .map_err(|value| InsertError { value, reason: AllocError::new().into() })?;
        match self.link(slot, node) {
            Ok(()) => Ok(node),
            Err(reason) => Err(Self::unwrap_node(node, reason)),
        }
    }

    #[cold]
    #[inline(never)]
    fn unwrap_node(node: NodePtr<T>, reason: Refused) -> InsertError<T> {
        // SAFETY: the node has its only count here, and was never linked.
        match unsafe { node.try_unwrap() } {
            Some(value) => InsertError { value, reason },
            None => unreachable!("a node that was never linked has one count"),
        }
    }

    /// Links a new node.
    fn link(&self, slot: CpuId, node: NodePtr<T>) -> Result<(), Refused> {
        let slot = self.core().shard_or_new(slot)?;
        loop {
            let mut locked = slot.lock()?;
            if self.core().is_closed() {
                return Err(Refused::Closed);
            }
            if locked.array().has_room() {
                // SAFETY: the array has room. The node is new, its home is this slot, and it lives
                // until it is unlinked (invariant 2 of the node).
                unsafe { locked.add(node.anchor_ptr()) };
                return Ok(());
            }
            drop(locked);
            slot.make_room()?;
        }
    }

    /// Removes the value of `found` from this list, even if its [`Entry`] still exists. Returns
    /// whether it was on this list.
    ///
    /// Blocks while another thread holds the slot. If several threads remove the value, one call
    /// returns true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread has a snapshot. The value stays on the list.
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
        // SAFETY: `found` has a count of the node, which was inserted into this list.
        unsafe { self.nodes.unlink(found.node(), self.core().slots().current()) }
    }

    /// Refuses adds from now on. Adds that have begun are complete when it returns, so a
    /// [`drain`](Self::drain) that follows leaves the list empty.
    ///
    /// Removals and walks work as before. Locks each slot in turn.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread has a snapshot. The list is closed, but an add that has
    /// begun may still succeed.
    pub fn close(&self) -> Result<(), LockError> {
        self.core().close()
    }

    /// Returns whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().is_closed()
    }

    /// Returns the number of entries, summed slot by slot while other threads may add and remove.
    /// Wait-free. The number at one instant is that of [`lock_all`](Self::lock_all).
    #[must_use]
    pub fn len(&self) -> usize {
        self.core().len()
    }

    /// Returns whether [`len`](Self::len) is 0. Never true while one entry stays on the list.
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

    /// Walks the list, with no lock held between entries: see [`Iter`].
    pub fn iter(&self) -> Iter<'_, T> {
        Iter::new(&self.nodes)
    }

    /// Locks all slots, in ascending order. The snapshot shows the list at one instant.
    ///
    /// Until the snapshot is dropped, other threads that add, remove or walk wait, and such calls of
    /// this thread return [`LockError::Deadlock`].
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread has a snapshot of the list.
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
