//! The node pool: nodes kept for new levels, and nodes to free after the unlock.
//!
//! ```text
//!   outside the lock               under the lock               outside the lock
//!
//!   hint: no node? -> allocate     take(), keep(unused)         drop(preload) frees
//!        Preload -> n ----------->  NodePool -> n -> n -> n  --->  Preload -> n -> n
//!                                  put(removed)
//! ```
//!
//! A node is allocated before the lock, and only if the pool seems to be empty. The pool keeps up
//! to `bound` removed nodes. An operation checks the pool again under the lock. A node that finds
//! no room in the pool is freed after the unlock.
//!
//! Source: "ipc/mqueue: add rbtree node caching support" (Linux 3.5, `ipc/mqueue.c`) and "xfs:
//! don't allocate new buffers on every call to _xfs_buf_find" (Linux 3.2).
//!
//! # Invariants
//!
//! 1. `nodes` holds at most `bound` nodes.
//! 2. Whenever the lock is not held, the hint is true exactly if `nodes` is not empty.
//! 3. The nodes of a list were leaked from boxes, and only the list has pointers to them.

use std::alloc::Layout;
use std::sync::Arc;

use offlock_sync::AllocError;
use offlock_sync::alloc::try_box;
use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::check;

use super::node::{Link, Node, NodePtr};

/// Allocates a node for a new level.
pub(super) fn try_new_node<K>() -> Result<Box<Node<K>>, AllocError> {
    try_box(Node::vacant()).map_err(|_| AllocError::new())
}

/// A list of nodes that are in no tree, linked by their parent links: adding one allocates nothing.
///
/// As a preload it has the node that was allocated before the lock for a new level, and the nodes to
/// free after the unlock.
#[doc(hidden)]
pub struct NodeList<K> {
    first: Link<K>,
    len: usize,
}

impl<K> NodeList<K> {
    /// Allocates a node if the pool seems to be empty and the list is.
    #[inline]
    pub(super) fn fill(&mut self, hint: &NodeHint) {
        if hint.is_empty() && self.first.is_none() {
            // A failure is not reported: under the lock the pool may have a node.
            try_new_node().ok().into_iter().for_each(|node| self.push(node));
        }
    }

    #[inline]
    pub(super) fn push(&mut self, node: Box<Node<K>>) {
        node.set_next(self.first);
        self.first = Some(NodePtr::leak(node));
        self.len += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Box<Node<K>>> {
        let first = self.first?;
        // SAFETY: by invariant 3 the node was leaked, and only this list points to it. The pointer is
        // overwritten below, before another use.
        let node = unsafe { first.reclaim() };
        self.first = node.take_parent();
        self.len -= 1;
        Some(node)
    }
}

impl<K> Default for NodeList<K> {
    fn default() -> Self {
        Self { first: None, len: 0 }
    }
}

impl<K> Drop for NodeList<K> {
    #[inline]
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// The nodes that are kept under the lock.
pub(super) struct NodePool<K> {
    nodes: NodeList<K>,
    /// The most nodes to keep: the configured number, or more after a reservation.
    bound: usize,
    hint: NodeHint,
    from_pool: u64,
    from_preload: u64,
}

/// Shows without the lock whether the pool seems to have a node. If it is out of date, a node is
/// allocated that is not needed, or one is missing under the lock.
#[doc(hidden)]
#[derive(Clone)]
pub struct NodeHint(Arc<AtomicBool>);

impl NodeHint {
    /// Returns whether the pool seems to be empty. Wait-free: one load.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        // Ordering: Relaxed; a hint. The operation checks again under the lock, which orders the
        // nodes.
        !self.0.load(Ordering::Relaxed)
    }
}

impl<K> NodePool<K> {
    /// Creates an empty pool that keeps up to `bound` nodes.
    pub(super) fn new(bound: usize) -> Self {
        let hint = NodeHint(Arc::new(AtomicBool::new(false)));
        Self { nodes: NodeList::default(), bound, hint, from_pool: 0, from_preload: 0 }
    }

    pub(super) fn hint(&self) -> NodeHint {
        self.hint.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len
    }

    /// Returns how many nodes were taken from the pool, and how many from a preload.
    pub(super) fn hits(&self) -> (u64, u64) {
        (self.from_pool, self.from_preload)
    }

    /// Takes a node from the pool, or else from the preload.
    #[inline]
    pub(super) fn take(&mut self, preload: &mut NodeList<K>) -> Option<Box<Node<K>>> {
        if let Some(node) = self.nodes.pop() {
            self.update_hint();
            self.from_pool += 1;
            return Some(node);
        }
        // A node that was removed in the same lock section serves as well.
        let node = preload.pop()?;
        self.from_preload += 1;
        Some(node)
    }

    /// Moves a node into a preload that has none. Returns whether the preload has one.
    pub(super) fn lend(&mut self, preload: &mut NodeList<K>) -> bool {
        if preload.first.is_none() {
            self.nodes.pop().into_iter().for_each(|node| preload.push(node));
            self.update_hint();
        }
        preload.first.is_some()
    }

    /// Keeps a removed node if there is room; otherwise leaves it to the preload.
    #[inline]
    pub(super) fn put(&mut self, node: Box<Node<K>>, preload: &mut NodeList<K>) {
        if self.len() < self.bound {
            self.push(node);
        } else {
            preload.push(node);
        }
    }

    /// Keeps a node of the preload that was not used, if there is room.
    #[inline]
    pub(super) fn keep(&mut self, preload: &mut NodeList<K>) {
        if check!("keep: the pool has room", self.len() < self.bound) {
            if let Some(node) = preload.pop() {
                self.push(node);
            }
        }
    }

    /// Allocates nodes for `messages` levels beside the `live` ones, and from now on keeps all
    /// nodes.
    ///
    /// If it fails, it keeps the nodes that it has allocated.
    pub(super) fn reserve(&mut self, live: usize, messages: usize) -> Result<(), AllocError> {
        if messages == 0 {
            return Ok(());
        }
        // One more than needed. When the pool is empty, the hint makes the next send allocate a
        // node, even for a level that exists.
        let wanted = messages.checked_add(1).ok_or(AllocError::new())?;
        let all = live.checked_add(wanted.max(self.len())).ok_or(AllocError::new())?;
        // Refuses a number that no memory could hold.
        Layout::array::<Node<K>>(all).map_err(|_| AllocError::new())?;
        while self.len() < wanted {
            let node = try_new_node()?;
            self.bound = self.bound.max(live + self.len() + 1);
            self.push(node);
        }
        self.bound = self.bound.max(all);
        Ok(())
    }

    /// Adds a node. The caller has checked that there is room.
    #[inline]
    fn push(&mut self, node: Box<Node<K>>) {
        self.nodes.push(node);
        self.update_hint();
    }

    /// Restores invariant 2. Stores only a changed value, so that other CPUs keep their copy of the
    /// cache line.
    #[inline]
    fn update_hint(&self) {
        // Ordering: Relaxed, both; a hint that publishes nothing. The lock orders its writers.
        if self.hint.is_empty() != self.nodes.first.is_none() {
            self.hint.0.store(self.nodes.first.is_some(), Ordering::Relaxed);
        }
    }

    /// Checks invariants 1 and 2.
    pub(super) fn validate(&self) {
        assert!(self.len() <= self.bound, "more nodes kept than may be");
        assert_eq!(self.hint.is_empty(), self.nodes.first.is_none(), "the hint tells of a node");
    }
}
