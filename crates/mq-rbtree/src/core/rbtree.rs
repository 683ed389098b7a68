//! A red-black tree of priorities, for keys of any ordered type, and the nodes kept for it.
//!
//! ```text
//!   root ------------> | 20 |                 highest ----+
//!                      /    \                             |
//!                 | 10 |    | 40 |                        |
//!                              \                          v
//!                              | 50 | link, key, fifo  <--+
//!
//!   outside the lock               under the lock                  outside the lock
//!
//!   hint: no node? -> allocate     a level appears: pool, or preload --> tree
//!        Preload -> n ---------->  a level goes: tree --> pool -> n -> n, or preload --> Preload frees
//! ```
//!
//! The tree is that of the crate intrusive-collections. Each node is a box of its own, so a [`NodePtr`] to it
//! stays valid until its level is removed, whatever happens to other levels.
//!
//! A node is allocated before the lock, and only if the pool seems to be empty. The pool keeps up to `bound`
//! removed nodes. An operation looks at the pool again under the lock. A node that finds no room in the pool
//! is freed after the unlock.
//!
//! Comparing keys is the user's code, and may panic. Comparisons run only in a search, in `below`, and in
//! `is_above` for the reserves, before anything is changed, so a panic leaves the tree as it was.
//!
//! The links do not depend on the order: with an inconsistent order a search may miss a key, or a key may
//! occur twice, but no node is lost.
//!
//! Source: "ipc/mqueue: add rbtree node caching support" (Linux 3.5, `ipc/mqueue.c`), also for the cached
//! highest node, and "xfs: don't allocate new buffers on every call to _xfs_buf_find" (Linux 3.2).
//!
//! # Invariants
//!
//! 1. Every node in the tree has a key. A [`NodePtr`] that was given out leads to a node of the tree until its
//!    level is removed.
//! 2. `highest` is the last node in order.
//! 3. With a consistent order, keys increase strictly. Between two operations no node has an empty FIFO.
//! 4. The pool holds at most `bound` nodes.
//! 5. Whenever the lock is not held, the hint is true exactly if the pool is not empty.

use std::alloc::Layout;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use intrusive_collections::rbtree::{Entry, InsertCursor};
use intrusive_collections::{
    Bound, KeyAdapter, RBTree, RBTreeLink, SinglyLinkedList, intrusive_adapter,
};
use offlock_sync::AllocError;
use offlock_sync::alloc::try_box;
use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::check;

use super::levels::{Fifo, Levels, sealed::Sealed};
use crate::stats::LevelStats;

/// A node: in the tree, in the pool, or in a preload.
pub(super) struct Node<K> {
    /// Of the tree, or of a list of free nodes.
    link: RBTreeLink,
    /// Initialised in every node of the tree; possibly not in others. Never dropped, because keys are `Copy`.
    key: MaybeUninit<K>,
    fifo: Fifo,
}

// A search reads one cache line of each node on its path, if the allocator places it in one.
const _: () = assert!(size_of::<Node<u64>>() == 48);

intrusive_adapter!(NodeAdapter<K> = Box<Node<K>>: Node<K> { link => RBTreeLink });

impl<'a, K: Copy> KeyAdapter<'a> for NodeAdapter<K> {
    type Key = K;

    #[inline]
    fn get_key(&self, node: &'a Node<K>) -> K {
        // SAFETY: only the tree asks for keys, and by invariant 1 its nodes have one.
        unsafe { node.key.assume_init() }
    }
}

/// Allocates a node for a new level.
fn try_new_node<K>() -> Result<Box<Node<K>>, AllocError> {
    let key = MaybeUninit::uninit();
    try_box(Node { link: RBTreeLink::new(), key, fifo: Fifo::EMPTY }).map_err(|_| AllocError::new())
}

/// A pointer to a node of the tree. It does not show how long the node lives.
#[doc(hidden)]
pub struct NodePtr<K>(NonNull<Node<K>>);

// SAFETY: the pointer itself gives no access. The node belongs to the owner of its tree and moves between
// threads with that owner, as a `Box<Node<K>>` would, for which `K: Send` suffices.
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

