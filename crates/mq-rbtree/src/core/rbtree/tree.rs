//! The links of the tree: search, link, unlink and rebalance.
//!
//! This module knows neither the messages nor where nodes come from. Edits take `&self`, because a
//! walk borrows the tree that it edits; the links are cells. Only the drop frees nodes.

use std::cell::Cell;
use std::cmp::Ordering;
use std::fmt;

use super::super::levels::Fifo;
use super::node::{Link, Node, NodePtr, NodeRef, Side};

use Side::{Left, Right};

pub(super) struct Tree<K> {
    root: Cell<Link<K>>,
    highest: Cell<Link<K>>,
    len: Cell<usize>,
}

/// The missing child at which a search ended without finding its key.
pub(super) struct InsertionPoint<'a, K> {
    parent: Option<NodeRef<'a, K>>,
    side: Side,
}

impl<K> Tree<K> {
    pub(super) fn new() -> Self {
        Self { root: Cell::new(None), highest: Cell::new(None), len: Cell::new(0) }
    }

    /// Returns the number of nodes.
    pub(super) fn len(&self) -> usize {
        self.len.get()
    }

    /// Returns the last node in order.
    #[inline]
    pub(super) fn highest(&self) -> Link<K> {
        self.highest.get()
    }

    #[inline]
    fn root(&self) -> Option<NodeRef<'_, K>> {
        // SAFETY: by invariant 1 the root is in this tree, which is borrowed for as long as the
        // reference.
        self.root.get().map(|root| unsafe { root.node_ref() })
    }

    /// Returns the node of a key, or the point at which to insert it.
    #[inline]
    pub(super) fn search(&self, key: &K) -> Result<NodeRef<'_, K>, InsertionPoint<'_, K>>
    where
        K: Ord,
    {
        let mut point = InsertionPoint { parent: None, side: Left };
        let mut next = self.root();
        while let Some(at) = next {
            let side = match key.cmp(at.key()) {
                Ordering::Less => Left,
                Ordering::Equal => return Ok(at),
                Ordering::Greater => Right,
            };
            next = at.child(side);
            point = InsertionPoint { parent: Some(at), side };
        }
        Err(point)
    }

    /// Returns the node of the greatest key below this one.
    pub(super) fn below(&self, key: &K) -> Option<NodeRef<'_, K>>
    where
        K: Ord,
    {
        let mut best = None;
        let mut next = self.root();
        while let Some(at) = next {
            next = if at.key() < key {
                best = Some(at);
                at.child(Right)
            } else {
                at.child(Left)
            };
        }
        best
    }

    /// Inserts a node at a point that a search of this tree has just returned.
    #[inline]
    pub(super) fn link<'a>(
        &'a self,
        mut node: Box<Node<K>>,
        key: K,
        point: InsertionPoint<'a, K>,
    ) -> NodePtr<K> {
        node.init_leaf(key);
        let ptr = NodePtr::leak(node);
        // SAFETY: the node is in this tree from here on, and nothing frees it while `'a` borrows
        // the tree.
        let node: NodeRef<'a, K> = unsafe { ptr.node_ref() };
        let parent = point.parent.map(NodeRef::ptr);
        if parent == self.highest.get() && (parent.is_none() || point.side == Right) {
            self.highest.set(Some(ptr));
        }
        match point.parent {
            Some(parent) => parent.set_child(point.side, Some(node)),
            None => self.root.set(Some(ptr)),
        }
        self.len.set(self.len.get() + 1);
        self.insert_fixup(node);
        ptr
    }

    /// Removes a node of this tree, so that no link leads to it. Its own links are left as they
    /// were and mean nothing.
    #[inline]
    pub(super) fn unlink<'a>(&'a self, node: NodeRef<'a, K>) {
        if self.highest.get() == Some(node.ptr()) {
            self.highest.set(predecessor(node).map(NodeRef::ptr));
        }
        self.len.set(self.len.get() - 1);

        // With at most one child, the node's own colour disappears from its path. With two
        // children, the next node in order, which has no left child, moves into its place and takes
        // its colour; then the colour of that next node disappears from its former path.
        let (short, red, orphan) = match (node.child(Left), node.child(Right)) {
            (Some(left), Some(right)) => {
                let next = right.furthest(Left);
                let (red, orphan) = (next.is_red(), next.child(Right));
                let short = match next.parent() {
                    Some(above) if above != node => {
                        above.set_child(Left, orphan);
                        next.set_child(Right, Some(right));
                        (above, Left)
                    }
                    _ => (next, Right),
                };
                self.replace(node, Some(next));
                next.set_child(Left, Some(left));
                next.set_red(node.is_red());
                (Some(short), red, orphan)
            }
            (orphan, None) | (None, orphan) => {
                let short = node.parent().map(|parent| (parent, parent.side_of(node)));
                self.replace(node, orphan);
                (short, node.is_red(), orphan)
            }
        };
        if let Some(orphan) = orphan {
            // By invariant 3 the orphan was red and the removed node black: the orphan takes over
            // the black.
            orphan.set_red(false);
        } else if !red {
            self.remove_fixup(short);
        }
    }

    /// Puts `new`, or nothing, in the place of `old`.
    fn replace<'a>(&'a self, old: NodeRef<'a, K>, new: Option<NodeRef<'a, K>>) {
        match old.parent() {
            Some(parent) => parent.set_child(parent.side_of(old), new),
            None => {
                self.root.set(new.map(NodeRef::ptr));
                if let Some(new) = new {
                    new.set_no_parent();
                }
            }
        }
    }

    /// Rotates: `up`, a child of `at`, takes the place of `at`, and `at` becomes its child.
    ///
    /// ```text
    ///       at            up
    ///      /  \          /  \
    ///     up   c   ->   a    at       or its mirror image
    ///    /  \               /  \
    ///   a    b             b    c
    /// ```
    fn rotate<'a>(&'a self, at: NodeRef<'a, K>, up: NodeRef<'a, K>) {
        let side = at.side_of(up);
        let between = up.child(side.other());
        self.replace(at, Some(up));
        at.set_child(side, between);
        up.set_child(side.other(), Some(at));
    }

    /// Restores invariant 3 after an insertion, where at most one thing is wrong: this red node has
    /// a red parent, or is the root.
    fn insert_fixup<'a>(&'a self, mut node: NodeRef<'a, K>) {
        loop {
            let Some(parent) = node.parent() else { return node.set_red(false) };
            if !parent.is_red() {
                return;
            }
            let Some(above) = parent.parent() else { return parent.set_red(false) };
            let side = above.side_of(parent);
            match above.child(side.other()) {
                Some(uncle) if uncle.is_red() => {
                    // The parent and the uncle become black and the grandparent red: each path has
                    // as many black nodes as before, and the problem moves two levels up.
                    parent.set_red(false);
                    uncle.set_red(false);
                    above.set_red(true);
                    node = above;
                }
                _ => {
                    let middle = if parent.side_of(node) == side {
                        parent
                    } else {
                        self.rotate(parent, node); // moves the red node to the outer side
                        node
                    };
                    middle.set_red(false);
                    above.set_red(true);
                    self.rotate(above, middle);
                    return;
                }
            }
        }
    }

    /// Restores invariant 3 after a removal, where the paths through that side of that node have
    /// one black node too few. `None`: all paths of the tree do, which is no violation.
    fn remove_fixup<'a>(&'a self, mut short: Option<(NodeRef<'a, K>, Side)>) {
        while let Some((parent, side)) = short {
            let other = side.other();
            // The other side has one black node more than this one, so it is not empty.
            let Some(mut sibling) = parent.child(other) else { return };
            if sibling.is_red() {
                // Both children of a red sibling exist and are black, for the same reason. After
                // the rotation the nearer of them is the sibling.
                sibling.set_red(false);
                parent.set_red(true);
                self.rotate(parent, sibling);
                let Some(nearer) = parent.child(other) else { return };
                sibling = nearer;
            }
            let red = |side| sibling.child(side).filter(|nephew| nephew.is_red());
            if let Some(outer) = red(other) {
                outer.set_red(false);
                sibling.set_red(parent.is_red());
                parent.set_red(false);
                return self.rotate(parent, sibling);
            }
            if let Some(inner) = red(side) {
                inner.set_red(parent.is_red());
                parent.set_red(false);
                self.rotate(sibling, inner);
                return self.rotate(parent, inner);
            }
            // Now the sibling's paths have one black node too few as well. A red parent becomes
            // black and makes up for it; below a black parent the problem moves one level up.
            sibling.set_red(true);
            if parent.is_red() {
                return parent.set_red(false);
            }
            short = parent.parent().map(|above| (above, above.side_of(parent)));
        }
    }

    /// Checks all invariants, and passes each level to `each`, highest first.
    pub(super) fn validate(&self, mut each: impl FnMut(K, Fifo))
    where
        K: Ord + Copy + fmt::Debug,
    {
        let highest = self.root().map(|root| root.furthest(Right));
        assert!(self.highest.get() == highest.map(NodeRef::ptr), "highest is the last in order");
        if let Some(root) = self.root() {
            assert!(!root.is_red() && root.parent().is_none(), "a root is black, without a parent");
        }
        let (mut seen, mut blacks, mut above) = (0, None, None);
        for at in std::iter::successors(highest, |&at| predecessor(at)) {
            seen += 1;
            assert!(seen <= self.len(), "more nodes than were counted");
            let key = *at.key();
            assert!(above.is_none_or(|above| key < above), "{key:?} is before {above:?}");
            above = Some(key);
            for side in [Left, Right] {
                let Some(child) = at.child(side) else {
                    let here = blacks_above(at);
                    assert_eq!(*blacks.get_or_insert(here), here, "black nodes down to {key:?}");
                    continue;
                };
                assert!(child.parent() == Some(at), "a child of {key:?} has another parent");
                assert!(!(at.is_red() && child.is_red()), "{key:?} and a child are red");
            }
            let fifo = at.fifo();
            assert!(!fifo.is_empty() && fifo.len > 0, "{key:?} has no messages");
            each(key, fifo);
        }
        assert_eq!(seen, self.len(), "fewer nodes than were counted");
    }
}

