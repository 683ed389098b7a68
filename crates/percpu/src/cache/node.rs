//! Nodes for a structure behind a lock, without allocating or freeing while it is held.
//!
//! Three rules, from Linux: make the node before the lock is taken, and only if none seems to be
//! kept; keep up to k freed nodes inside the lock; look again under the lock, and hand back what
//! is too much, so that it is freed after the unlock.
//!
//! ```text
//!   outside the lock            inside                          outside again
//!
//!   hint: short? -> make        keep(spare), take()             drop(preload): frees
//!        Preload  ------------>  NodeCache: | n n n - |  -----> what came back
//!                               put(freed)
//! ```
//!
//! The hint is a relaxed atomic that the cache writes under the lock. It may be out of date: then
//! one node was made for nothing, or none was made where one is needed, and `take` gives `None`.
//!
//! Source: "ipc/mqueue: add rbtree node caching support" (Linux 3.5, `ipc/mqueue.c`) and "xfs:
//! don't allocate new buffers on every call to _xfs_buf_find" (Linux 3.2). Ours keeps k nodes
//! rather than one, and counts.
//!
//! # Invariants
//!
//! 1. `nodes` has room for `limit` nodes and never holds more: no push allocates.
//! 2. The hint is `min(nodes.len(), TOLD)` whenever the lock is not held.
//! 3. No node is dropped here but with the cache or the preload themselves.

use std::fmt;

use crate::error::{AllocError, out_of_memory};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// The hint counts up to here, so that it is written only when nodes run short and other CPUs keep
/// their copy of its line. A guess: more than one operation needs.
const TOLD: usize = 4;

/// Up to k nodes kept inside the lock of the structure that they are for.
///
/// `N` owns a node: a `Box<Node>`, or a boxed page of nodes for a slab. All operations take
/// constant time, allocate nothing, drop nothing, and never wait; the lock around the cache is the
/// caller's.
///
/// ```
/// use std::collections::LinkedList; // stands for a tree of our own
/// use percpu::cache::{NodeCache, NodeHint, Preload};
///
/// struct Node { key: u64 }
/// struct Queue { nodes: Vec<Box<Node>>, spare: NodeCache<Box<Node>> }
/// struct Shared { hint: NodeHint, queue: std::sync::Mutex<Queue> }
///
/// let spare = NodeCache::new(8);
/// let nodes = Vec::with_capacity(100);
/// let shared = Shared { hint: spare.hint(), queue: Queue { nodes, spare }.into() };
///
/// let insert = |key| {
///     // Before the guard, so that it drops after it: whatever is left in it is freed unlocked.
///     let mut preload = Preload::<_>::new();
///     preload.fill(&shared.hint, || Box::new(Node { key: 0 })); // seldom makes one
///     let mut queue = shared.queue.lock().unwrap();
///     // `None`, if another thread took the spare in between: make one here, or unlock and retry.
///     let taken = queue.spare.take(&mut preload);
///     let mut node = taken.unwrap_or_else(|| Box::new(Node { key: 0 }));
///     node.key = key;
///     queue.nodes.push(node);
///     queue.spare.keep(&mut preload); // one made for nothing is the next one's
/// };
/// let remove = || {
///     let mut preload = Preload::<_>::new();
///     let mut queue = shared.queue.lock().unwrap();
///     let node = queue.nodes.pop()?;
///     let key = node.key;
///     let surplus = queue.spare.put(node, &mut preload);
///     drop(queue);
///     drop(surplus); // `Ok` here: a new preload has room for what the cache has not
///     Some(key)
/// };
/// insert(1);
/// insert(2);
/// assert_eq!((remove(), remove(), remove()), (Some(2), Some(1), None));
/// insert(3); // with a node of the two above
/// assert_eq!(shared.queue.lock().unwrap().spare.stats().from_cache, 1);
/// ```
pub struct NodeCache<N> {
    nodes: Vec<N>,
    limit: usize,
    hint: NodeHint,
    stats: NodeStats,
}