/// A list of nodes that are in no tree; adding one allocates nothing.
///
/// As a preload it has the node that was allocated before the lock for a new level, and the nodes to
/// free after the unlock.
#[doc(hidden)]
pub struct NodeList<K> {
    nodes: SinglyLinkedList<NodeAdapter<K>>,
    len: usize,
}

impl<K> NodeList<K> {
    /// Allocates a node if the pool seems to be empty and the list is.
    #[inline]
    fn fill(&mut self, hint: &NodeHint) {
        if hint.is_empty() && self.len == 0 {
            // A failure is not reported: under the lock the pool may have a node.
            try_new_node().ok().into_iter().for_each(|node| self.push(node));
        }
    }

    #[inline]
    fn push(&mut self, node: Box<Node<K>>) {
        self.nodes.push_front(node);
        self.len += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Box<Node<K>>> {
        let node = self.nodes.pop_front()?;
        self.len -= 1;
        Some(node)
    }
}

impl<K> Default for NodeList<K> {
    fn default() -> Self {
        Self { nodes: SinglyLinkedList::new(NodeAdapter::new()), len: 0 }
    }
}

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
    tree: RBTree<NodeAdapter<K>>,
    highest: Option<NodePtr<K>>,
    len: usize,
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
        let tree = RBTree::new(NodeAdapter::new());
        Self { tree, highest: None, len: 0, pool: NodePool::new(spare), fallback: 0 }
    }

    fn hint(&self) -> NodeHint {
        self.pool.hint.clone()
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
        let level = match self.tree.entry(&priority) {
            Entry::Occupied(at) => at.get_ptr().map(NodePtr),
            Entry::Vacant(point) => {
                let node = match self.pool.take(preload) {
                    Some(node) => node,
                    None => {
                        let node = try_new_node()?;
                        self.fallback += 1;
                        node
                    }
                };
                self.len += 1;
                link(point, node, priority, &mut self.highest)
            }
        };
        self.pool.keep(preload);
        level.ok_or_else(AllocError::new)
    }

    #[inline]
    fn get_or_insert_no_alloc(&mut self, priority: K) -> Option<NodePtr<K>> {
        match self.tree.entry(&priority) {
            Entry::Occupied(at) => at.get_ptr().map(NodePtr),
            Entry::Vacant(point) => {
                let node = self.pool.take(&mut NodeList::default())?;
                self.len += 1;
                link(point, node, priority, &mut self.highest)
            }
        }
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
        // SAFETY: the caller guarantees a node of this tree.
        let mut at = unsafe { self.tree.cursor_mut_from_ptr(level.0.as_ptr()) };
        if self.highest == Some(level) {
            self.highest = at.peek_prev().get_ptr().map(NodePtr);
        }
        let Some(node) = at.remove() else { unreachable!("a level has a node") };
        debug_assert!(node.fifo.is_empty(), "a level that is left has no messages");
        self.len -= 1;
        self.pool.put(node, preload);
    }

    #[inline]
    unsafe fn fifo(&mut self, level: NodePtr<K>) -> &mut Fifo {
        // SAFETY: the caller guarantees a node of this tree. `&mut self` is borrowed for as long as
        // the FIFO is, so nothing else reaches the node.
        unsafe { &mut (*level.0.as_ptr()).fifo }
    }

    #[inline]
    unsafe fn priority(&self, level: NodePtr<K>) -> K {
        // SAFETY: the caller guarantees a node of this tree, which is borrowed during the call.
        let node = unsafe { level.0.as_ref() };
        // SAFETY: by invariant 1 it has a key.
        unsafe { node.key.assume_init() }
    }

    #[inline]
    fn highest(&self) -> Option<NodePtr<K>> {
        self.highest
    }

    fn below(&self, priority: K) -> Option<NodePtr<K>> {
        self.tree.upper_bound(Bound::Excluded(&priority)).get_ptr().map(NodePtr)
    }

    #[inline]
    fn is_above(a: K, b: K) -> bool {
        a > b
    }

    // The reserved nodes are for new levels, beside those that exist. Until there are more levels
    // than that, nodes are neither allocated nor freed any more, before the lock or under it.
    fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        self.pool.reserve(self.len, messages)
    }

    fn stats(&self) -> LevelStats {
        LevelStats {
            live: self.len,
            kept: self.pool.len(),
            from_cache: self.pool.from_pool,
            from_preload: self.pool.from_preload,
            fallback: self.fallback,
        }
    }

    fn validate(&self, mut each: impl FnMut(K, Fifo)) {
        let last = self.tree.back().get_ptr().map(NodePtr);
        assert!(self.highest == last, "highest is the last in order");
        let (mut seen, mut above) = (0, None);
        for node in self.tree.iter().rev() {
            seen += 1;
            // SAFETY: by invariant 1 it has a key.
            let key = unsafe { node.key.assume_init() };
            assert!(above.is_none_or(|above| key < above), "{key:?} is before {above:?}");
            above = Some(key);
            assert!(!node.fifo.is_empty() && node.fifo.len > 0, "{key:?} has no messages");
            each(key, node.fifo);
        }
        assert_eq!(seen, self.len, "the nodes of the tree are counted");
        self.pool.validate();
    }
}

