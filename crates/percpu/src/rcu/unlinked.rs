//! The value that a writer has taken out of a pointer and must retire.
//!
//! The invariants are those of [`owned`](super::owned).

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use offlock_sync::quarantine::Watched;

use super::batch::Batch;
use super::error::SynchronizeError;
use super::grace_period::synchronize;
use super::owned::{Node, NodePtr, Owned, head_of};
use super::reclaim::retire_raw;
use crate::error::impl_error;

/// A value that new readers cannot find, but that earlier readers may still use.
///
/// Dropping it retires the value, like [`retire`](Unlinked::retire).
///
/// ```
/// use offlock_percpu::rcu::{Atomic, Owned, Unlinked};
///
/// let shared = Atomic::new("old");
/// let old: Unlinked<&str> = shared.swap(Owned::new("new"));
/// assert_eq!(*old, "old");
/// old.retire();
/// ```
#[must_use = "dropping it retires the value; call `retire` to make that visible"]
pub struct Unlinked<T: Send + Sync + 'static> {
    node: NodePtr<T>,
}

// SAFETY: it gives `&T` to its owner and later the `T` to the thread that frees it; `T` is `Send`
// and `Sync`.
unsafe impl<T: Send + Sync + 'static> Send for Unlinked<T> {}
// SAFETY: a `&Unlinked<T>` gives access to a `&T` only, and `T` is `Sync`.
unsafe impl<T: Send + Sync + 'static> Sync for Unlinked<T> {}
// The same bounds as `Arc<T>`: readers may have a `&T` too.
impl<T: Send + Sync + RefUnwindSafe + 'static> UnwindSafe for Unlinked<T> {}
impl<T: Send + Sync + RefUnwindSafe + 'static> RefUnwindSafe for Unlinked<T> {}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for Unlinked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unlinked").field(&**self).finish()
    }
}

impl<T: Send + Sync + 'static> Unlinked<T> {
    /// Takes a node that was taken out of an `Atomic`.
    ///
    /// # Safety
    ///
    /// `node` was in an `Atomic`, and only the caller took it out.
    #[inline]
    pub(super) unsafe fn new(node: *mut Watched<Node<T>>) -> Self {
        // SAFETY: the pointer of an `Atomic` is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) } }
    }

    /// Drops the value once no reader can hold a reference to it.
    ///
    /// Never waits for readers. The first call in the process allocates the bags. A call that fills
    /// a bag advances grace periods. It then runs the drops of objects retired before, on this thread
    /// and after all its other work, so do not hold a lock that such a drop takes.
    #[inline]
    pub fn retire(self) {
        drop(self);
    }

    /// Retires a value that owns more memory, and says how much.
    ///
    /// `bytes` is the memory that the drop of the value frees in addition to the node, such as the
    /// capacity of a `Vec`. It counts towards a full batch, and in the statistics;
    /// [`retire`](Unlinked::retire) counts the node only.
    ///
    /// ```
    /// use offlock_percpu::rcu::{self, Atomic, Owned};
    ///
    /// let table = Atomic::new(vec![0_u8; 1 << 20]);
    /// let old = table.swap(Owned::new(Vec::new()));
    /// let bytes = old.capacity();
    /// old.retire_sized(bytes);
    /// # assert!(rcu::stats().pending < 1_000);
    /// ```
    #[inline]
    pub fn retire_sized(self, bytes: usize) {
        ManuallyDrop::new(self).retire_node(bytes);
    }

    /// Retires the node. Called once, in the drop or instead of it.
    #[inline]
    fn retire_node(&mut self, owns: usize) {
        let bytes = owns.saturating_add(size_of::<Watched<Node<T>>>());
        // SAFETY:
        // - The head is that of a `Node<T>`, made with `free_node::<T>`. This is the only
        //   `Unlinked` of the node (invariant 1), so the node is retired once.
        // - The exchange that made this `Unlinked` took the node out of its `Atomic`, so no reader
        //   that begins now can find it.
        // - `T` is `Send` and `'static`, so it may be dropped on any thread at any later time.
        unsafe { retire_raw(head_of(self.node), bytes) };
    }

    /// Waits until no reader can hold a reference to the value, and returns it.
    ///
    /// Blocks like [`synchronize`].
    ///
    /// ```
    /// use offlock_percpu::rcu::{Atomic, Owned};
    ///
    /// let shared = Atomic::new("old");
    /// let old = shared.swap(Owned::new("new"));
    /// assert_eq!(old.reclaim()?.into_inner(), "old");
    /// # Ok::<(), offlock_percpu::rcu::ReclaimError<&str>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ReclaimError`] returns `self`: the calling thread would wait for itself.
    pub fn reclaim(self) -> Result<Owned<T>, ReclaimError<T>> {
        match synchronize() {
            Ok(()) => {
                let node = ManuallyDrop::new(self).node;
                // SAFETY: only this `Unlinked` had the node (invariant 1). No reader that begins
                // now can find it, and `synchronize` waited for the earlier readers.
                Ok(unsafe { Owned::from_node_ptr(node) })
            }
            Err(reason) => Err(ReclaimError { reason, unlinked: self }),
        }
    }
}

/// For data structures of the other crates of this workspace, like the raw methods of [`Owned`].
/// Not covered by semantic versioning.
#[doc(hidden)]
impl<T: Send + Sync + 'static> Unlinked<T> {
    /// Takes a node that was taken out of another data structure.
    ///
    /// # Safety
    ///
    /// - `node` is from [`Owned::into_raw`] of the same `T`, and is converted back once.
    /// - No reader that begins now can find the node. The readers that may have found it hold a
    ///   guard of this module.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast() }
    }

    /// Adds the value to a batch, which retires it together with the other objects of the batch.
    #[inline]
    pub fn retire_with(self, batch: &mut Batch) {
        let node = ManuallyDrop::new(self).node;
        // SAFETY: as in `retire_node`.
        unsafe { batch.push(head_of(node), size_of::<Watched<Node<T>>>()) };
    }
}

impl<T: Send + Sync + 'static> Deref for Unlinked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only this `Unlinked` can retire the node (invariant 1), so the node is alive.
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T: Send + Sync + 'static> Drop for Unlinked<T> {
    #[inline]
    fn drop(&mut self) {
        self.retire_node(0);
    }
}

/// The error of [`Unlinked::reclaim`], which returns the value.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned, SynchronizeError};
///
/// let shared = Atomic::new("old");
/// let guard = rcu::pin();
/// let error = shared.swap(Owned::new("new")).reclaim().unwrap_err();
/// assert_eq!(error.reason, SynchronizeError::WouldDeadlock);
/// assert_eq!(*error.unlinked, "old");
/// # drop(guard);
/// ```
#[non_exhaustive]
pub struct ReclaimError<T: Send + Sync + 'static> {
    /// The error of [`synchronize`].
    pub reason: SynchronizeError,
    /// The value, which has not been reclaimed.
    pub unlinked: Unlinked<T>,
}

impl<T: Send + Sync + 'static> fmt::Debug for ReclaimError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReclaimError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl_error! {
    [T: Send + Sync + 'static] ReclaimError<T> { Self { reason, .. } => EDEADLK, "{reason}"; }
}
