//! Memory for nodes to come, and for nodes to free after the unlock.
//!
//! ```text
//!   kept, under the lock:   cache | n n n n |  full first   more | n n - - |  what was reserved
//!   preload, outside it:    made  | n |                     surplus -> n -> n
//! ```
//!
//! # Invariants
//!
//! 1. `more` is empty unless the cache is full, so that the cache's hint tells of it as well.
//! 2. `more` has room for what the cache has not of `bound` nodes: keeping one never allocates.
//! 3. The nodes of `surplus` were boxes, and the preload alone has pointers to them.

use std::fmt;

use percpu::AllocError;
use percpu::cache::{self, NodeCache, NodeHint};
use percpu::sync::mutant;

use super::node::{Link, Node, NodePtr};
use percpu::alloc::try_box;

/// A node for a level to come.
pub(super) fn make<K>() -> Result<Box<Node<K>>, AllocError> {
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    super::tests::memory()?;
    try_box(Node::vacant()).map_err(|_| AllocError::new())
}

/// Nodes kept under the lock.
pub(super) struct Kept<K> {
    cache: NodeCache<Box<Node<K>>>,
    /// What the cache cannot take: its limit is fixed, for its hint is known outside the lock.
    more: Vec<Box<Node<K>>>,
    from_more: u64,
    /// Taken from a preload's surplus.
    reused: u64,
    /// How many are kept at most: what the queue's owner wanted, and what was reserved.
    bound: usize,
}

impl<K> Kept<K> {
    pub(super) fn try_new(spare: usize) -> Result<Self, AllocError> {
        // One at least, so that the hint can tell of what is reserved later. With a bound of 0 it
        // stays empty.
        let cache = NodeCache::try_new(spare.max(1))?;
        Ok(Self { cache, more: Vec::new(), from_more: 0, reused: 0, bound: spare })
    }

    pub(super) fn hint(&self) -> NodeHint {
        self.cache.hint()
    }

    pub(super) fn len(&self) -> usize {
        self.cache.len() + self.more.len()
    }

    /// How many came from here, and how many from a preload.
    pub(super) fn taken(&self) -> (u64, u64) {
        let stats = self.cache.stats();
        (stats.from_cache + self.from_more, stats.from_preload + self.reused)
    }

    /// A node that is kept, or one that the preload has.
    #[inline]
    pub(super) fn take(&mut self, preload: &mut Preload<K>) -> Option<Box<Node<K>>> {
        if let Some(node) = self.more.pop() {
            self.from_more += 1;
            return Some(node);
        }
        if let Some(node) = self.cache.take(&mut preload.made) {
            return Some(node);
        }
        // What an earlier removal under the same lock left is memory as well.
        let node = preload.reuse()?;
        self.reused += 1;
        Some(node)
    }

    /// Keeps a node, or leaves it to the preload.
    #[inline]
    pub(super) fn put(&mut self, node: Box<Node<K>>, preload: &mut Preload<K>) {
        if self.len() < self.bound {
            self.push(node);
        } else {
            preload.leave(node);
        }
    }

    /// Keeps what was made for nothing, if there is room.
    #[inline]
    pub(super) fn keep(&mut self, preload: &mut Preload<K>) {
        while self.len() < self.bound || mutant("kept-keeps-without-a-second-look") {
            let Some(node) = preload.made.take() else { return };
            self.push(node);
        }
    }

    /// Adds one to fewer than `bound`.
    fn push(&mut self, node: Box<Node<K>>) {
        // Without a preload the cache hands back what it has no room for.
        if let Err(node) = self.cache.put(node, &mut cache::Preload::<_, 0>::new()) {
            self.more.push(node); // invariant 2: within its capacity
        }
    }

    /// Gets nodes for `messages` levels beside the `live` ones, and from now on keeps all there are.
    ///
    /// On an error what was made is kept.
    pub(super) fn reserve(&mut self, live: usize, messages: usize) -> Result<(), AllocError> {
        if messages == 0 {
            return Ok(());
        }
        // One more than are needed: when none is kept the hint has the next one made, though it is
        // for a level that there is.
        let wanted = messages.checked_add(1).ok_or(AllocError::new())?;
        let all = live.checked_add(wanted.max(self.len())).ok_or(AllocError::new())?;
        let beside = all.saturating_sub(self.cache.limit()).saturating_sub(self.more.len());
        self.more.try_reserve_exact(beside).map_err(|_| AllocError::new())?;
        while self.len() < wanted {
            let node = make()?;
            self.bound = self.bound.max(live + self.len() + 1);
            self.push(node);
        }
        self.bound = self.bound.max(all);
        Ok(())
    }

    /// Checks invariants 1 and 2, and the bound.
    pub(super) fn validate(&self) {
        let (limit, cached, more) = (self.cache.limit(), self.cache.len(), self.more.len());
        assert!(more == 0 || cached == limit, "nodes beside a cache that has room");
        assert!(cached + more <= self.bound, "more nodes kept than may be");
        assert!(self.more.capacity() + limit >= self.bound, "no room for nodes to keep");
        assert_eq!(self.hint().is_short_of(1), cached == 0, "the hint tells of a node");
    }
}

/// Memory for a new level, got before the lock; and nodes to free after the unlock, any number.
#[doc(hidden)]
pub struct Preload<K> {
    made: cache::Preload<Box<Node<K>>>,
    /// A list by parent links, as batches free more nodes than a preload of fixed size takes.
    surplus: Link<K>,
}

impl<K> Preload<K> {
    /// Makes a node if none seems to be kept, and if there is memory.
    #[inline]
    pub(super) fn fill(&mut self, hint: &NodeHint) {
        // An error is no reason to give up: under the lock a node may be found.
        let _ = self.made.try_fill(hint, make);
    }

    fn leave(&mut self, node: Box<Node<K>>) {
        node.set_next(self.surplus);
        self.surplus = Some(NodePtr::leak(node));
    }

    /// One of the surplus.
    fn reuse(&mut self) -> Option<Box<Node<K>>> {
        let first = self.surplus?;
        // SAFETY: invariant 3, and the only pointer to it is overwritten before another use.
        let node = unsafe { first.reclaim() };
        self.surplus = node.take_parent();
        Some(node)
    }
}

impl<K> Default for Preload<K> {
    fn default() -> Self {
        Self { made: cache::Preload::new(), surplus: None }
    }
}

impl<K> Drop for Preload<K> {
    #[inline]
    fn drop(&mut self) {
        while let Some(node) = self.reuse() {
            drop(node);
        }
    }
}

impl<K> fmt::Debug for Preload<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Preload")
            .field("made", &self.made)
            .field("surplus", &self.surplus.is_some())
            .finish()
    }
}
