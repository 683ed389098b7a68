//! Taking everything off a list.

use std::fmt;
use std::iter::FusedIterator;

use percpu::CpuId;
use percpu::lglock::LockError;

use crate::chunk::Chunk;

use super::node::{DropList, NodePtr, Ref};
use super::node_shard::NodeShard;
use super::nodes::Nodes;

/// Takes entries off a [`PerCpuList`](crate::PerCpuList), and gives them out: from [`PerCpuList::drain`](crate::PerCpuList::drain).
///
/// Every entry that is on the list throughout is taken, by this drain or another; of those that are
/// added meanwhile some are. To leave nothing, [`close`](crate::PerCpuList::close) the list before. The
/// entries' owners keep their [`Entry`](super::Entry), which is no longer linked; the value is
/// dropped with the last of that and the [`Ref`]s.
///
/// Locks as a walk does, and gives the same errors. A drain that is dropped leaves the rest on the
/// list; what it took but did not give out is off.
#[must_use = "it does nothing until it is iterated over"]
pub struct Drain<'a, T> {
    nodes: &'a Nodes<T>,
    slot: u32,
    /// How many of the slot's are left to take: those that were there first, so that it ends.
    left: Option<u32>,
    chunk: Chunk<Ref<T>>,
}

impl<'a, T> Drain<'a, T> {
    pub(super) fn new(nodes: &'a Nodes<T>) -> Self {
        Self { nodes, slot: 0, left: None, chunk: Chunk::new() }
    }
}

impl<T> Iterator for Drain<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (nodes, slot, left) = (self.nodes, &mut self.slot, &mut self.left);
        let slots = nodes.core().slot_count();
        self.chunk.next(|chunk| {
            while chunk.is_empty() && *slot < slots {
                if let Some(here) = nodes.slot(CpuId::new(*slot)) {
                    *left = Some(take(here, *left, chunk).inspect_err(|_| *slot = slots)?);
                    here.shrink();
                    if *left != Some(0) {
                        continue;
                    }
                }
                (*slot, *left) = (*slot + 1, None);
            }
            Ok(())
        })
    }
}

/// Takes a chunk of the entries of a slot, the last first; says how many are left to take, of those
/// that were left before, or are there.
fn take<T>(
    slot: NodeShard<'_, T>,
    left: Option<u32>,
    chunk: &mut Chunk<Ref<T>>,
) -> Result<u32, LockError> {
    let domain = slot.core().domain();
    let from = domain.current_slot();
    let mut removed = DropList::<T>::new(); // dropped after the lock
    let mut locked = slot.lock(&mut removed)?;
    let mut left = left.unwrap_or(u32::MAX).min(locked.array().entries());
    while left != 0 && !chunk.is_full() {
        let Some(anchor) = locked.array().last() else { unreachable!("so many are left") };
        // SAFETY: an entry of this list is a node of its `T`.
        let node = unsafe { NodePtr::from_anchor(anchor) };
        // SAFETY: linked, under its slot's lock.
        chunk.push(unsafe { node.acquire() });
        // SAFETY: we have just taken a count.
        let anchor = unsafe { node.anchor() };
        // SAFETY: found in this shard's array.
        unsafe { locked.remove(anchor, from, domain) };
        left -= 1;
    }
    Ok(left)
}

impl<T> FusedIterator for Drain<'_, T> {}

impl<T> fmt::Debug for Drain<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("slot", &self.slot).finish_non_exhaustive()
    }
}
