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

    /// Takes the lowest index.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<u32> {
        let left = self.left.checked_sub(1)?;
        self.left = left;
        self.indexes.get(left as usize).copied()
    }

    /// Fills an empty queue with ascending indexes.
    pub(super) fn fill(&mut self, ascending: &[u32]) {
        for (at, index) in ascending.iter().rev().enumerate() {
            self.indexes[at] = *index;
        }
        self.left = ascending.len() as u32;
    }
}
