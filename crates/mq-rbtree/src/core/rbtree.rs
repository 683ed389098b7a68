//! A red-black tree of priorities: for any ordered key.
//!
//! ```text
//!   root ------------> | 20 black |            highest ----+
//!                       /        \                         |
//!              | 10 black |    | 40 black |                |
//!                                  /      \                v
//!                          | 30 red |    | 50 red | key, fifo, parent
//!
//!   a level appears:   pool, preload, allocator --> node --> tree
//!   it goes:           tree --> node --> pool, or the preload, which frees after the unlock
//! ```
//!
//! A node is a box of its own, so a [`NodePtr`] to it is good until its level is left, whatever
//! happens to other levels: rebalancing moves links, never keys.
//!
//! The key's order is code of the user's. It runs while a place is searched, and in `below`,
//! before anything has changed: if it panics, nothing has. What holds the tree together does not
//! depend on it: an order that contradicts itself has keys sought in vain or present twice, in a
//! tree that is balanced all the same.
//!
//! Source: red-black trees as in Cormen, Leiserson, Rivest, Stein, "Introduction to Algorithms",
//! with both sides folded into one, and two changes: a removed node's successor moves into its
//! place (rather than its key), and the highest node is cached, as in Linux's `ipc/mqueue.c`.
//!
//! # Invariants
//!
//! 1. Every link of the tree, and of a node in it, leads to a node of the same tree. That node came
//!    from a box, has a key, and is freed only with `&mut RbTree`, after the last link to it is gone.
//! 2. A child's parent link leads back to the node that has it as a child; the root has no parent.
//! 3. The root is black; a red node has no red child; from a node down to each missing child there are
//!    as many black nodes.
//! 4. `highest` is the last node in order: the last one down the right from the root.
//! 5. With a consistent order, keys rise strictly from left to right.
//! 6. Between two operations no node has an empty list.

mod node;
mod pool;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod tree;

use std::fmt;

use percpu::AllocError;

use self::node::NodePtr;
use self::pool::{NodeHint, NodePool, Preload, try_new_node};
use self::tree::Tree;
use super::fifo::Fifo;
use super::levels::{Levels, sealed::Sealed};
use crate::stats::LevelStats;

/// Levels for priorities of any type with an order: a red-black tree with a node for each priority
/// that has messages.
///
/// The greatest key is served first; for the least, wrap it in [`Reverse`](std::cmp::Reverse). A
/// message of a priority that is there already needs no node; finding it takes as many comparisons
/// as the tree is high, at most twice the logarithm of the number of priorities. The highest is at
/// hand.
///
/// Comparisons run under the queue's lock. One that panics leaves the queue as it was; with an order
/// that contradicts itself messages may come in any order, and none is lost.
pub struct RbTree<K> {
    tree: Tree<K>,
    pool: NodePool<K>,
    fallback: u64,
}

impl<K> Sealed for RbTree<K> {}

impl<K: Ord + Copy + fmt::Debug> Levels for RbTree<K> {
    const COMPARES: bool = true;

    type Priority = K;
    type Hint = NodeHint;
    type Preload = Preload<K>;
    type Level = NodePtr<K>;

    fn try_new(spare: usize) -> Result<Self, AllocError> {
        Ok(Self { tree: Tree::new(), pool: NodePool::try_new(spare)?, fallback: 0 })
    }

    fn hint(&self) -> NodeHint {
        self.pool.hint()
    }

    fn is_valid(_: K) -> bool {
        true
    }

    #[inline]
    fn needs_memory(hint: &NodeHint, _: K) -> bool {
        hint.is_empty()
    }

    #[inline]
    fn preload(hint: &NodeHint, _: K, preload: &mut Preload<K>) {
        preload.fill(hint);
    }

    fn keep_preload(&mut self, _: K, preload: &mut Preload<K>) {
        self.pool.keep(preload);
    }

    #[inline]
    fn get_or_insert(
        &mut self,
        priority: K,
        preload: &mut Preload<K>,
    ) -> Result<NodePtr<K>, AllocError> {
        // The last of the user's code: nothing has changed before it.
        let point = match self.tree.search(&priority) {
            Ok(found) => {
                self.pool.keep(preload);
                return Ok(found.ptr());
            }
            Err(point) => point,
        };
        let node = match self.pool.take(preload) {
            Some(node) => node,
            None => {
                let node = try_new_node()?;
                self.fallback += 1;
                node
            }
        };
        let level = self.tree.link(node, priority, point);
        self.pool.keep(preload);
        Ok(level)
    }

    #[inline]
    fn get_or_insert_no_alloc(&mut self, priority: K) -> Option<NodePtr<K>> {
        let point = match self.tree.search(&priority) {
            Ok(found) => return Some(found.ptr()),
            Err(point) => point,
        };
        let node = self.pool.take(&mut Preload::default())?;
        Some(self.tree.link(node, priority, point))
    }

    #[inline]
    unsafe fn remove(&mut self, level: NodePtr<K>, preload: &mut Preload<K>) {
        // SAFETY: by the caller it is a node of this tree, which is freed below and not before.
        let node = unsafe { level.node_ref() };
        debug_assert!(node.fifo().is_empty(), "a level that is left has no messages");
        self.tree.unlink(node);
        // SAFETY: by invariant 1 it came from a box; unlinking it took away the last link to it, and
        // by its promise the caller does not use this level again.
        let node = unsafe { level.reclaim() };
        self.pool.put(node, preload);
    }

    #[inline]
    unsafe fn fifo(&mut self, level: NodePtr<K>) -> &mut Fifo {
        // SAFETY: by the caller it is a node of this tree, which `self` borrows alone for as long as
        // it lends the list.
        unsafe { level.fifo() }
    }

    #[inline]
    unsafe fn priority(&self, level: NodePtr<K>) -> K {
        // SAFETY: by the caller it is a node of this tree, and `self` is borrowed.
        let node = unsafe { level.node_ref() };
        *node.key()
    }

    #[inline]
    fn highest(&self) -> Option<NodePtr<K>> {
        self.tree.highest()
    }

    fn find(&self, priority: K) -> Option<NodePtr<K>> {
        self.tree.search(&priority).ok().map(|found| found.ptr())
    }

    fn below(&self, priority: K) -> Option<NodePtr<K>> {
        self.tree.below(&priority).map(|found| found.ptr())
    }

    #[inline]
    fn is_above(a: K, b: K) -> bool {
        a > b
    }

    // For messages to come, beside those that are there. Until there are more, nodes are neither made
    // nor freed from then on, before the lock or under it.
    fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        self.pool.reserve(self.tree.len(), messages)
    }

    fn stats(&self) -> LevelStats {
        let (from_cache, from_preload) = self.pool.hits();
        LevelStats {
            live: self.tree.len(),
            kept: self.pool.len(),
            from_cache,
            from_preload,
            fallback: self.fallback,
        }
    }

    fn validate(&self, each: impl FnMut(K, Fifo)) {
        self.tree.validate(each);
        self.pool.validate();
    }
}

impl<K> fmt::Debug for RbTree<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RbTree")
            .field("live", &self.tree.len())
            .field("kept", &self.pool.len())
            .finish_non_exhaustive()
    }
}
