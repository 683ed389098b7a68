//! The node pool: nodes for levels to come, and nodes to free after the unlock.
//!
//! ```text
//!   outside the lock               inside                       outside again
//!
//!   hint: no node? -> make         take(), keep(made)           drop(preload): frees
//!        Preload  --------------->  NodePool: | n n n - |  ---->  made, surplus -> n -> n
//!                                  put(freed)
//! ```
//!
//! Three rules: a node is made before the lock is taken, and only if the pool seems to be empty; the
//! pool keeps up to `bound` freed nodes; an operation looks again under the lock, and what finds no
//! room in the pool is freed after the unlock.
//!
//! Source: "ipc/mqueue: add rbtree node caching support" (Linux 3.5, `ipc/mqueue.c`) and "xfs: don't
//! allocate new buffers on every call to _xfs_buf_find" (Linux 3.2).
//!
//! # Invariants
//!
//! 1. `nodes` has capacity for `bound` nodes and holds at most that many: keeping one never allocates.
//! 2. The hint is whether `nodes` has any, whenever the lock is not held.
//! 3. The nodes of `surplus` were boxes, and the preload alone has pointers to them.

use std::fmt;

use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicBool, Ordering};
use percpu::sync::{Arc, check};

use super::node::{Link, Node, NodePtr};

/// Makes a node for a level to come.
pub(super) fn try_new_node<K>() -> Result<Box<Node<K>>, AllocError> {
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    super::tests::memory()?;
    try_box(Node::vacant()).map_err(|_| AllocError::new())
}

/// Nodes that are kept under the lock.
pub(super) struct NodePool<K> {
    nodes: Vec<Box<Node<K>>>,
    /// How many are kept at most: what the queue's owner wanted, and what was reserved.
    bound: usize,
    hint: NodeHint,
    from_pool: u64,
    from_preload: u64,
}

/// Tells without the lock whether the pool seems to have a node. It may be out of date: then a node
/// was made for nothing, or one is missing under the lock.
#[doc(hidden)]
#[derive(Clone)]
pub struct NodeHint(Arc<AtomicBool>);

impl NodeHint {
    /// Returns whether the pool seems to be empty. Wait-free: one load.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        // Ordering: Relaxed; a hint, the lock orders the nodes.
        !self.0.load(Ordering::Relaxed)
    }
}

impl<K> NodePool<K> {
    /// Makes an empty pool that keeps up to `bound` nodes.
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

    /// How many nodes were taken from the pool, and how many from a preload.
    pub(super) fn hits(&self) -> (u64, u64) {
        (self.from_pool, self.from_preload)
    }

    /// Takes a node of the pool, or one that the preload has.
    #[inline]
    pub(super) fn take(&mut self, preload: &mut Preload<K>) -> Option<Box<Node<K>>> {
        if let Some(node) = self.nodes.pop() {
            self.update_hint();
            self.from_pool += 1;
            return Some(node);
        }
        // A node that an earlier removal under the same lock left will do as well.
        let node = preload.made.take().or_else(|| preload.take_surplus())?;
        self.from_preload += 1;
        Some(node)
    }

    /// Keeps a node, or leaves it to the preload.
    #[inline]
    pub(super) fn put(&mut self, node: Box<Node<K>>, preload: &mut Preload<K>) {
        if self.nodes.len() < self.bound {
            self.push(node);
        } else {
            preload.defer_free(node);
        }
    }

    /// Keeps a node that was made for nothing, if there is room.
    #[inline]
    pub(super) fn keep(&mut self, preload: &mut Preload<K>) {
        if check!("keep: the pool has room", self.nodes.len() < self.bound) {
            if let Some(node) = preload.made.take() {
                self.push(node);
            }
        }
    }

    /// Makes nodes for `messages` levels beside the `live` ones, and from now on keeps all there are.
    ///
    /// On an error the nodes that were made are kept.
    pub(super) fn reserve(&mut self, live: usize, messages: usize) -> Result<(), AllocError> {
        if messages == 0 {
            return Ok(());
        }
        // One more than are needed: when the pool is empty the hint has the next one made, though it
        // is for a level that there is.
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

    /// Adds a node where there is room.
    #[inline]
    fn push(&mut self, node: Box<Node<K>>) {
        self.nodes.push(node); // invariant 1: within its capacity
        self.update_hint();
    }

    /// Makes invariant 2 true again. Writes only what changes, so that other CPUs keep their copy of
    /// the line.
    #[inline]
    fn update_hint(&self) {
        // Ordering: Relaxed, both; a hint, and the lock orders its writers.
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

/// A node for a new level, made before the lock; and nodes to free after the unlock, any number.
#[doc(hidden)]
pub struct Preload<K> {
    made: Option<Box<Node<K>>>,
    /// A list by parent links, as a batch may free many nodes.
    surplus: Link<K>,
}

impl<K> Preload<K> {
    /// Makes a node if the pool seems to be empty, and if there is memory.
    #[inline]
    pub(super) fn fill(&mut self, hint: &NodeHint) {
        if hint.is_empty() && self.made.is_none() {
            // An error is no reason to give up: under the lock a node may be found.
            self.made = try_new_node().ok();
        }
    }

    fn defer_free(&mut self, node: Box<Node<K>>) {
        node.set_next(self.surplus);
        self.surplus = Some(NodePtr::leak(node));
    }

    /// Takes one of the surplus.
    fn take_surplus(&mut self) -> Option<Box<Node<K>>> {
        let first = self.surplus?;
        // SAFETY: invariant 3, and the only pointer to it is overwritten before another use.
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
