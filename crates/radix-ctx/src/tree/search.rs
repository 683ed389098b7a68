//! Searches by readers: the next entry, the one before, and a cursor for many.
//!
//! An entry that is present from the beginning to the end of a search is found: entries never change
//! their node, but for the one of key 0 that moves to the root word and back, and then the node that it
//! was in keeps it (invariant 2).

use percpu::sync::atomic::Ordering;

use super::node::{Node, NodePtr};
use super::radix::Tree;
use super::word::{BITS, FANOUT, MASK, MAX_HEIGHT, Word, is_present};

/// What a search is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Every entry.
    Present,
    /// Entries with this mark.
    Mark(usize),
}

/// An entry, and where it is.
struct Found {
    key: u64,
    word: Word,
    /// `None`: in the root word.
    leaf: Option<NodePtr>,
}

impl Node {
    /// The first entry or node in slot `index` or after it.
    #[inline]
    fn first<const FLOORS: bool>(&self, index: u64, which: Which) -> Option<(u64, Word)> {
        // Ordering: Acquire for words as in `Tree::load`, for marks as in `Tree::is_marked`.
        match which {
            Which::Present => (index..FANOUT as u64).find_map(|index| {
                let word = self.slot(index).load(Ordering::Acquire);
                is_present::<FLOORS>(word).then_some((index, word))
            }),
            Which::Mark(mark) => {
                let mut bits = self.marks[mark].load(Ordering::Acquire) & u64::MAX << index;
                while bits != 0 {
                    let index = u64::from(bits.trailing_zeros());
                    let word = self.slot(index).load(Ordering::Acquire);
                    if is_present::<FLOORS>(word) {
                        return Some((index, word));
                    }
                    bits &= bits - 1; // it was just erased
                }
                None
            }
        }
    }

    /// The last entry or node in slot `index` or before it.
    fn last<const FLOORS: bool>(&self, index: u64) -> Option<(u64, Word)> {
        (0..=index).rev().find_map(|index| {
            // Ordering: Acquire, as in `Tree::load`.
            let word = self.slot(index).load(Ordering::Acquire);
            is_present::<FLOORS>(word).then_some((index, word))
        })
    }
}

impl<const FLOORS: bool> Tree<FLOORS> {
    /// The entry with the lowest key in `from..=to`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn next(&self, from: u64, to: u64, which: Which) -> Option<(u64, Word)> {
        // SAFETY: the caller's.
        unsafe { self.find(from, to, which) }.map(|found| (found.key, found.word))
    }

    /// # Safety
    ///
    /// As for [`next`](Tree::next).
    unsafe fn find(&self, from: u64, to: u64, which: Which) -> Option<Found> {
        // Ordering: Acquire, as in `Tree::load`, and for the marks as in `is_marked`.
        let root = self.root.load(Ordering::Acquire);
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            let is_wanted = match which {
                Which::Present => true,
                Which::Mark(mark) => self.root_marks.load(Ordering::Acquire) & 1 << mark != 0,
            };
            let found = from == 0 && is_present::<FLOORS>(root) && is_wanted;
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
            // SAFETY: found in the tree by a reader or the writer.
            let Some((first, word)) = unsafe { node.get() }.first::<FLOORS>(index, which) else {
                // Behind this node: up, until there is a slot after this one.
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
            // SAFETY: present, and above level 0.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
            path[(shift / BITS) as usize] = node;
        }
        None
    }

    /// The entry with the highest key that is not above `from`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn prev(&self, from: u64) -> Option<(u64, Word)> {
        // Ordering: Acquire, as in `Tree::load`.
        let root = self.root.load(Ordering::Acquire);
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            return is_present::<FLOORS>(root).then_some((0, root));
        };
        let top = shift;
        let mut path = [node; MAX_HEIGHT];
        let mut key = from;
        if key >> shift > MASK {
            key = u64::MAX >> (u64::BITS - BITS - shift); // the root's last
        }
        loop {
            let index = key >> shift & MASK;
            // SAFETY: found in the tree by a reader or the writer.
            let Some((last, word)) = unsafe { node.get() }.last::<FLOORS>(index) else {
                // Before this node: up, until there is a slot before this one.
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
            // SAFETY: present, and above level 0.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
            path[(shift / BITS) as usize] = node;
        }
    }

    /// A cursor over the entries in `from..=to`.
    ///
    /// # Safety
    ///
    /// During `'g` the caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn cursor(&self, from: u64, to: u64, which: Which) -> Cursor<'_, FLOORS> {
        Cursor { tree: self, leaf: None, next: from, to, which, more: from <= to }
    }
}

/// Goes through entries in ascending order, and remembers the node it is in.
///
/// What is present throughout is seen once. What comes or goes meanwhile may be seen or not; what was
/// gone before a call is not.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'g, const FLOORS: bool> {
    tree: &'g Tree<FLOORS>,
    /// The node of level 0 that `next` belongs to, if it is known.
    leaf: Option<NodePtr>,
    next: u64,
    to: u64,
    which: Which,
    more: bool,
}

// SAFETY: reads of nodes only; that nothing is freed meanwhile is what `cursor` asks for, whoever reads.
unsafe impl<const FLOORS: bool> Send for Cursor<'_, FLOORS> {}
// SAFETY: as above.
unsafe impl<const FLOORS: bool> Sync for Cursor<'_, FLOORS> {}

impl<const FLOORS: bool> Cursor<'_, FLOORS> {
    /// The lowest key that is yet to be looked at; `None` at the end.
    pub(crate) fn position(&self) -> Option<u64> {
        self.more.then_some(self.next)
    }

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
            // SAFETY: found by this cursor, under the same guard.
            let leaf = unsafe { leaf.get() };
            let found = leaf.first::<FLOORS>(self.next & MASK, self.which);
            // Asked after the slot was read: so what was read was not gone before this call.
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

    /// From the root.
    fn walk(&mut self) -> Option<(u64, Word)> {
        // SAFETY: as `cursor` asks.
        let Some(found) = (unsafe { self.tree.find(self.next, self.to, self.which) }) else {
            return self.end();
        };
        self.leaf = found.leaf;
        self.step(found.key, found.word)
    }
}
