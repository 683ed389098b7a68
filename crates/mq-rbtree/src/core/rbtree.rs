//! A red-black tree of priorities, for keys of any ordered type.
//!
//! ```text
//!   root ------------> | 20 black |            highest ----+
//!                       /        \                         |
//!              | 10 black |    | 40 black |                |
//!                                  /      \                v
//!                          | 30 red |    | 50 red | key, fifo, parent
//!
//!   a level appears:   pool, preload, or allocator --> node --> tree
//!   a level goes:      tree --> node --> pool, or the preload, which frees it after the unlock
//! ```
//!
//! Each node is a box of its own. A [`NodePtr`] to it stays valid until its level is removed,
//! whatever happens to other levels: rebalancing changes links and never moves keys.
//!
//! Comparing keys is the user's code, and may panic. Comparisons run only in a search and in
//! `below`, before anything is changed, so a panic leaves the tree as it was. The links do not
//! depend on the order: with an inconsistent order a search may miss a key, or a key may occur
//! twice, but the tree stays balanced and loses no node.
//!
//! Source: Cormen, Leiserson, Rivest, Stein, "Introduction to Algorithms", with the two mirrored
//! cases folded into one. There are two changes. A removed node's successor is moved into its
//! place, where the book copies the successor's key. The highest node is cached, as in the Linux
//! kernel's `ipc/mqueue.c`.
//!
//! # Invariants
//!
//! 1. Every link of the tree, and of a node in it, leads to a node of the same tree. That node was
//!    leaked from a box and has a key. It is freed only with `&mut RbTree`, after the last link to
//!    it is gone.
//! 2. The parent link of a child leads back to the node that has it as a child. The root has no
//!    parent.
//! 3. The root is black. A red node has no red child. All paths from a node down to a missing child
//!    contain the same number of black nodes.
//! 4. `highest` is the last node in order: the rightmost one.
//! 5. With a consistent order, keys increase strictly from left to right.
//! 6. Between two operations no node has an empty FIFO.

mod node;
mod pool;
mod tree;

use std::fmt;

use offlock_sync::AllocError;

use self::node::NodePtr;
use self::pool::{NodeHint, NodeList, NodePool, try_new_node};
use self::tree::Tree;
use super::levels::Fifo;
use super::levels::{Levels, sealed::Sealed};
use crate::stats::LevelStats;

/// Levels for priorities of any ordered type: a red-black tree with one node for each priority that
/// has messages.
///
/// The greatest key is served first. To serve the least key first, wrap keys in
/// [`Reverse`](std::cmp::Reverse). The highest level is found without a search. A send searches the
/// tree, with at most twice log2 of the number of priorities as comparisons, and needs a node only
/// if its priority has no messages yet.
///
/// Comparisons run under the queue's lock. If one panics, the queue is unchanged. With an
/// inconsistent order messages may be received in any order, and none is lost.
///
/// ```
/// use std::cmp::Reverse;
/// use mq_rbtree::{Queue, RbTree};
///
/// let deadlines: Queue<&str, RbTree<Reverse<u64>>> = Queue::with_keys(8)?;
/// deadlines.send("due at 90", Reverse(90))?;
/// deadlines.send("due at 30", Reverse(30))?;
/// assert_eq!(deadlines.receive()?, ("due at 30", Reverse(30)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    type Preload = NodeList<K>;
    type Level = NodePtr<K>;

    fn new(spare: usize) -> Self {
        Self { tree: Tree::new(), pool: NodePool::new(spare), fallback: 0 }
    }

    fn hint(&self) -> NodeHint {
        self.pool.hint()
    }

    fn check(_: K) -> Result<(), u32> {
        Ok(())
    }

    #[inline]
    fn needs_memory(hint: &NodeHint) -> bool {
        hint.is_empty()
    }

    #[inline]
    fn preload(hint: &NodeHint, preload: &mut NodeList<K>) {
        preload.fill(hint);
    }

    fn keep_preload(&mut self, preload: &mut NodeList<K>) {
        self.pool.keep(preload);
    }

    #[inline]
    fn get_or_insert(
        &mut self,
        priority: K,
        preload: &mut NodeList<K>,
    ) -> Result<NodePtr<K>, AllocError> {
        // The search runs the last comparisons, which may panic: nothing has changed before it.
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
        let node = self.pool.take(&mut NodeList::default())?;
        Some(self.tree.link(node, priority, point))
    }

    fn take_lent_memory(&mut self, preload: &mut NodeList<K>) -> Result<(), AllocError> {
        if !self.pool.lend(preload) {
            preload.push(try_new_node()?);
            self.fallback += 1;
        }
        Ok(())
    }

    #[inline]
    unsafe fn remove(&mut self, level: NodePtr<K>, preload: &mut NodeList<K>) {
        // SAFETY: the caller guarantees a node of this tree. It is freed below, after the last use
        // of this reference.
        let node = unsafe { level.node_ref() };
        debug_assert!(node.fifo().is_empty(), "a level that is left has no messages");
        self.tree.unlink(node);
        // SAFETY: by invariant 1 the node came from a box, and `unlink` removed the last link to
        // it. The caller does not use a level again that it has removed.
        let node = unsafe { level.reclaim() };
        self.pool.put(node, preload);
    }

    #[inline]
    unsafe fn fifo(&mut self, level: NodePtr<K>) -> &mut Fifo {
        // SAFETY: the caller guarantees a node of this tree. `&mut self` is borrowed for as long as
        // the FIFO is, so nothing else reaches the node.
        unsafe { level.fifo() }
    }

    #[inline]
    unsafe fn priority(&self, level: NodePtr<K>) -> K {
        // SAFETY: the caller guarantees a node of this tree, which is borrowed during the call.
        let node = unsafe { level.node_ref() };
        *node.key()
    }

    #[inline]
    fn highest(&self) -> Option<NodePtr<K>> {
        self.tree.highest()
    }

    fn below(&self, priority: K) -> Option<NodePtr<K>> {
        self.tree.below(&priority).map(|found| found.ptr())
    }

    #[inline]
    fn is_above(a: K, b: K) -> bool {
        a > b
    }

    // The reserved nodes are for new levels, beside those that exist. Until there are more levels
    // than that, nodes are neither allocated nor freed any more, before the lock or under it.
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
