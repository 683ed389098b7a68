//! The node that holds a value, and its unique owner.
//!
//! A node carries the two words that retiring needs, so retiring does not allocate and cannot fail:
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
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use offlock_sync::quarantine::{Watched, free};

use super::bag::RetireHead;

/// A value behind the head that retires it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Node<T> {
    head: RetireHead,
    pub(super) value: T,
}

pub(super) type NodePtr<T> = NonNull<Watched<Node<T>>>;

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
pub(super) fn head_of<T>(node: NodePtr<T>) -> NonNull<RetireHead> {
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
// The same bounds as `Box<T>`: the head is not accessed before the value is retired.
impl<T: UnwindSafe> UnwindSafe for Owned<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Owned<T> {}

impl<T: fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&**self).finish()
    }
}

impl<T> Owned<T> {
    /// Allocates a node with `value`. Aborts if there is no memory, like `Box::new`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from_box(Box::new(Self::node(value)))
    }

    fn node(value: T) -> Watched<Node<T>> {
        // SAFETY: only an `Unlinked<T>` retires the head of this node, once, through `head_of`.
        let head = unsafe { RetireHead::new(free_node::<T>) };
        Watched::new(Node { head, value })
    }

    fn from_box(node: Box<Watched<Node<T>>>) -> Self {
        let node = Box::into_raw(node);
        // SAFETY: a box is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) } }
    }

    /// Takes a node that an `Owned`, an `Atomic` or an `Unlinked` has given up.
    ///
    /// # Safety
    ///
    /// - `node` is from [`Owned::into_node_ptr`], and is converted back once.
    /// - No reader can reach the node or has a reference into it.
    pub(super) unsafe fn from_node_ptr(node: NodePtr<T>) -> Self {
        Self { node }
    }

    /// Gives up the node without freeing it.
    pub(super) fn into_node_ptr(self) -> NodePtr<T> {
        ManuallyDrop::new(self).node
    }

    /// Takes the value out and frees the node.
    #[must_use]
    pub fn into_inner(self) -> T {
        let node = self.into_node_ptr();
        // SAFETY: only this `Owned` had the node (invariant 1), and the value is initialised.
        let value = &unsafe { node.as_ref() }.value;
        // SAFETY: the value in the node is not used or dropped again; only its memory is freed.
        let value = unsafe { ptr::read(value) };
        let memory = node.as_ptr().cast::<std::mem::MaybeUninit<Watched<Node<T>>>>();
        // SAFETY: the node was allocated as a box of the same layout, and is not used again. A
        // `MaybeUninit` drops no field, and the head needs no drop.
        drop(unsafe { Box::from_raw(memory) });
        value
    }
}

/// For data structures of the other crates of this workspace, which store the node in a word of
/// their own instead of an [`Atomic`](super::Atomic) and uphold its invariants. Not covered by
/// semantic versioning.
#[doc(hidden)]
impl<T> Owned<T> {
    /// Returns the node as a pointer whose two lowest bits are clear.
    #[inline]
    #[must_use]
    pub fn into_raw(self) -> NonNull<()> {
        const { assert!(align_of::<Node<T>>() >= 4) };
        self.into_node_ptr().cast()
    }

    /// Takes a node back from a pointer.
    ///
    /// # Safety
    ///
    /// - `node` is from [`into_raw`](Owned::into_raw) of the same `T`, and is converted back once.
    /// - No other code can reach the node or has a reference into it.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast() }
    }

    /// Returns the value of a node that other threads may reach too.
    ///
    /// # Safety
    ///
    /// `node` is from [`into_raw`](Owned::into_raw) of the same `T`, and is not freed or changed
    /// during `'g`.
    #[inline]
    pub unsafe fn borrow_raw<'g>(node: NonNull<()>) -> &'g T {
        // SAFETY: the caller promises a live and unchanged node of this `T` for `'g`.
        let node: &'g Watched<Node<T>> = unsafe { node.cast().as_ref() };
        &node.value
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

impl<T> From<T> for Owned<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}
