//! A queue of the lowest vacant indexes, beside the lock of a table.

/// The capacity of a queue: what fits beside the lock's word on its two cache lines.
pub(super) const QUEUE: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 20 };

/// The lowest vacant indexes.
#[derive(Debug)]
#[repr(C)]
pub(super) struct VacantQueue {
    left: u32,
    /// Descending: the lowest is at `left - 1`.
    indexes: [u32; QUEUE],
}

impl VacantQueue {
    pub(super) fn new() -> Self {
        Self { left: 0, indexes: [0; QUEUE] }
    }

    pub(super) fn len(&self) -> usize {
        self.left as usize
    }

    #[inline(always)]
    pub(super) fn lowest(&self) -> Option<u32> {
        self.indexes.get(self.len().checked_sub(1)?).copied()
    }

    /// Returns whether an index in the queue is at least `first`.
    pub(super) fn reaches(&self, first: u32) -> bool {
        self.left != 0 && self.indexes[0] >= first
    }

    /// Returns the indexes, highest first.
    pub(super) fn indexes(&self) -> &[u32] {
        &self.indexes[..self.len()]
    }

    /// Takes the lowest index, unless it is above `last`.
    #[inline(always)]
    pub(super) fn pop(&mut self, last: u32) -> Option<u32> {
        let index = self.lowest().filter(|index| *index <= last)?;
        self.left -= 1;
        Some(index)
    }

    /// Fills an empty queue with ascending indexes.
    pub(super) fn fill(&mut self, ascending: &[u32]) {
        for (at, index) in ascending.iter().rev().enumerate() {
            self.indexes[at] = *index;
        }
        self.left = ascending.len() as u32;
    }
}
