//! The node pool: nodes kept for new levels, and nodes to free after the unlock.
//!
//! ```text
//!   outside the lock               under the lock               outside the lock
//!
//!   hint: no node? -> allocate     take(), keep(made)           drop(preload) frees
//!        Preload  --------------->  NodePool: | n n n - |  ---->  made, surplus -> n -> n
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
//! 1. `nodes` has capacity for `bound` nodes and holds at most that many, so keeping a node never
//!    allocates.
//! 2. Whenever the lock is not held, the hint is true exactly if `nodes` is not empty.
//! 3. The nodes of `surplus` were leaked from boxes, and only the preload has pointers to them.

use std::fmt;

use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicBool, Ordering};
use percpu::sync::{Arc, check};

use super::node::{Link, Node, NodePtr};

/// Allocates a node for a new level.
pub(super) fn try_new_node<K>() -> Result<Box<Node<K>>, AllocError> {
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    super::tests::memory()?;
    try_box(Node::vacant()).map_err(|_| AllocError::new())
}

/// The nodes that are kept under the lock.
pub(super) struct NodePool<K> {
    nodes: Vec<Box<Node<K>>>,
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
    pub(super) fn try_new(bound: usize) -> Result<Self, AllocError> {
        let mut nodes = Vec::new();
        nodes.try_reserve_exact(bound).map_err(|_| AllocError::new())?;
        let hint = NodeHint(Arc::new(AtomicBool::new(false)));
        Ok(Self { nodes, bound, hint, from_pool: 0, from_preload: 0 })
    }

    pub(super) fn hint(&self) -> NodeHint {
        self.hint.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns how many nodes were taken from the pool, and how many from a preload.
    pub(super) fn hits(&self) -> (u64, u64) {
        (self.from_pool, self.from_preload)
    }

    /// Takes a node from the pool, or else from the preload.
    #[inline]
    pub(super) fn take(&mut self, preload: &mut Preload<K>) -> Option<Box<Node<K>>> {
        if let Some(node) = self.nodes.pop() {
            self.update_hint();
            self.from_pool += 1;
            return Some(node);
        }
        // A node that was removed in the same lock section serves as well.
        let node = preload.made.take().or_else(|| preload.take_surplus())?;
        self.from_preload += 1;
        Some(node)
    }

    /// Moves a node into a preload that has none. Returns false if none is kept.
    pub(super) fn lend(&mut self, preload: &mut Preload<K>) -> bool {
        if preload.made.is_none() {
            preload.made = self.nodes.pop();
            self.update_hint();
        }
        preload.made.is_some()
    }

    /// Keeps a removed node if there is room; otherwise leaves it to the preload.
    #[inline]
    pub(super) fn put(&mut self, node: Box<Node<K>>, preload: &mut Preload<K>) {
        if self.nodes.len() < self.bound {
            self.push(node);
        } else {
            preload.defer_free(node);
        }
    }

    /// Keeps the preloaded node if it was not used and there is room.
    #[inline]
    pub(super) fn keep(&mut self, preload: &mut Preload<K>) {
        if check!("keep: the pool has room", self.nodes.len() < self.bound) {
            if let Some(node) = preload.made.take() {
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
        let beside = all.saturating_sub(self.len());
        self.nodes.try_reserve_exact(beside).map_err(|_| AllocError::new())?;
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
        self.nodes.push(node); // invariant 1: within the capacity
        self.update_hint();
    }

    /// Restores invariant 2. Stores only a changed value, so that other CPUs keep their copy of the
    /// cache line.
    #[inline]
    fn update_hint(&self) {
        // Ordering: Relaxed, both; a hint that publishes nothing. The lock orders its writers.
        if self.hint.is_empty() != self.nodes.is_empty() {
            self.hint.0.store(!self.nodes.is_empty(), Ordering::Relaxed);
        }
    }

    /// Checks invariants 1 and 2.
    pub(super) fn validate(&self) {
        assert!(self.len() <= self.bound, "more nodes kept than may be");
        assert!(self.nodes.capacity() >= self.bound, "no room for nodes to keep");
        assert_eq!(self.hint.is_empty(), self.nodes.is_empty(), "the hint tells of a node");
    }
}

/// A node allocated before the lock for a new level, and any number of nodes to free after the
/// unlock.
#[doc(hidden)]
pub struct Preload<K> {
    made: Option<Box<Node<K>>>,
    /// A list linked by the parent links, because a batch may remove many nodes.
    surplus: Link<K>,
}

impl<K> Preload<K> {
    /// Allocates a node if the pool seems to be empty.
    #[inline]
    pub(super) fn fill(&mut self, hint: &NodeHint) {
        if hint.is_empty() && self.made.is_none() {
            // A failure is not reported: under the lock the pool may have a node.
            self.made = try_new_node().ok();
        }
    }

    /// Adds a node for the new level; there was none.
    pub(super) fn put(&mut self, node: Box<Node<K>>) {
        self.made = Some(node);
    }

    fn defer_free(&mut self, node: Box<Node<K>>) {
        node.set_next(self.surplus);
        self.surplus = Some(NodePtr::leak(node));
    }

    /// Takes one node of the surplus.
    fn take_surplus(&mut self) -> Option<Box<Node<K>>> {
        let first = self.surplus?;
        // SAFETY: by invariant 3 the node was leaked, and only this preload points to it. The
        // pointer is overwritten below, before another use.
        let node = unsafe { first.reclaim() };
        self.surplus = node.take_parent();
        Some(node)
    }
}

impl<K> Default for Preload<K> {
    fn default() -> Self {
        Self { made: None, surplus: None }
    }
}

impl<K> Drop for Preload<K> {
    #[inline]
    fn drop(&mut self) {
        while let Some(node) = self.take_surplus() {
            drop(node);
        }
    }
}

impl<K> fmt::Debug for Preload<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Preload")
            .field("made", &self.made.is_some())
            .field("surplus", &self.surplus.is_some())
            .finish()
    }
}
