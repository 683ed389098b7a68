//! Searches: the next entry, the previous one, and a cursor over many.
//!
//! A search finds an entry that is present from its beginning to its end, because an entry never changes
//! its node. The exception is the entry of key 0, which moves to the root word when the tree shrinks, and
//! back when it grows. The node that it leaves keeps it, too (invariant 2).

use percpu::sync::atomic::Ordering;

use super::node::{Node, NodePtr};
use super::radix::Tree;
use super::word::{BITS, FANOUT, MASK, MAX_HEIGHT, Word, is_present};

/// An entry and its position.
struct Found {
    key: u64,
    word: Word,
    /// The node of the entry, or `None` for the root word.
    leaf: Option<NodePtr>,
}

impl Node {
    /// Returns the first entry or node in slot `index` or behind it.
    #[inline]
    fn first(&self, index: u64) -> Option<(u64, Word)> {
        (index..FANOUT as u64).find_map(|index| {
            // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the node or the memory
            // of the entry.
            let word = self.slot(index).load(Ordering::Acquire);
            is_present(word).then_some((index, word))
        })
    }

    /// Returns the last entry or node in slot `index` or before it.
    fn last(&self, index: u64) -> Option<(u64, Word)> {
        (0..=index).rev().find_map(|index| {
            // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the node or the memory
            // of the entry.
            let word = self.slot(index).load(Ordering::Acquire);
            is_present(word).then_some((index, word))
        })
    }
}

impl Tree {
    /// Returns the entry with the lowest key in `from..=to`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn next(&self, from: u64, to: u64) -> Option<(u64, Word)> {
        // SAFETY: by the contract of this function the caller is in an RCU section or is the writer.
        unsafe { self.find(from, to) }.map(|found| (found.key, found.word))
    }

    /// Returns the entry with the lowest key in `from..=to`, and its position.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    unsafe fn find(&self, from: u64, to: u64) -> Option<Found> {
        // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the node or the memory of
        // the entry.
        let root = self.root.load(Ordering::Acquire);
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            let found = from == 0 && is_present(root);
            return found.then_some(Found { key: 0, word: root, leaf: None });
        };
        let top = shift;
        let mut path = [node; MAX_HEIGHT];
        let mut key = from;
        if key >> shift > MASK {
            return None;
        }
        while key <= to {
            let index = key >> shift & MASK;
            // SAFETY: the node was found in the tree by a reader or the writer.
            let Some((first, word)) = unsafe { node.get() }.first(index) else {
                // Nothing in this node: go up to a node that has a slot behind this one.
                let next = loop {
                    if shift == top {
                        return None;
                    }
                    shift += BITS;
                    if key >> shift & MASK != MASK {
                        break (key >> shift) + 1;
                    }
                };
                if next > u64::MAX >> shift {
                    return None;
                }
                key = next << shift;
                node = path[(shift / BITS) as usize];
                continue;
            };
            if first != index {
                key = (key >> shift & !MASK | first) << shift;
            }
            if shift == 0 {
                return (key <= to).then_some(Found { key, word, leaf: Some(node) });
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
            path[(shift / BITS) as usize] = node;
        }
        None
    }

    /// Returns the entry with the highest key at or below `from`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn prev(&self, from: u64) -> Option<(u64, Word)> {
        // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the nodes or the memory of
        // the entry.
        let root = self.root.load(Ordering::Acquire);
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            return is_present(root).then_some((0, root));
        };
        let top = shift;
        let mut path = [node; MAX_HEIGHT];
        let mut key = from;
        if key >> shift > MASK {
            key = u64::MAX >> (u64::BITS - BITS - shift); // the last key of the root's range
        }
        loop {
            let index = key >> shift & MASK;
            // SAFETY: the node was found in the tree by a reader or the writer.
            let Some((last, word)) = unsafe { node.get() }.last(index) else {
                // Nothing in this node: go up to a node that has a slot before this one.
                loop {
                    if shift == top {
                        return None;
                    }
                    shift += BITS;
                    if key >> shift & MASK != 0 {
                        break;
                    }
                }
                key = (key >> shift << shift) - 1;
                node = path[(shift / BITS) as usize];
                continue;
            };
            if last != index {
                key = (key >> shift & !MASK | last) << shift | ((1 << shift) - 1);
            }
            if shift == 0 {
                return Some((key, word));
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
            path[(shift / BITS) as usize] = node;
        }
    }

    /// Returns a cursor over the entries in `from..=to`.
    ///
    /// # Safety
    ///
    /// During `'g` the caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn cursor(&self, from: u64, to: u64) -> Cursor<'_> {
        Cursor { tree: self, leaf: None, next: from, to, more: from <= to }
    }
}

/// A cursor over entries in ascending order, which remembers its node.
///
/// It returns an entry that is present throughout once. It may or may not return an entry that is stored
/// or erased meanwhile. It does not return an entry that was erased before the call.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'g> {
    tree: &'g Tree,
    /// The node of level 0 that has `next`, if it is known.
    leaf: Option<NodePtr>,
    next: u64,
    to: u64,
    more: bool,
}

// SAFETY: a cursor only reads nodes, on any thread, and by the contract of `Tree::cursor` they are not freed
// while it exists.
unsafe impl Send for Cursor<'_> {}
// SAFETY: `&Cursor` gives access to `position` and `clone`, which only read.
unsafe impl Sync for Cursor<'_> {}

impl Cursor<'_> {
    /// Moves behind `key`, and returns the entry.
    fn step(&mut self, key: u64, word: Word) -> Option<(u64, Word)> {
        self.more = key < self.to;
        if self.more {
            self.next = key + 1;
            if self.next & MASK == 0 {
                self.leaf = None;
            }
        }
        Some((key, word))
    }

    fn end(&mut self) -> Option<(u64, Word)> {
        self.more = false;
        None
    }

    /// The next entry. Wait-free.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<(u64, Word)> {
        if !self.more {
            return None;
        }
        if let Some(leaf) = self.leaf {
            // SAFETY: this cursor found the node under the guard or lock of `Tree::cursor`.
            let leaf = unsafe { leaf.get() };
            let found = leaf.first(self.next & MASK);
            // Checked after the slot was read: a node that is in the tree now had no outdated entry then.
            if !leaf.is_dead() {
                if let Some((index, word)) = found {
                    let key = self.next & !MASK | index;
                    return if key <= self.to { self.step(key, word) } else { self.end() };
                }
                match (self.next | MASK).checked_add(1) {
                    Some(next) if next <= self.to => self.next = next,
                    _ => return self.end(),
                }
            }
        }
        self.walk()
    }

    /// Searches from the root on.
    fn walk(&mut self) -> Option<(u64, Word)> {
        // SAFETY: by the contract of `Tree::cursor` the caller is in an RCU section or is the writer.
        let Some(found) = (unsafe { self.tree.find(self.next, self.to) }) else {
            return self.end();
        };
        self.leaf = found.leaf;
        self.step(found.key, found.word)
    }
}
