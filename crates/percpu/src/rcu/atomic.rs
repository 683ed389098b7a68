//! The pointer that readers follow without a lock, and the states of its value.
//!
//! ```text
//!            Atomic::swap                       retire, or drop
//!   Owned -----------------> shared -> Unlinked -----------------> freed after a grace period
//! ```
//!
//! The interface is safe because an [`Owned`] is unique: it can be in one [`Atomic`] only, and only
//! the thread that swaps it out gets the [`Unlinked`] that retires it. Each of the three points to a
//! node, which has the two words that retiring needs. So retiring does not allocate and cannot fail:
//!
//! ```text
//!   Owned, Atomic, Unlinked -> | next, free: 16 bytes | T |
//! ```
//!
//! # Invariants
//!
//! 1. A node is owned by one `Owned` or by one `Unlinked`, or is in one `Atomic`.
//! 2. A node that was in an `Atomic` is freed or changed only after a grace period, or by the code
//!    that has the `Atomic` exclusively. No `&T` from `load` outlives the borrow of the guard or of
//!    the `Atomic`.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use offlock_sync::atomic::{AtomicPtr, Ordering};
use offlock_sync::order;
use offlock_sync::quarantine::{Watched, free};

use super::bags::RetireHead;
use super::domain::Guard;
use super::retire::retire_raw;

/// A value behind the head that retires it.
#[repr(C)]
#[derive(Debug)]
struct Node<T> {
    head: RetireHead,
    value: T,
}

type NodePtr<T> = NonNull<Watched<Node<T>>>;

/// Frees the node around `head`.
///
/// # Safety
///
/// `head` is from [`head_of`] for the same `T`, and no other code uses the node from now on.
unsafe fn free_node<T>(head: NonNull<RetireHead>) {
    // SAFETY: `head_of` added the same offset, so the result is inside the allocation.
    let node = unsafe { head.byte_sub(Watched::<Node<T>>::OFFSET) }.cast::<Watched<Node<T>>>();
    // SAFETY: `Owned` allocated the node as a box, and the caller promises that no other code uses
    // it.
    free(unsafe { Box::from_raw(node.as_ptr()) });
}

/// Returns the head of a node, as a pointer that is valid for the whole node.
fn head_of<T>(node: NodePtr<T>) -> NonNull<RetireHead> {
    // SAFETY: the `Node` is inside the `Watched`, and the head is its first field (`repr(C)`).
    unsafe { node.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
}

/// A value that no reader can reach, ready to be put into an [`Atomic`](super::Atomic).
///
/// It is a `Box` with 16 more bytes, which are used when the value is retired.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned};
///
/// let mut new = Owned::new(vec![1, 2]);
/// new.push(3);
/// let shared: Atomic<Vec<u32>> = new.into();
/// assert_eq!(shared.load(&rcu::pin()).len(), 3);
/// ```
pub struct Owned<T> {
    node: NodePtr<T>,
}

// SAFETY: the `Owned` is the only way to the `T` (invariant 1), as a `Box<T>` is.
unsafe impl<T: Send> Send for Owned<T> {}
// SAFETY: a `&Owned<T>` gives access to a `&T` only, as a `&Box<T>` does.
unsafe impl<T: Sync> Sync for Owned<T> {}

impl<T: fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&**self).finish()
    }
}

impl<T> Owned<T> {
    /// Allocates a node with `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        // SAFETY: only an `Unlinked<T>` retires the head of this node, once, through `head_of`.
        let head = unsafe { RetireHead::new(free_node::<T>) };
        let node = Box::new(Watched::new(Node { head, value }));
        Self { node: NonNull::from(Box::leak(node)) }
    }

    /// Gives up the node without freeing it.
    fn into_node_ptr(self) -> NodePtr<T> {
        ManuallyDrop::new(self).node
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only this `Owned` has the node (invariant 1), and the value is initialised.
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: only this `Owned` has the node (invariant 1), and `&mut self` borrows it
        // exclusively.
        &mut unsafe { self.node.as_mut() }.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: only this `Owned` has the node (invariant 1), which was allocated as a box and is
        // not used again.
        free(unsafe { Box::from_raw(self.node.as_ptr()) });
    }
}

