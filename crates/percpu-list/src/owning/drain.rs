//! The drain, which removes every entry of a list.

use std::fmt;
use std::iter::FusedIterator;

use offlock_percpu::CpuId;
use offlock_percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::core::ShardRef;

use super::node::{NodePtr, Ref};
use super::nodes::Nodes;

/// An iterator that removes the entries of a [`PerCpuList`](crate::PerCpuList) and returns them,
/// for [`PerCpuList::drain`](crate::PerCpuList::drain).
///
/// It removes every entry that is on the list during the whole drain, unless another call removes
/// it first. An entry that is added during the drain may stay; to leave the list empty,
/// [`close`](crate::PerCpuList::close) it before. The owner of a removed entry keeps the
/// [`Entry`](super::Entry), which is no longer linked. The value is dropped with the last of the
/// `Entry` and the [`Ref`]s.
///
/// A drain locks like a walk, and returns the same errors. If it is dropped early, the remaining
/// entries stay on the list, except those that it has removed and not yet returned.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// sessions.close()?; // no entry is added during the drain
/// for session in sessions.drain() {
///     assert_eq!(*session?, "alice");
/// }
/// assert!(sessions.is_empty() && !alice.is_linked());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until it is iterated over"]
pub struct Drain<'a, T> {
    nodes: &'a Nodes<T>,
    slot: u32,
    /// How many entries of the slot are left to remove. At first it is their number, so the drain
    /// ends while other threads add.
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
                if let Some(here) = nodes.core().shard(CpuId::new(*slot)) {
                    // SAFETY: the shard belongs to this list of `T`.
                    let removed = unsafe { remove_chunk(here, *left, chunk) };
                    *left = Some(removed.inspect_err(|_| *slot = slots)?);
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

/// Removes a chunk of the entries of a slot, the last entry first. Returns how many are left to
/// remove. `left` is how many were left before, or `None` for the first chunk of the slot.
///
/// # Safety
///
/// The shard belongs to a list of `T`.
unsafe fn remove_chunk<T>(
    slot: ShardRef<'_>,
    left: Option<u32>,
    chunk: &mut Chunk<Ref<T>>,
) -> Result<u32, LockError> {
    let slots = slot.core().slots();
    let from = slots.current();
    let mut locked = slot.lock()?;
    let mut left = left.unwrap_or(u32::MAX).min(locked.array().entries());
    while left != 0 && !chunk.is_full() {
        let Some(anchor) = locked.array().last() else { unreachable!("entries are left") };
        // SAFETY: by the contract of this function the anchor is that of a node of `T`.
        let node = unsafe { NodePtr::from_anchor(anchor) };
        // SAFETY: the node is linked, and `locked` holds the lock of its slot.
        chunk.push(unsafe { node.acquire() });
        // SAFETY: the reference in `chunk` keeps the node alive.
        let anchor = unsafe { node.anchor() };
        // SAFETY: the anchor was found in the array of this shard.
        unsafe { locked.remove(anchor, from, slots) };
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
