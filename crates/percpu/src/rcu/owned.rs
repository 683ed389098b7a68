//! The owned node.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use super::bag::RetireHead;
use super::error::TryNewError;
use crate::alloc::try_box;
use crate::sync::quarantine::{Watched, free};

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
/// `head` came from [`head_of`] for the same `T`, and nobody uses the node any more.
unsafe fn free_node<T>(head: NonNull<RetireHead>) {
    // SAFETY: `head_of` added as much.
    let node = unsafe { head.byte_sub(Watched::<Node<T>>::OFFSET) }.cast::<Watched<Node<T>>>();
    // SAFETY: allocated as a box by `Owned`; nobody uses it any more.
    free(unsafe { Box::from_raw(node.as_ptr()) });
}

/// The head of a node, as a pointer that is good for all of the node.
pub(super) fn head_of<T>(node: NodePtr<T>) -> NonNull<RetireHead> {
    // SAFETY: the `Node` is inside the `Watched`, and starts with the head (`repr(C)`).
    unsafe { node.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
}

/// A `T` that nobody else can reach, ready to be put into an [`Atomic`].
///
/// A `Box` with 16 bytes in front for its end.
pub struct Owned<T> {
    node: NodePtr<T>,
    _owns: PhantomData<T>,
}

// SAFETY: the only way to the `T`, as a `Box`.
unsafe impl<T: Send> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Owned<T> {}
// As `Box<T>`: the head in front of the `T` is not touched before it is retired.
impl<T: UnwindSafe> UnwindSafe for Owned<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Owned<T> {}

impl<T: fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&**self).finish()
    }
}

impl<T> Owned<T> {
    /// Allocates a node. Aborts if there is no memory, as `Box::new`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from_box(Box::new(Self::node(value)))
    }

    /// Allocates a node.
    ///
    /// # Errors
    ///
    /// [`TryNewError`] gives the value back: there is no memory.
    pub fn try_new(value: T) -> Result<Self, TryNewError<T>> {
        // The node is built in place only once there is memory, so the value can be returned.
        let mut node = try_box(std::mem::MaybeUninit::<Watched<Node<T>>>::uninit());
        match node.as_mut() {
            Ok(node) => {
                node.write(Self::node(value));
            }
            Err(_) => return Err(TryNewError(value)),
        }
        let Ok(node) = node else { unreachable!("checked just above") };
        // SAFETY: written just above.
        Ok(Self::from_box(unsafe { node.assume_init() }))
    }

    fn node(value: T) -> Watched<Node<T>> {
        // SAFETY: the head of such a node is retired by `Unlinked` only, as a `Node<T>`.
        let head = unsafe { RetireHead::new(free_node::<T>) };
        Watched::new(Node { head, value })
    }

    fn from_box(node: Box<Watched<Node<T>>>) -> Self {
        let node = Box::into_raw(node);
        // SAFETY: a box is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) }, _owns: PhantomData }
    }

    /// The node that [`Owned::into_node_ptr`] gave, or that an `Atomic` or `Unlinked` has given up.
    pub(super) fn from_node_ptr(node: NodePtr<T>) -> Self {
        Self { node, _owns: PhantomData }
    }

    pub(super) fn into_node_ptr(self) -> NodePtr<T> {
        ManuallyDrop::new(self).node
    }

    /// Takes the value out and frees the node.
    #[must_use]
    pub fn into_inner(self) -> T {
        let node = self.into_node_ptr();
        // SAFETY: ours alone (invariant 1), and initialised.
        let value = &unsafe { node.as_ref() }.value;
        // SAFETY: it is not dropped where it was, only its memory is freed.
        let value = unsafe { ptr::read(value) };
        let memory = node.as_ptr().cast::<std::mem::MaybeUninit<Watched<Node<T>>>>();
        // SAFETY: a box of the same layout; a `MaybeUninit` drops nothing, and the head needs no
        // drop.
        drop(unsafe { Box::from_raw(memory) });
        value
    }
}

/// For structures of the other crates, which have a word in the place of an [`Atomic`]: they keep its
/// invariants themselves. Not covered by semantic versioning.
#[doc(hidden)]
impl<T> Owned<T> {
    /// The node as a word; its two lowest bits are clear.
    #[inline]
    #[must_use]
    pub fn into_raw(self) -> NonNull<()> {
        const { assert!(align_of::<Node<T>>() >= 4) };
        self.into_node_ptr().cast()
    }

    /// # Safety
    ///
    /// From [`into_raw`](Owned::into_raw), of which this is the only way back taken; nobody else can
    /// reach the node any more, nor has a reference from it.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast(), _owns: PhantomData }
    }

    /// The value of a node that others may reach, too.
    ///
    /// # Safety
    ///
    /// From [`into_raw`](Owned::into_raw), and not freed, nor changed, during `'g`.
    #[inline]
    pub unsafe fn borrow_raw<'g>(node: NonNull<()>) -> &'g T {
        // SAFETY: the caller's.
        let node: &'g Watched<Node<T>> = unsafe { node.cast().as_ref() };
        &node.value
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: ours alone (invariant 1), and initialised.
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        &mut unsafe { self.node.as_mut() }.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: ours alone (invariant 1), from a box, and not used again.
        free(unsafe { Box::from_raw(self.node.as_ptr()) });
    }
}

impl<T> From<T> for Owned<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}
