//! A walk that holds no lock while the caller's code runs.

use std::fmt;
use std::iter::FusedIterator;

use percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::core::LockedShard;
use crate::cursor::Cursor;

use super::deferred::flush;
use super::node::{DropList, NodePtr, Ref};
use super::nodes::Nodes;

/// Walks a [`PerCpuList`](crate::PerCpuList): from [`PerCpuList::iter`](crate::PerCpuList::iter).
///
/// A moving target. An entry that is on the list from before the walk until its end is seen exactly
/// once; one that comes or goes meanwhile once or not at all (an intrusive item that is added again
/// counts as another). What is seen stays alive as long as
/// its [`Ref`], but may have been removed.
///
/// The lock of a slot is taken for 32 entries at a time, and let go before they are given out; each
/// step that takes one blocks while another thread has it. A walk may be left and taken up again at
/// any time. While it is inside a slot, removals there leave holes, so do not keep one for ever.
///
/// Gives [`LockError::Deadlock`] if this thread holds a slot, and then ends.
#[must_use = "it does nothing until it is iterated over"]
pub struct Iter<'a, T> {
    nodes: &'a Nodes<T>,
    cursor: Cursor<'a>,
    chunk: Chunk<Ref<T>>,
}

impl<'a, T> Iter<'a, T> {
    pub(super) fn new(nodes: &'a Nodes<T>) -> Self {
        Self { nodes, cursor: Cursor::new(nodes.core()), chunk: Chunk::new() }
    }
}

impl<T> Iterator for Iter<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (core, cursor) = (self.nodes.core(), &mut self.cursor);
        self.chunk.next(|chunk| {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let prepare = |locked: &mut LockedShard<'_>| {
                // SAFETY: the cursor is of this list.
                unsafe { flush(core, locked, &mut removed) };
            };
            cursor.visit_chunk(prepare, |anchor| {
                // SAFETY: an entry of this list is a node of its `T`.
                let node = unsafe { NodePtr::from_anchor(anchor) };
                // SAFETY: linked, under its slot's lock.
                chunk.push(unsafe { node.acquire() });
                true
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