/// Tells from outside the lock whether a [`NodeCache`] seems to have nodes. Cheap to clone.
///
/// Stays valid after the cache is gone, and then says what it said last.
#[derive(Clone)]
pub struct NodeHint {
    /// An allocation of its own: the cache may move, and the structure around it is not shared.
    spare: Arc<AtomicUsize>,
}

/// Nodes made before the lock, and nodes to free after it: up to `K` of either.
///
/// Declare it before the lock's guard: Rust drops locals in reverse, so it frees what is left in it
/// after the unlock, also if the code in between panics. Never allocates by itself.
pub struct Preload<N, const K: usize = 1> {
    made: [Option<N>; K],
    surplus: [Option<N>; K],
}

/// How often a [`NodeCache`] could help, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStats {
    /// `take` gave a node that was kept.
    pub from_cache: u64,
    /// `take` gave the node that was made before the lock.
    pub from_preload: u64,
    /// `take` had nothing to give: the hint was out of date, or its preload not filled.
    pub missed: u64,
    /// `put` and `keep` kept a node.
    pub kept: u64,
    /// `put` found the cache full, and the node came back.
    pub surplus: u64,
}

impl fmt::Display for NodeStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from_cache, from_preload, missed, kept, surplus } = self;
        write!(f, "take: {from_cache} kept ones, {from_preload} made before, {missed} missed; ")?;
        write!(f, "put: {kept} kept, {surplus} surplus")
    }
}

impl NodeHint {
    /// True if fewer than `nodes` seem to be kept. Wait-free: one load. Counts up to 4.
    #[inline]
    #[must_use]
    pub fn is_short_of(&self, nodes: usize) -> bool {
        // Ordering: Relaxed; a hint, the lock orders what it is about.
        self.spare.load(Ordering::Relaxed) < nodes.min(TOLD)
    }
}

impl<N> NodeCache<N> {
    /// Makes a cache that keeps up to `limit` nodes, and keeps none yet.
    ///
    /// With 0 it keeps nothing, and each node is one made before the lock or the caller's own.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory, or never could be for so many;
    /// [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self::try_new(limit).unwrap_or_else(|_| out_of_memory::<N>(limit))
    }

    /// Makes a cache that keeps up to `limit` nodes, and keeps none yet.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the list of them.
    ///
    /// # Aborts
    ///
    /// Like `Arc::new`, if there is none for the 24 bytes of the hint, of which that is the only
    /// allocator in stable Rust.
    pub fn try_new(limit: usize) -> Result<Self, AllocError> {
        let mut nodes = Vec::new();
        nodes.try_reserve_exact(limit).map_err(|_| AllocError::new())?;
        Ok(Self::with(nodes, limit))
    }

    fn with(nodes: Vec<N>, limit: usize) -> Self {
        let hint = NodeHint { spare: Arc::new(AtomicUsize::new(0)) };
        Self { nodes, limit, hint, stats: NodeStats::default() }
    }

    /// What may be asked without the lock.
    #[must_use]
    pub fn hint(&self) -> NodeHint {
        self.hint.clone()
    }

    /// A node that is kept, or one that was made; `None` if there is neither.
    ///
    /// A kept node is as its last user left it.
    #[inline]
    pub fn take<const K: usize>(&mut self, preload: &mut Preload<N, K>) -> Option<N> {
        if let Some(node) = self.nodes.pop() {
            self.tell();
            self.stats.from_cache += 1;
            return Some(node);
        }
        let made = preload.take();
        *(if made.is_some() { &mut self.stats.from_preload } else { &mut self.stats.missed }) += 1;
        made
    }

    /// Keeps a node that is not needed any more, or leaves it to `preload` to be freed after the
    /// unlock.
    ///
    /// # Errors
    ///
    /// The node itself, if there is room in neither: the `K + 1`st surplus of one preload, or one
    /// made for `K` of 0. To be dropped after the unlock.
    #[inline]
    pub fn put<const K: usize>(&mut self, node: N, preload: &mut Preload<N, K>) -> Result<(), N> {
        if self.nodes.len() < self.limit {
            self.push(node);
            return Ok(());
        }
        self.stats.surplus += 1;
        preload.leave(node)
    }

    /// Keeps what `preload` still has of nodes that were made, as far as there is room: the
    /// second look under the lock. What finds no room is freed with the preload.
    #[inline]
    pub fn keep<const K: usize>(&mut self, preload: &mut Preload<N, K>) {
        while self.nodes.len() < self.limit {
            let Some(node) = preload.take() else { return };
            self.push(node);
        }
    }

    /// Takes out a node that is kept, to give memory back: unlock before dropping it.
    pub fn pop(&mut self) -> Option<N> {
        let node = self.nodes.pop()?;
        self.tell();
        Some(node)
    }

    /// How many nodes are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True if none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// How many nodes are kept at most.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How often it could help.
    #[must_use]
    pub fn stats(&self) -> NodeStats {
        self.stats
    }

    fn push(&mut self, node: N) {
        self.nodes.push(node); // invariant 1: within its capacity, so it does not allocate
        self.stats.kept += 1;
        self.tell();
    }

    /// Makes invariant 2 true again after the length changed by one.
    #[inline]
    fn tell(&self) {
        let told = self.nodes.len().min(TOLD);
        // Ordering: Relaxed, both; a hint, and the caller's lock orders the writers.
        if self.hint.spare.load(Ordering::Relaxed) != told {
            self.hint.spare.store(told, Ordering::Relaxed);
        }
    }
}