/// A pointer to a `T` that readers follow without a lock.
///
/// It always points to a value; use an `Option` as `T` if there may be none. Several writers may
/// write, and each overwrites the value of the one before: a writer that changes a part of the value
/// holds a lock from the load to the [`store`](Atomic::store). Dropping the `Atomic` frees the value at
/// once. No reference to the value is left then, because [`load`](Atomic::load) borrows the `Atomic`.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned};
///
/// let config = Atomic::new("old");
/// std::thread::scope(|s| {
///     s.spawn(|| {
///         let guard = rcu::pin();
///         let seen = config.load(&guard);
///         assert!(*seen == "old" || *seen == "new"); // and does not change
///     });
///     config.store(Owned::new("new")); // "old" is dropped once no reader uses it
/// });
/// ```
///
/// A reference does not outlive the guard, nor the `Atomic`:
///
/// ```compile_fail,E0597
/// # use offlock_percpu::rcu::{self, Atomic};
/// let shared = Atomic::new(7);
/// let seen = { let guard = rcu::pin(); shared.load(&guard) };
/// println!("{seen:?}");
/// ```
///
/// ```compile_fail,E0505
/// # use offlock_percpu::rcu::{self, Atomic};
/// let (guard, shared) = (rcu::pin(), Atomic::new(7));
/// let seen = shared.load(&guard);
/// drop(shared);
/// println!("{seen:?}");
/// ```
pub struct Atomic<T: Send + Sync + 'static> {
    /// Never null, because it is from [`Owned::into_node_ptr`].
    node: AtomicPtr<Watched<Node<T>>>,
}

impl<T: Send + Sync + 'static> fmt::Debug for Atomic<T> {
    /// Omits the value, because a load needs a guard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Atomic").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Atomic<T> {
    /// Returns a pointer to a new node with `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from(Owned::new(value))
    }

    /// Returns the value. Wait-free: one load.
    ///
    /// The reference is valid while both the guard and the `Atomic` are borrowed.
    #[inline]
    pub fn load<'g>(&'g self, guard: &'g Guard) -> &'g T {
        let _ = guard;
        // Ordering: Acquire pairs with the Release of `swap`; it carries the node.
        let node = self.node.load(Ordering::Acquire);
        // SAFETY: never null. The node was in this `Atomic` after the guard began, so the grace
        // period before its end waits for the guard (invariant 2).
        let node = unsafe { &*node };
        &node.value
    }

    /// Replaces the value by `new`, and returns the old value.
    ///
    /// Wait-free: one exchange.
    #[inline]
    pub fn swap(&self, new: Owned<T>) -> Unlinked<T> {
        let order = order!(AcqRel, "publish: the node is built");
        // Ordering: Release pairs with the Acquire in `load`; it carries the new node. Acquire
        // pairs with the Release of the exchange that put the old node in; it carries the old node.
        let old = self.node.swap(new.into_node_ptr().as_ptr(), order);
        // SAFETY: `old` was in this `Atomic`, and only this exchange took it out.
        unsafe { Unlinked::new(old) }
    }

    /// Replaces the value by `new`, and retires the old value.
    ///
    /// May run the drops of objects retired before: see [`Unlinked::retire`].
    #[inline]
    pub fn store(&self, new: Owned<T>) {
        drop(self.swap(new));
    }
}

impl<T: Default + Send + Sync + 'static> Default for Atomic<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Send + Sync + 'static> From<Owned<T>> for Atomic<T> {
    fn from(owned: Owned<T>) -> Self {
        Self { node: AtomicPtr::new(owned.into_node_ptr().as_ptr()) }
    }
}

impl<T: Send + Sync + 'static> Drop for Atomic<T> {
    fn drop(&mut self) {
        // Ordering: Relaxed; `&mut self` excludes other threads.
        let node = self.node.load(Ordering::Relaxed);
        // SAFETY: the pointer is from `into_node_ptr`, so it is not null.
        let node = unsafe { NonNull::new_unchecked(node) };
        // No reader can reach the node: `&mut self` borrows the `Atomic` exclusively.
        drop(Owned { node });
    }
}

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
    unsafe fn new(node: *mut Watched<Node<T>>) -> Self {
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
