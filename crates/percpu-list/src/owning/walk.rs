//! The walk of an owning list that holds no lock between entries.

use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;

use offlock_percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::cursor::Cursor;

use super::node::{NodePtr, Ref};
use super::nodes::Nodes;

/// A walk of a [`PerCpuList`](crate::PerCpuList) that holds no lock while the caller's code runs,
/// for [`PerCpuList::iter`](crate::PerCpuList::iter).
///
/// Other threads may add and remove during the walk. It sees an entry that is on the list during
/// the whole walk exactly once, and an entry that is added or removed during the walk once or not
/// at all. A [`Ref`] keeps its value alive, but the value may have been removed from the list.
///
/// The walk locks a slot for 32 entries at a time, and unlocks it before it returns them. A step
/// that locks blocks while another thread holds the slot. A walk may stop and continue at any time.
/// While it is inside a slot, removals there leave holes, so do not keep a walk for ever.
///
/// If this thread has a snapshot, the walk returns [`LockError::Deadlock`] and then ends.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// for session in &sessions {
///     let session = session?; // a `Ref`; no lock is held here
///     assert_eq!((*session, session.slot()), ("alice", alice.slot()));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until it is iterated over"]
pub struct Iter<'a, T> {
    _nodes: PhantomData<&'a Nodes<T>>,
    cursor: Cursor<'a>,
    chunk: Chunk<Ref<T>>,
}

impl<'a, T> Iter<'a, T> {
    pub(super) fn new(nodes: &'a Nodes<T>) -> Self {
        Self { _nodes: PhantomData, cursor: Cursor::new(nodes.core()), chunk: Chunk::new() }
    }
}

impl<T> Iterator for Iter<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        let cursor = &mut self.cursor;
        self.chunk.next(|chunk| {
            cursor.visit_chunk(|anchor| {
                // SAFETY: the cursor locks shards of this core, whose anchors are those of nodes of
                // `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: the node is linked, and the cursor holds the lock of its slot.
                chunk.push(unsafe { node.acquire() });
            })
        })
    }
}

impl<T> FusedIterator for Iter<'_, T> {}

impl<T> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
