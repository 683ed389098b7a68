//! A node, and the two ways to point at one.
//!
//! [`NodePtr`] is a bare pointer, for links and for the queue, which promises to use it in time.
//! [`NodeRef`] borrows the tree, and so needs no promise: it is what this module's own code walks with.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;

use super::super::fifo::Fifo;

/// What is at a place of the tree.
pub(super) type Link<K> = Option<NodePtr<K>>;

/// Where a child is: lower keys are to the left.
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

/// A level: in the tree, or kept for a level to come.
///
/// Cells, for the tree's edits hold more than one reference to a node. The list is none: it is
/// lent as `&mut` to whoever has the tree as such.
pub(super) struct Node<K> {
    child: [Cell<Link<K>>; 2],
    parent: Cell<Link<K>>,
    /// Written in every node of a tree, and in no other for sure. Not dropped: keys are `Copy`.
    key: MaybeUninit<K>,
    fifo: Fifo,
    red: Cell<bool>,
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    _alive: super::tests::Alive,
}

// A search reads one line for each node on its way, if the allocator keeps it in one.
const _: () = assert!(size_of::<Node<u64>>() == 48);

impl<K> Node<K> {
    /// A node for any key.
    pub(super) fn vacant() -> Self {
        Self {
            child: [Cell::new(None), Cell::new(None)],
            parent: Cell::new(None),
            key: MaybeUninit::uninit(),
            fifo: Fifo::EMPTY,
            red: Cell::new(false),
            #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
            _alive: super::tests::Alive::new(),
        }
    }

    /// Makes it a new leaf: red, with no message and no links.
    pub(super) fn init_leaf(&mut self, key: K) {
        self.child = [Cell::new(None), Cell::new(None)];
        self.parent = Cell::new(None);
        self.key.write(key);
        self.fifo = Fifo::EMPTY;
        self.red = Cell::new(true);
    }

    /// Takes the link to one side's child out.
    pub(super) fn take_child(&self, side: Side) -> Link<K> {
        self.child[side as usize].take()
    }

    /// Takes the link to the parent out.
    pub(super) fn take_parent(&self) -> Link<K> {
        self.parent.take()
    }

    /// Uses the parent link of a node outside every tree for a list of the caller's.
    pub(super) fn set_next(&self, next: Link<K>) {
        self.parent.set(next);
    }
}

/// Points to a node that was a box. Says nothing about how long.
#[doc(hidden)]
pub struct NodePtr<K>(NonNull<Node<K>>);

// SAFETY: it is as good as a `Box<Node<K>>` that whoever has the tree, or the preload, owns: without a
// promise of the caller's it gives no access, and with it the node moves between threads with its owner.
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

impl<K> fmt::Debug for NodePtr<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodePtr").field(&self.0).finish()
    }
}

impl<K> NodePtr<K> {
    /// Gives the node up, to be had back with [`reclaim`](Self::reclaim).
    pub(super) fn leak(node: Box<Node<K>>) -> Self {
        Self(NonNull::from(Box::leak(node)))
    }

    /// The node as the box that it was.
    ///
    /// # Safety
    ///
    /// It was not reclaimed since it was leaked, and no copy of this pointer, nor what was got by one,
    /// is used from now on.
    pub(super) unsafe fn reclaim(self) -> Box<Node<K>> {
        // SAFETY: `leak` made the pointer of a box, and by the caller we are the only one to use it.
        unsafe { Box::from_raw(self.0.as_ptr()) }
    }

    /// The node, borrowed from its tree.
    ///
    /// # Safety
    ///
    /// For `'a` it is in a tree, which nothing borrows as `&mut`; or in a tree that the caller has as
    /// `&mut`, and does not use [`fifo`](Self::fifo) or [`reclaim`](Self::reclaim) on.
    pub(super) unsafe fn node_ref<'a>(self) -> NodeRef<'a, K> {
        NodeRef { ptr: self, tree: PhantomData }
    }

    /// The node's list.
    ///
    /// # Safety
    ///
    /// For `'a` it is in a tree that the caller has as `&mut`, and does not use otherwise.
    pub(super) unsafe fn fifo<'a>(self) -> &'a mut Fifo {
        // SAFETY: by the caller the node is there, and nobody else uses it.
        unsafe { &mut (*self.0.as_ptr()).fifo }
    }
}

/// A node of a tree that is borrowed for `'a`.
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
        // SAFETY: `node_ref` was promised, or by invariant 1 a link says, that the node is in a tree; it is
        // freed, and its list lent, only with `&mut` to that tree, which `'a` forbids.
        unsafe { self.ptr.0.as_ref() }
    }
}

impl<'a, K> NodeRef<'a, K> {
    pub(super) fn ptr(self) -> NodePtr<K> {
        self.ptr
    }

    pub(super) fn key(&self) -> &K {
        // SAFETY: by invariant 1 the node, which is in a tree, has a key.
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

    /// Puts `child`, or nothing, on that side: invariant 2.
    pub(super) fn set_child(self, side: Side, child: Option<NodeRef<'a, K>>) {
        self.child[side as usize].set(child.map(Self::ptr));
        if let Some(child) = child {
            child.parent.set(Some(self.ptr));
        }
    }

    /// Makes it the root.
    pub(super) fn set_no_parent(self) {
        self.parent.set(None);
    }

    /// On which side `child` is.
    pub(super) fn side_of(self, child: NodeRef<'a, K>) -> Side {
        if self.child(Side::Right) == Some(child) { Side::Right } else { Side::Left }
    }

    /// The last node from here that way.
    pub(super) fn furthest(self, side: Side) -> Self {
        let mut at = self;
        while let Some(child) = at.child(side) {
            at = child;
        }
        at
    }
}
