//! A walk that holds no lock while the caller's code runs.

use std::fmt;

use percpu::lglock::LockError;

use crate::core::Cursor;

use super::PerCpuList;
use super::deferred::settle;
use super::node::{Chain, NodePtr, Ref};

/// Entries taken under one lock. A guess: enough to make the lock's price small, and few enough to
/// hold others up for less than a microsecond. A model has few entries.
const CHUNK: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 32 };

/// Walks a [`PerCpuList`]: from [`PerCpuList::iter`].
///
/// A moving target. An entry that is on the list from before the walk until its end is seen exactly
/// once; one that comes or goes meanwhile once or not at all. What is seen stays alive as long as
/// its [`Ref`], but may have been removed.
///
/// The lock of a slot is taken for 32 entries at a time, and let go before they are given out; each
/// step that takes one blocks while another thread has it. A walk may be left and taken up again at
/// any time. While it is inside a slot, removals there leave holes, so do not keep one for ever.
///
/// Gives [`LockError::Deadlock`] if this thread holds a slot, and [`LockError::Forked`]; the next
/// call tries again. So leave the loop at an error (`?`): who only skips it comes back to it.
pub struct Iter<'a, T> {
    list: &'a PerCpuList<T>,
    cursor: Cursor<'a>,
    chunk: [Option<Ref<T>>; CHUNK],
    next: usize,
    len: usize,
}

impl<'a, T> Iter<'a, T> {
    pub(super) fn new(list: &'a PerCpuList<T>) -> Self {
        let cursor = Cursor::new(list.core());
        Self { list, cursor, chunk: std::array::from_fn(|_| None), next: 0, len: 0 }
    }

    fn fill(&mut self) -> Result<(), LockError> {
        (self.next, self.len) = (0, 0);
        let mut removed = Chain::<T>::new(); // dropped after the lock
        let (chunk, len) = (&mut self.chunk, &mut self.len);
        self.cursor.chunk(
            CHUNK,
            |locked| settle(self.list.core(), locked, &mut removed),
            |anchor| {
                // SAFETY: an entry of this list is a node of its `T`.
                let node = unsafe { NodePtr::of(anchor) };
                // SAFETY: linked, under its slot's lock.
                chunk[*len] = Some(unsafe { node.acquire() });
                *len += 1;
                true
            },
        )
    }
}

impl<T> Iterator for Iter<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.len {
            if let Err(error) = self.fill() {
                if self.len == 0 {
                    return Some(Err(error));
                }
            }
        }
        if self.next == self.len {
            return None;
        }
        self.next += 1;
        self.chunk[self.next - 1].take().map(Ok)
    }
}

impl<T> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