/// Returns the previous node in order.
fn predecessor<K>(at: NodeRef<'_, K>) -> Option<NodeRef<'_, K>> {
    if let Some(lower) = at.child(Left) {
        return Some(lower.furthest(Right));
    }
    let mut at = at;
    while let Some(parent) = at.parent() {
        if parent.side_of(at) == Right {
            return Some(parent);
        }
        at = parent;
    }
    None
}

/// Counts the black nodes on the path from here to the root.
fn blacks_above<K>(at: NodeRef<'_, K>) -> usize {
    std::iter::successors(Some(at), |at| at.parent()).filter(|at| !at.is_red()).count()
}

/// Frees the nodes from the leaves up, in constant space.
impl<K> Drop for Tree<K> {
    fn drop(&mut self) {
        let mut next = self.root.take();
        while let Some(ptr) = next {
            // SAFETY: by invariant 1 the node is in this tree, which is borrowed as `&mut`. It is
            // reclaimed below, after the last use of this reference.
            let at = unsafe { ptr.node_ref() };
            let lower = at.take_child(Left).or_else(|| at.take_child(Right));
            next = lower.or_else(|| at.take_parent());
            if lower.is_none() {
                // SAFETY: by invariant 1 the node came from a box. Its parent's link was taken on
                // the way down, its children are gone, and `highest` is not followed any more.
                drop(unsafe { ptr.reclaim() });
            }
        }
    }
}
