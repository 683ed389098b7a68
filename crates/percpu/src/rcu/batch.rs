//! Objects retired together.

use std::ptr::NonNull;

use super::bag::{RetireHead, Segment};
use super::domain::domain;
use super::reclaim::retire_list;

/// Objects to be retired together: one lock for all of them.
///
/// Dropping it retires them.
#[derive(Debug)]
pub struct Batch {
    list: Segment,
}

// SAFETY: the heads in it may go to any thread, as `push` asks its caller.
unsafe impl Send for Batch {}
// SAFETY: `&Batch` gives numbers.
unsafe impl Sync for Batch {}

impl Batch {
    /// A batch of nothing. Does not allocate.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Segment::EMPTY }
    }

    /// Adds an object. Nothing of the batch is freed before the batch is retired. Wait-free.
    ///
    /// # Safety
    ///
    /// As for [`retire_raw`](super::retire_raw); no reader that begins after the batch is retired
    /// can find the object.
    pub unsafe fn push(&mut self, head: NonNull<RetireHead>, bytes: usize) {
        self.list.push(head, bytes);
    }

    /// Adds all of another batch, and leaves that empty. Wait-free.
    pub fn append(&mut self, other: &mut Self) {
        self.list.splice(&mut other.list);
    }

    /// How many objects there are in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.objects
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Retires them all.
    pub fn retire(self) {
        drop(self);
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.list.is_empty() {
            retire_list(domain(), &mut self.list);
        }
    }
}
