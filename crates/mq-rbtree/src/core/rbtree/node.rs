//! A node of the tree, and two references to one.
//!
//! [`NodePtr`] is a plain pointer, for links and for the queue, whose calls are `unsafe`.
//! [`NodeRef`] borrows the tree and is safe to use: the tree's own code walks with it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;

use super::super::levels::Fifo;

/// A link to a node, or the end of a path.
pub(super) type Link<K> = Option<NodePtr<K>>;

/// The side of a child: lower keys are on the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Left => Self::Right,
            Self::Right => Self::Left,
        }
    }
}

/// A node: in the tree, in the pool, or in a preload.
///
/// The links and the colour are cells, because an edit holds several references to a node. The FIFO
/// is not a cell: it is borrowed as `&mut`, through a `&mut` borrow of the tree.
pub(super) struct Node<K> {
    child: [Cell<Link<K>>; 2],
    parent: Cell<Link<K>>,
    /// Initialised in every node of a tree; possibly not in others. Never dropped, because keys are
    /// `Copy`.
    key: MaybeUninit<K>,
    fifo: Fifo,
    red: Cell<bool>,
}

// A search reads one cache line of each node on its path, if the allocator places it in one.
const _: () = assert!(size_of::<Node<u64>>() == 48);

impl<K> Node<K> {
    /// Creates a node without a key.
    pub(super) fn vacant() -> Self {
        Self {
            child: [Cell::new(None), Cell::new(None)],
            parent: Cell::new(None),
            key: MaybeUninit::uninit(),
            fifo: Fifo::EMPTY,
            red: Cell::new(false),
        }
    }

    /// Makes the node a new leaf: red, with an empty FIFO and no links.
    pub(super) fn init_leaf(&mut self, key: K) {
        self.child = [Cell::new(None), Cell::new(None)];
        self.parent = Cell::new(None);
        self.key.write(key);
        self.fifo = Fifo::EMPTY;
        self.red = Cell::new(true);
    }

    /// Takes the link to the child of one side out.
    pub(super) fn take_child(&self, side: Side) -> Link<K> {
        self.child[side as usize].take()
    }

    /// Stores a list link in the parent link. The node is in no tree.
    pub(super) fn set_next(&self, next: Link<K>) {
        self.parent.set(next);
    }

    /// Takes the link to the parent out, or the list link that is stored there.
    pub(super) fn take_parent(&self) -> Link<K> {
        self.parent.take()
    }
}

/// A pointer to a node that was leaked from a box. It does not show how long the node lives.
#[doc(hidden)]
pub struct NodePtr<K>(NonNull<Node<K>>);

// SAFETY: the pointer itself gives no access: its methods are `unsafe`. The node belongs to the
// owner of its tree or list and moves between threads with that owner, as a `Box<Node<K>>`
// would, for which `K: Send` suffices.
unsafe impl<K: Send> Send for NodePtr<K> {}

impl<K> Clone for NodePtr<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for NodePtr<K> {}

impl<K> PartialEq for NodePtr<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<K> NodePtr<K> {
    /// Turns a box into a pointer. [`reclaim`](Self::reclaim) turns it back.
    pub(super) fn leak(node: Box<Node<K>>) -> Self {
        Self(NonNull::from(Box::leak(node)))
    }

    /// Turns the pointer back into the box that it was made of.
    ///
    /// # Safety
    ///
    /// The node has not been reclaimed since it was leaked. From this call on, no copy of the
    /// pointer and no reference obtained from one is used.
    pub(super) unsafe fn reclaim(self) -> Box<Node<K>> {
        // SAFETY: `leak` made the pointer of a box, and the caller guarantees that nothing else
        // uses the node from now on.
        unsafe { Box::from_raw(self.0.as_ptr()) }
    }

    /// Returns a reference to the node that borrows its tree.
    ///
    /// # Safety
    ///
    /// During `'a` the node is in a tree, and one of these holds: nothing borrows the tree as
    /// `&mut`; or the caller has the `&mut` borrow and does not call [`fifo`](Self::fifo) or
    /// [`reclaim`](Self::reclaim) for the node.
    pub(super) unsafe fn node_ref<'a>(self) -> NodeRef<'a, K> {
        NodeRef { ptr: self, tree: PhantomData }
    }

    /// Returns the FIFO of the node.
    ///
    /// # Safety
    ///
    /// During `'a` the node is in a tree that the caller borrows as `&mut` and does not use
    /// otherwise.
    pub(super) unsafe fn fifo<'a>(self) -> &'a mut Fifo {
        // SAFETY: the caller guarantees that the node is alive and that nothing else uses its tree.
        unsafe { &mut (*self.0.as_ptr()).fifo }
    }
}

/// A reference to a node of a tree that is borrowed during `'a`.
pub(super) struct NodeRef<'a, K> {
    ptr: NodePtr<K>,
    tree: PhantomData<&'a Node<K>>,
}

impl<K> Clone for NodeRef<'_, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for NodeRef<'_, K> {}

impl<K> PartialEq for NodeRef<'_, K> {
    fn eq(&self, other: &Self) -> bool {
        self.ptr == other.ptr
    }
}

impl<K> Deref for NodeRef<'_, K> {
    type Target = Node<K>;

    #[inline]
    fn deref(&self) -> &Node<K> {
        // SAFETY: the node is in a tree: `node_ref` requires that, and invariant 1 says it of a
        // link. It is freed, and its FIFO is borrowed, only with `&mut` to that tree, which `'a`
        // excludes.
        unsafe { self.ptr.0.as_ref() }
    }
}

impl<'a, K> NodeRef<'a, K> {
    pub(super) fn ptr(self) -> NodePtr<K> {
        self.ptr
    }

    pub(super) fn key(&self) -> &K {
        // SAFETY: by invariant 1 a node in a tree has a key.
        unsafe { self.key.assume_init_ref() }
    }

    pub(super) fn fifo(self) -> Fifo {
        self.fifo
    }

    pub(super) fn is_red(self) -> bool {
        self.red.get()
    }

    pub(super) fn set_red(self, red: bool) {
        self.red.set(red);
    }

    #[inline]
    pub(super) fn child(self, side: Side) -> Option<Self> {
        self.follow(&self.child[side as usize])
    }

    #[inline]
    pub(super) fn parent(self) -> Option<Self> {
        self.follow(&self.parent)
    }

    fn follow(self, link: &Cell<Link<K>>) -> Option<Self> {
        link.get().map(|ptr| Self { ptr, tree: self.tree })
    }

    /// Makes `child`, or nothing, the child of that side, and keeps invariant 2.
    pub(super) fn set_child(self, side: Side, child: Option<NodeRef<'a, K>>) {
        self.child[side as usize].set(child.map(Self::ptr));
        if let Some(child) = child {
            child.parent.set(Some(self.ptr));
        }
    }

    /// Clears the parent link: the node becomes the root.
    pub(super) fn set_no_parent(self) {
        self.parent.set(None);
    }

    /// Returns the side on which `child` is.
    pub(super) fn side_of(self, child: NodeRef<'a, K>) -> Side {
        if self.child(Side::Right) == Some(child) { Side::Right } else { Side::Left }
    }

    /// Returns the last node on the path from here to that side.
    pub(super) fn furthest(self, side: Side) -> Self {
        let mut at = self;
        while let Some(child) = at.child(side) {
            at = child;
        }
        at
    }
}