impl<N, const K: usize> Preload<N, K> {
    /// Makes one with nothing in it.
    #[must_use]
    pub const fn new() -> Self {
        Self { made: [const { None }; K], surplus: [const { None }; K] }
    }

    /// Makes nodes, before the lock, for an operation that needs up to `K`: none if the cache seems
    /// to have as many.
    ///
    /// A panic of `make` passes through, and leaves what was made.
    #[inline]
    pub fn fill(&mut self, hint: &NodeHint, mut make: impl FnMut() -> N) {
        let filled = self.try_fill(hint, || Ok::<N, std::convert::Infallible>(make()));
        filled.unwrap_or_else(|never| match never {});
    }

    /// Makes nodes as [`fill`](Self::fill) does, if there is memory for them.
    ///
    /// # Errors
    ///
    /// The first error of `make`; what was made before it is there. The operation may still find a
    /// node kept under the lock, so this alone is no reason to give up.
    #[inline]
    pub fn try_fill<E>(
        &mut self,
        hint: &NodeHint,
        mut make: impl FnMut() -> Result<N, E>,
    ) -> Result<(), E> {
        if !hint.is_short_of(K) {
            return Ok(());
        }
        for slot in self.made.iter_mut().filter(|slot| slot.is_none()) {
            *slot = Some(make()?);
        }
        Ok(())
    }

    /// Adds a node that was made before the lock for a reason of the caller's own: a look-up that
    /// missed.
    ///
    /// # Errors
    ///
    /// The node itself, if `K` were made already.
    pub fn push(&mut self, node: N) -> Result<(), N> {
        store(&mut self.made, node)
    }

    /// A node that was made, if one is left.
    #[inline]
    pub fn take(&mut self) -> Option<N> {
        self.made.iter_mut().find_map(Option::take)
    }

    /// Keeps `node` until the preload drops, which is after the unlock.
    ///
    /// # Errors
    ///
    /// The node itself, if `K` were left already.
    #[inline]
    pub fn leave(&mut self, node: N) -> Result<(), N> {
        store(&mut self.surplus, node)
    }
}

/// Puts `node` into the first free place, or gives it back.
fn store<N>(places: &mut [Option<N>], node: N) -> Result<(), N> {
    match places.iter_mut().find(|place| place.is_none()) {
        Some(place) => *place = Some(node),
        None => return Err(node),
    }
    Ok(())
}

