//! A snapshot of an owning list, which shows one instant.

use std::fmt;
use std::iter::FusedIterator;

use offlock_percpu::lglock::{GlobalGuard, LockError};

use crate::array::Array;
use crate::core::LockedShard;

use super::deferred::flush;
use super::node::{DropList, NodePtr};
use super::nodes::Nodes;

/// A list while all its slots are locked, for
/// [`PerCpuList::lock_all`](crate::PerCpuList::lock_all).
///
/// While the snapshot exists, other threads that add or remove wait. If the thread of the snapshot
/// drops entries of the list, they are removed when the snapshot is dropped. A snapshot is `!Send`.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let entries = [sessions.insert(1)?, sessions.insert(2)?];
/// let snapshot = sessions.lock_all()?;
/// assert_eq!((snapshot.len(), snapshot.iter().sum::<i32>()), (2, 3)); // at one instant
/// drop(snapshot); // unlocks the slots
/// # drop(entries);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the slots are unlocked when the snapshot drops"]
pub struct Snapshot<'a, T> {
    nodes: &'a Nodes<T>,
    /// `None` only during the drop.
    guard: Option<GlobalGuard<'a, ()>>,
}

impl<T> Drop for Snapshot<'_, T> {
    fn drop(&mut self) {
        let core = self.nodes.core();
        let mut removed = DropList::<T>::new(); // the entries that this thread dropped meanwhile
        for shard in core.shards() {
            // SAFETY: `guard` holds the locks of all slots, and this is the only use of the shard.
            let mut locked = unsafe { LockedShard::new(shard.get(), ()) };
            // SAFETY: the shard belongs to this core, whose anchors are those of nodes of `T`.
            unsafe { flush(core, &mut locked, &mut removed) };
        }
        self.guard = None; // before the values are dropped
    }
}

impl<'a, T> Snapshot<'a, T> {
    pub(super) fn new(nodes: &'a Nodes<T>) -> Result<Self, LockError> {
        Ok(Self { nodes, guard: Some(nodes.core().lock_all()?) })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        // SAFETY: `self` holds the locks of all slots, and nothing changes an array through it.
        self.nodes.core().shards().map(|shard| unsafe { &*shard.array_ptr() })
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arrays().map(|array| array.entries() as usize).sum()
    }

    /// Returns whether the list has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the values, slot by slot. Within a slot they are in no particular order.
    pub fn iter(&self) -> SnapshotIter<'_, T> {
        SnapshotIter { snapshot: self, slot: 0, index: 0, left: self.len() }
    }

    /// Calls `f` with every value. Faster than [`iter`](Self::iter).
    pub fn for_each(&self, mut f: impl FnMut(&T)) {
        for array in self.arrays() {
            array.for_each(|anchor| {
                // SAFETY: the anchor is in a shard of a list of `T`, so it is that of a node of
                // `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: the node is linked, and `self` holds the lock of its slot.
                f(unsafe { node.value() });
            });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Snapshot<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'s, T> IntoIterator for &'s Snapshot<'_, T> {
    type Item = &'s T;
    type IntoIter = SnapshotIter<'s, T>;

    fn into_iter(self) -> SnapshotIter<'s, T> {
        self.iter()
    }
}

/// An iterator over the values of a [`Snapshot`].
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let entries = [sessions.insert("alice")?, sessions.insert("bob")?];
/// let snapshot = sessions.lock_all()?;
/// let mut names: Vec<&str> = snapshot.iter().copied().collect();
/// names.sort_unstable();
/// assert_eq!(names, ["alice", "bob"]);
/// # drop(snapshot);
/// # drop(entries);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SnapshotIter<'s, T> {
    snapshot: &'s Snapshot<'s, T>,
    slot: u32,
    index: u32,
    left: usize,
}

impl<'s, T> Iterator for SnapshotIter<'s, T> {
    type Item = &'s T;

    fn next(&mut self) -> Option<&'s T> {
        while self.left != 0 {
            let slot = offlock_percpu::CpuId::new(self.slot);
            let shard = self.snapshot.nodes.core().shard(slot);
            // SAFETY: the snapshot holds the locks of all slots as long as `'s`, and nothing
            // changes an array through it.
            let array = shard.map(|shard| unsafe { &*shard.array_ptr() });
            match array.filter(|array| self.index < array.len()) {
                Some(array) => {
                    self.index += 1;
                    if let Some(anchor) = array.get(self.index - 1) {
                        self.left -= 1;
                        // SAFETY: the anchor is in a shard of a list of `T`, so it is that of a
                        // node of `T`.
                        let node = unsafe { NodePtr::from_anchor(anchor) };
                        // SAFETY: the node is linked, and the snapshot holds the lock of its slot.
                        return Some(unsafe { node.value() });
                    }
                }
                None => (self.slot, self.index) = (self.slot + 1, 0),
            }
        }
        None
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T> ExactSizeIterator for SnapshotIter<'_, T> {}
impl<T> FusedIterator for SnapshotIter<'_, T> {}

impl<T> fmt::Debug for SnapshotIter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotIter").field("left", &self.left).finish_non_exhaustive()
    }
}