/// Puts a node into the tree, for a new level. Always returns its pointer.
#[inline(always)]
fn link<K>(
    point: InsertCursor<'_, NodeAdapter<K>>,
    mut node: Box<Node<K>>,
    key: K,
    highest: &mut Option<NodePtr<K>>,
) -> Option<NodePtr<K>> {
    node.key.write(key);
    node.fifo = Fifo::EMPTY;
    let at = point.insert(node);
    let level = at.get_ptr().map(NodePtr);
    if at.peek_next().is_null() {
        *highest = level;
    }
    level
}

impl<K> fmt::Debug for RbTree<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RbTree")
            .field("live", &self.len)
            .field("kept", &self.pool.len())
            .finish_non_exhaustive()
    }
}

/// The nodes that are kept under the lock.
struct NodePool<K> {
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
    fn is_empty(&self) -> bool {
        // Ordering: Relaxed; a hint. The operation checks again under the lock, which orders the
        // nodes.
        !self.0.load(Ordering::Relaxed)
    }
}

impl<K> NodePool<K> {
    /// Creates an empty pool that keeps up to `bound` nodes.
    fn new(bound: usize) -> Self {
        let hint = NodeHint(Arc::new(AtomicBool::new(false)));
        Self { nodes: NodeList::default(), bound, hint, from_pool: 0, from_preload: 0 }
    }

    fn len(&self) -> usize {
        self.nodes.len
    }

    /// Takes a node from the pool, or else from the preload.
    #[inline]
    fn take(&mut self, preload: &mut NodeList<K>) -> Option<Box<Node<K>>> {
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
    fn lend(&mut self, preload: &mut NodeList<K>) -> bool {
        if preload.len == 0 {
            self.nodes.pop().into_iter().for_each(|node| preload.push(node));
            self.update_hint();
        }
        preload.len != 0
    }

    /// Keeps a removed node if there is room; otherwise leaves it to the preload.
    #[inline]
    fn put(&mut self, node: Box<Node<K>>, preload: &mut NodeList<K>) {
        if self.len() < self.bound {
            self.push(node);
        } else {
            preload.push(node);
        }
    }

    /// Keeps a node of the preload that was not used, if there is room.
    #[inline]
    fn keep(&mut self, preload: &mut NodeList<K>) {
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
    fn reserve(&mut self, live: usize, messages: usize) -> Result<(), AllocError> {
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

    /// Restores invariant 5. Stores only a changed value, so that other CPUs keep their copy of the
    /// cache line.
    #[inline]
    fn update_hint(&self) {
        // Ordering: Relaxed, both; a hint that publishes nothing. The lock orders its writers.
        if self.hint.is_empty() != (self.nodes.len == 0) {
            self.hint.0.store(self.nodes.len != 0, Ordering::Relaxed);
        }
    }

    /// Checks invariants 4 and 5.
    fn validate(&self) {
        assert!(self.len() <= self.bound, "more nodes kept than may be");
        assert_eq!(self.hint.is_empty(), (self.nodes.len == 0), "the hint tells of a node");
    }
}
