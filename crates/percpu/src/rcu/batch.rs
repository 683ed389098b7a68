//! Batches of objects that are retired together.

use std::ptr::NonNull;

use super::bag::{RetireHead, Segment};
use super::domain::domain;
use super::reclaim::retire_list;

/// A list of objects that are retired together, under one lock.
///
/// Dropping the batch retires its objects.
///
/// For the other crates of the workspace; semantic versioning does not cover it.
#[doc(hidden)]
#[derive(Debug)]
pub struct Batch {
    list: Segment,
}

// SAFETY: the objects in the list may go to any thread, as the caller of `push` promises.
unsafe impl Send for Batch {}
// SAFETY: a `&Batch` gives access to the number of objects only.
unsafe impl Sync for Batch {}

impl Batch {
    /// Returns an empty batch. Does not allocate.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Segment::EMPTY }
    }

    /// Adds an object. No object of the batch is freed before the batch is retired. Wait-free.
    ///
    /// # Safety
    ///
    /// - `head` is from [`RetireHead::new`], its pointer is valid for the whole object that `free`
    ///   frees, and it is retired once.
    /// - No reader that begins after the batch is retired can find the object.
    /// - The object may be freed on any thread, at any time after the batch is retired.
    pub unsafe fn push(&mut self, head: NonNull<RetireHead>, bytes: usize) {
        self.list.push(head, bytes);
    }

    /// Moves all objects of `other` into this batch. Wait-free.
    pub fn append(&mut self, other: &mut Self) {
        self.list.splice(&mut other.list);
    }

    /// Returns the number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.objects
    }

    /// Returns whether the batch has no objects.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Retires all objects of the batch: each is freed once no reader can hold a reference to it.
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
