//! The list at one instant.

use std::fmt;
use std::iter::FusedIterator;

use percpu::lglock::{GlobalGuard, LockError};
use percpu::sync::check;

use crate::array::Array;
use crate::core::LockedShard;

use super::deferred::flush;
use super::node::{DropList, NodePtr};
use super::nodes::Nodes;

/// All slots of a list's domain, locked: from [`PerCpuList::lock_all`](crate::PerCpuList::lock_all).
///
/// While it lives nobody adds or removes, in any list of the domain; entries of the domain that its
/// own thread drops meanwhile are removed when it ends, or later if they are of other lists.
/// It stays with its thread.
#[must_use = "the slots are unlocked when the snapshot drops"]
pub struct Snapshot<'a, T> {
    nodes: &'a Nodes<T>,
    /// `Some` until the drop.
    guard: Option<GlobalGuard<'a, ()>>,
    /// What had been left to be removed: dropped after the guard.
    _removed: DropList<T>,
}

impl<T> Drop for Snapshot<'_, T> {
    fn drop(&mut self) {
        self.guard = None;
        self.nodes.flush_deferred(); // what this thread dropped meanwhile
    }
}

impl<'a, T> Snapshot<'a, T> {
    pub(super) fn new(nodes: &'a Nodes<T>) -> Result<Self, LockError> {
        let core = nodes.core();
        let mut removed = DropList::<T>::new();
        let guard = core.lock_all()?;
        // Until all are found empty one after the other: else what is deferred in a slot behind would
        // be seen, and what was deferred before it in a slot passed already would not. It ends: nobody
        // adds meanwhile.
        let is_flushed = || core.shards().all(|shard| !shard.has_deferred());
        while !check!("snapshot: no deferred removal is left", is_flushed()) {
            for shard in core.shards() {
                // SAFETY: we hold all slots' locks, and use this shard here only.
                let mut locked = unsafe { LockedShard::new(shard.get(), ()) };
                // SAFETY: of this list.
                unsafe { flush(core, &mut locked, &mut removed) };
            }
        }
        Ok(Self { nodes, guard: Some(guard), _removed: removed })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        // SAFETY: we hold all slots' locks as long as `self`, and change nothing.
        self.nodes.core().shards().map(|shard| unsafe { &*shard.array_ptr() })
    }

    /// How many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arrays().map(|array| array.entries() as usize).sum()
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, slot by slot; within one in no order.
    pub fn iter(&self) -> SnapshotIter<'_, T> {
        SnapshotIter { snapshot: self, slot: 0, index: 0, left: self.len() }
    }

    /// Calls `f` with every value: faster than [`iter`](Self::iter).
    pub fn for_each(&self, mut f: impl FnMut(&T)) {
        for array in self.arrays() {
            array.for_each(|anchor| {
                // SAFETY: an entry of this list is a node of its `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: linked, and we hold the slot's lock.
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

/// The values of a [`Snapshot`].
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
            let slot = percpu::CpuId::new(self.slot);
            let shard = self.snapshot.nodes.core().shard(slot);
            // SAFETY: the snapshot holds all slots' locks as long as `'s`, and changes nothing.
            let array = shard.map(|shard| unsafe { &*shard.array_ptr() });
            match array.filter(|array| self.index < array.len()) {
                Some(array) => {
                    self.index += 1;
                    if let Some(anchor) = array.get(self.index - 1) {
                        self.left -= 1;
                        // SAFETY: an entry of this list is a node of its `T`.
                        let node = unsafe { NodePtr::from_anchor(anchor) };
                        // SAFETY: linked, and stays so as long as the snapshot.
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
