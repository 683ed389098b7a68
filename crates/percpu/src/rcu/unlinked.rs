//! The value that a writer has taken out of a pointer and must retire.
//!
//! The invariants are those of [`owned`](super::owned).

use std::fmt;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use offlock_sync::quarantine::Watched;

use super::owned::{Node, NodePtr, head_of};
use super::reclaim::retire_raw;

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
        // SAFETY:
        // - The head is that of a `Node<T>`, made with `free_node::<T>`. This is the only
        //   `Unlinked` of the node (invariant 1), so the node is retired once.
        // - The exchange that made this `Unlinked` took the node out of its `Atomic`, so no reader
        //   that begins now can find it.
        // - `T` is `Send` and `'static`, so it may be dropped on any thread at any later time.
        unsafe { retire_raw(head_of(self.node), size_of::<Watched<Node<T>>>()) };
    }
}
