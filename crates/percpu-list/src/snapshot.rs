//! A list at one instant.

use std::fmt;
use std::iter::FusedIterator;

use offlock_percpu::cells::Block;
use offlock_sync::std_lock::MutexGuard;

use crate::cells::{Cells, Key, next, occupied, pop};
use crate::error::Deadlock;

/// A list that does not change, for [`PerCpuList::lock_all`](crate::PerCpuList::lock_all).
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
/// drop(snapshot); // additions and removals go on
/// # drop(entries);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "additions and removals go on when the snapshot drops"]
pub struct Snapshot<'a, T> {
    cells: &'a Cells<T>,
    /// `None` only during the drop.
    guard: Option<MutexGuard<'a, ()>>,
}

impl<T> Drop for Snapshot<'_, T> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.cells.end_snapshot(guard);
        }
    }
}

impl<'a, T> Snapshot<'a, T> {
    pub(crate) fn new(cells: &'a Cells<T>) -> Result<Self, Deadlock> {
        Ok(Self { cells, guard: Some(cells.freeze()?) })
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.blocks().map(|block| occupied(block).count_ones() as usize).sum()
    }

    /// Returns whether the list has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the values, slot by slot. Within a slot they are in no particular order.
    pub fn iter(&self) -> SnapshotIter<'_, T> {
        let left = self.len();
        SnapshotIter { cells: self.cells, shard: 0, block: None, entries: 0, left }
    }

    /// Calls `f` with every value. Faster than [`iter`](Self::iter).
    pub fn for_each(&self, mut f: impl FnMut(&T)) {
        for block in self.cells.blocks() {
            let mut cells = occupied(block);
            while let Some(index) = pop(&mut cells) {
                // SAFETY: the entry stays during the snapshot.
                f(unsafe { Cells::value(Key::new(block, index)) });
            }
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
    cells: &'s Cells<T>,
    shard: usize,
    block: Option<&'s Block>,
    /// The entries of the block that are left.
    entries: u64,
    left: usize,
}

impl<'s, T> SnapshotIter<'s, T> {
    /// Goes to the next block. One is left, because an entry is.
    fn next_block(&mut self) {
        let after = match self.block {
            Some(block) => next(block),
            None => self.cells.first(self.shard),
        };
        // SAFETY: blocks live as long as the snapshot.
        self.block = unsafe { after.as_ref() };
        match self.block {
            Some(block) => self.entries = occupied(block),
            None => self.shard += 1,
        }
    }
}

impl<'s, T> Iterator for SnapshotIter<'s, T> {
    type Item = &'s T;

    fn next(&mut self) -> Option<&'s T> {
        loop {
            if let (Some(block), Some(index)) = (self.block, pop(&mut self.entries)) {
                self.left -= 1;
                // SAFETY: the entry stays during the snapshot, which lives for `'s`.
                return Some(unsafe { Cells::value(Key::new(block, index)) });
            }
            if self.left == 0 {
                return None;
            }
            self.next_block();
        }
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