impl<N, const K: usize> Default for Preload<N, K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<N> fmt::Debug for NodeCache<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCache")
            .field("len", &self.nodes.len())
            .field("limit", &self.limit)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NodeHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ordering: Relaxed; as in `is_short_of`.
        f.debug_tuple("NodeHint").field(&self.spare.load(Ordering::Relaxed)).finish()
    }
}

impl<N, const K: usize> fmt::Debug for Preload<N, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |places: &[Option<N>]| places.iter().flatten().count();
        f.debug_struct("Preload")
            .field("made", &count(&self.made))
            .field("surplus", &count(&self.surplus))
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn the_hint_says_what_is_kept_up_to_four() {
        let mut cache = NodeCache::try_new(6).unwrap();
        let hint = cache.hint();
        assert!(hint.is_short_of(1) && !hint.is_short_of(0));
        for kept in 1..=6 {
            cache.put(kept, &mut Preload::<_>::new()).unwrap();
            for wanted in 0..=4 {
                assert_eq!(hint.is_short_of(wanted), kept < wanted);
            }
        }
        assert!(!hint.is_short_of(100), "it does not count further");
        while cache.pop().is_some() {
            assert_eq!(hint.is_short_of(2), cache.len() < 2);
        }
        assert!(cache.is_empty());
        drop(cache);
        assert!(hint.is_short_of(1));
    }

    #[test]
    fn nodes_come_from_the_cache_then_from_the_preload_then_not_at_all() {
        let mut cache = NodeCache::new(2);
        let mut preload = Preload::<i32, 2>::new();
        let mut next = 0..;
        preload.fill(&cache.hint(), || next.next().unwrap());
        assert_eq!(format!("{preload:?}"), "Preload { made: 2, surplus: 0, .. }");
        assert_eq!(preload.push(9), Err(9));
        cache.put(7, &mut preload).unwrap();
        let taken: Vec<_> = (0..4).map(|_| cache.take(&mut preload)).collect();
        assert_eq!(taken, [Some(7), Some(0), Some(1), None]);

        preload.fill(&cache.hint(), || next.next().unwrap());
        cache.keep(&mut preload);
        assert_eq!((cache.len(), cache.limit(), preload.take()), (2, 2, None));
        for surplus in [4, 5] {
            cache.put(surplus, &mut preload).unwrap();
        }
        assert_eq!(cache.put(6, &mut preload), Err(6));
        preload.fill(&cache.hint(), || unreachable!("two are kept"));
        assert_eq!(
            cache.stats(),
            NodeStats { from_cache: 1, from_preload: 2, missed: 1, kept: 3, surplus: 3 }
        );
        assert_eq!(
            cache.stats().to_string(),
            "take: 1 kept ones, 2 made before, 1 missed; put: 3 kept, 3 surplus"
        );
    }

    #[test]
    fn a_failure_of_make_keeps_what_was_made() {
        let mut cache = NodeCache::new(2);
        let mut preload = Preload::<u8, 2>::default();
        let left = Cell::new(1_u8);
        let make = || left.replace(0).checked_sub(1).map(|_| 7).ok_or(AllocError::new());
        assert_eq!(preload.try_fill(&cache.hint(), make), Err(AllocError::new()));
        assert_eq!((cache.take(&mut preload), cache.take(&mut preload)), (Some(7), None));
    }

    /// What is shared and what is sent, as the nodes are.
    #[expect(dead_code, reason = "compiling is the test")]
    fn marker<'a>(cache: NodeCache<&'static u8>) -> NodeCache<&'a u8> {
        fn send<T: Send>() {}
        fn sync<T: Sync>() {}
        send::<NodeCache<Cell<u8>>>();
        send::<Preload<Cell<u8>>>();
        sync::<NodeCache<u8>>();
        sync::<NodeHint>();
        send::<NodeHint>();
        cache
    }
}
