//! The unlinked node.

use std::error::Error;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use super::batch::Batch;
use super::error::SynchronizeError;
use super::grace_period::synchronize;
use super::owned::{Node, NodePtr, Owned, head_of};
use super::reclaim::retire_raw;
use crate::sync::quarantine::Watched;

/// A `T` that readers cannot find any more, but may still be reading.
///
/// Dropping it is [`retire`](Unlinked::retire).
#[must_use = "dropping it retires the value; say so with `retire`"]
pub struct Unlinked<T: Send + Sync + 'static> {
    node: NodePtr<T>,
    _owns: PhantomData<T>,
}

// SAFETY: gives `&T` to its holder and, later, the `T` to whoever frees it: `T` is both.
unsafe impl<T: Send + Sync + 'static> Send for Unlinked<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync + 'static> Sync for Unlinked<T> {}
// As `Arc<T>`: readers may have `&T`, too.
impl<T: Send + Sync + RefUnwindSafe + 'static> UnwindSafe for Unlinked<T> {}
impl<T: Send + Sync + RefUnwindSafe + 'static> RefUnwindSafe for Unlinked<T> {}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for Unlinked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unlinked").field(&**self).finish()
    }
}

impl<T: Send + Sync + 'static> Unlinked<T> {
    /// # Safety
    ///
    /// `node` was in an [`Atomic`], and the caller alone took it out.
    #[inline]
    pub(super) unsafe fn new(node: *mut Watched<Node<T>>) -> Self {
        // SAFETY: the pointer of an `Atomic` is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) }, _owns: PhantomData }
    }

    /// Has the value dropped once no reader is left that may see it.
    ///
    /// Lock-free, and never allocates (but for the first call in the process, which makes the bags, and
    /// does without if there is no memory). Once in a while (a bag of objects is full, or the oldest in
    /// it is too old) it moves grace periods on, and then runs drops of objects retired before, on
    /// this thread and after all of its own work: do not hold a lock that such a drop takes.
    #[inline]
    pub fn retire(self) {
        drop(self);
    }

    /// [`retire`](Unlinked::retire), for a value that owns more than its own size: `bytes` is what its
    /// drop will give back besides (the capacity of a `Vec`, say), for the byte bound and the
    /// statistics. Without it the bound sees the node alone.
    ///
    /// # Examples
    ///
    /// ```
    /// use percpu::rcu::{self, Atomic, Owned};
    ///
    /// let table = Atomic::new(vec![0_u8; 1 << 20]);
    /// let old = table.swap(Owned::new(Vec::new()));
    /// let bytes = old.capacity();
    /// old.retire_sized(bytes);
    /// assert!(rcu::stats().pending_bytes + rcu::stats().reclaimed_bytes >= 1 << 20);
    /// ```
    #[inline]
    pub fn retire_sized(self, bytes: usize) {
        ManuallyDrop::new(self).retire_node(bytes);
    }

    /// To be called once, instead of a drop.
    #[inline]
    fn retire_node(&mut self, owns: usize) {
        let bytes = owns.saturating_add(size_of::<Watched<Node<T>>>());
        // SAFETY: unlinked by the exchange that made this `Unlinked`, the only one of the node
        // (invariant 1); `free_node::<T>` fits, and `T` may be dropped on any thread at any time.
        unsafe { retire_raw(head_of(self.node), bytes) };
    }

    /// Waits until no reader is left that may see the value, and takes it back.
    ///
    /// Blocks: see [`synchronize`].
    ///
    /// # Errors
    ///
    /// [`ReclaimError`]: it cannot wait here; it gives `self` back.
    pub fn reclaim(self) -> Result<Owned<T>, ReclaimError<T>> {
        match synchronize() {
            Ok(()) => Ok(Owned::from_node_ptr(ManuallyDrop::new(self).node)),
            Err(why) => Err(ReclaimError { why, unlinked: self }),
        }
    }
}

/// As for [`Owned`]. Not covered by semantic versioning.
#[doc(hidden)]
impl<T: Send + Sync + 'static> Unlinked<T> {
    /// # Safety
    ///
    /// From [`Owned::into_raw`], of which this is the only way back taken; no reader that begins now
    /// can find the node, and those that may have are in sections of this domain.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast(), _owns: PhantomData }
    }

    /// [`retire`](Unlinked::retire), together with others.
    #[inline]
    pub fn retire_with(self, batch: &mut Batch) {
        let node = ManuallyDrop::new(self).node;
        // SAFETY: as in `retire_node`; no reader that begins now can find it.
        unsafe { batch.push(head_of(node), size_of::<Watched<Node<T>>>()) };
    }
}

impl<T: Send + Sync + 'static> Deref for Unlinked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: freed by this `Unlinked` or after it (invariant 1).
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T: Send + Sync + 'static> Drop for Unlinked<T> {
    #[inline]
    fn drop(&mut self) {
        self.retire_node(0);
    }
}

/// Why [`Unlinked::reclaim`] did not wait; and the value.
#[non_exhaustive]
pub struct ReclaimError<T: Send + Sync + 'static> {
    /// What [`synchronize`](super::synchronize) said.
    pub why: SynchronizeError,
    /// The value, still waiting for its grace period.
    pub unlinked: Unlinked<T>,
}

impl<T: Send + Sync + 'static> ReclaimError<T> {
    /// The error as C knows it: that of `why`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.why.errno()
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for ReclaimError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReclaimError").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> fmt::Display for ReclaimError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the wait for readers was refused")
    }
}

impl<T: Send + Sync + 'static> Error for ReclaimError<T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.why)
    }
}

impl<T: Send + Sync + 'static> From<ReclaimError<T>> for io::Error {
    fn from(error: ReclaimError<T>) -> Self {
        error.why.into()
    }
}
