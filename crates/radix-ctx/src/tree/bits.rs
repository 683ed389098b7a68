//! The bits of entries: their marks, and the full bits.

use percpu::sync::atomic::Ordering;
use percpu::sync::order;

use super::edit::{Edit, Slot};
use super::node::NodePtr;
use super::radix::Tree;
use super::word::{ALL, BITS, MARKS, MASK, is_present};

impl<const FLOORS: bool> Tree<FLOORS> {
    /// Returns whether `key` is present and has mark `mark`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn is_marked(&self, key: u64, mark: usize) -> bool {
        // Ordering: Acquire. For a word it pairs with the Release in `Edit::publish` and carries the node.
        // For marks it pairs with the Release in `Edit::set_mark` and carries what the writer did before.
        let root = self.root.load(Ordering::Acquire);
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            let marks = self.root_marks.load(Ordering::Acquire);
            return key == 0 && is_present::<FLOORS>(root) && marks & 1 << mark != 0;
        };
        if key >> shift > MASK {
            return false;
        }
        loop {
            // SAFETY: the node was found in the tree by a reader or the writer.
            let at = unsafe { node.get() };
            let index = key >> shift & MASK;
            if at.marks[mark].load(Ordering::Acquire) & 1 << index == 0 {
                return false;
            }
            let word = at.slot(index).load(Ordering::Acquire);
            if shift == 0 || !is_present::<FLOORS>(word) {
                return is_present::<FLOORS>(word);
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
        }
    }

    /// Returns whether any entry has mark `mark`. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn any_marked(&self, mark: usize) -> bool {
        // Ordering: Acquire. For the root it pairs with the Release in `Edit::publish` and carries the node.
        // For marks it pairs with the Release in `Edit::set_mark` and carries what the writer did before.
        let root = self.root.load(Ordering::Acquire);
        match NodePtr::of_root(root) {
            // SAFETY: the node was found in the tree by a reader or the writer.
            Some((node, _)) => unsafe { node.get() }.marks[mark].load(Ordering::Acquire) != 0,
            None => {
                let marks = self.root_marks.load(Ordering::Acquire);
                is_present::<FLOORS>(root) && marks & 1 << mark != 0
            }
        }
    }
}

impl<const FLOORS: bool> Edit<'_, FLOORS> {
    /// Returns whether the slot's entry has mark `mark`.
    pub(crate) fn mark(&self, slot: Slot<'_>, mark: usize) -> bool {
        // Ordering: Relaxed, both; only the writer stores these words.
        match slot.node() {
            Some(node) => {
                self.at(node).marks[mark].load(Ordering::Relaxed) & 1 << slot.index() != 0
            }
            None => self.tree.root_marks.load(Ordering::Relaxed) & 1 << mark != 0,
        }
    }

    /// Sets mark `mark` of the slot's entry. Returns false if there is no entry.
    pub(crate) fn set_mark(&self, slot: Slot<'_>, mark: usize) -> bool {
        if !is_present::<FLOORS>(self.get(slot)) {
            return false;
        }
        let release = order!(Release, "set a mark: the work before it is done");
        // Ordering: Relaxed for the loads, because only the writer stores these words. Release pairs with
        // the Acquire in `Tree::is_marked`, `Tree::any_marked`, `Tree::find` and `Node::first`; it carries
        // what the writer did before.
        let Some(mut node) = slot.node() else {
            let marks = self.tree.root_marks.load(Ordering::Relaxed);
            self.tree.root_marks.store(marks | 1 << mark, release);
            return true;
        };
        let mut index = slot.index();
        loop {
            let at = self.at(node);
            let bits = at.marks[mark].load(Ordering::Relaxed);
            if bits & 1 << index != 0 {
                return true; // the nodes above have the bit too (invariant 4)
            }
            at.marks[mark].store(bits | 1 << index, release);
            index = u64::from(at.offset);
            let Some(parent) = at.parent() else { return true };
            node = parent;
        }
    }

    /// Clears mark `mark` of the slot's entry.
    pub(crate) fn clear_mark(&self, slot: Slot<'_>, mark: usize) {
        // Ordering: Relaxed for the loads, because only the writer stores these words. Release pairs with
        // the Acquire in `Tree::is_marked`; it carries what the writer did before.
        let Some(mut node) = slot.node() else {
            let marks = self.tree.root_marks.load(Ordering::Relaxed);
            return self.tree.root_marks.store(marks & !(1 << mark), Ordering::Release);
        };
        let mut index = slot.index();
        loop {
            let at = self.at(node);
            let bits = at.marks[mark].load(Ordering::Relaxed);
            let left = bits & !(1 << index);
            if left == bits {
                return;
            }
            at.marks[mark].store(left, Ordering::Release);
            index = u64::from(at.offset);
            match at.parent() {
                Some(parent) if left == 0 => node = parent,
                _ => return,
            }
        }
    }

    /// Sets the full bit of the slot's entry: the owner of the tree has no room below it.
    pub(crate) fn set_full(&self, slot: Slot<'_>) {
        debug_assert!(is_present::<FLOORS>(self.get(slot)));
        let Some(mut node) = slot.node() else {
            return self.with_state(|state| state.root_full = true);
        };
        let mut index = slot.index();
        loop {
            let at = self.at(node);
            let bits = at.full() | 1 << index;
            at.set_full(bits);
            index = u64::from(at.offset);
            match at.parent() {
                Some(parent) if bits == ALL => node = parent,
                _ => return,
            }
        }
    }

    /// Clears the full bit of the slot's entry.
    pub(crate) fn clear_full(&self, slot: Slot<'_>) {
        let Some(mut node) = slot.node() else {
            return self.with_state(|state| state.root_full = false);
        };
        let mut index = slot.index();
        loop {
            let at = self.at(node);
            let bits = at.full();
            at.set_full(bits & !(1 << index));
            index = u64::from(at.offset);
            match at.parent() {
                Some(parent) if bits == ALL => node = parent,
                _ => return,
            }
        }
    }

    /// Returns the lowest key in `from..=to` that is not full. A key without an entry is not full.
    pub(crate) fn first_not_full(&self, from: u64, to: u64) -> Option<u64> {
        let mut key = from;
        while key <= to {
            let Some((mut node, mut shift)) = NodePtr::of_root(self.root()) else {
                let full = self.with_state(|state| state.root_full);
                return if key > 0 || !full { Some(key) } else { (to > 0).then_some(1) };
            };
            if key >> shift > MASK {
                return Some(key);
            }
            loop {
                let at = self.at(node);
                let index = key >> shift & MASK;
                let room = !at.full() & ALL & u64::MAX << index;
                let Some(first) = (room != 0).then(|| u64::from(room.trailing_zeros())) else {
                    // Behind this node, from the root again, unless the node has the largest key.
                    key = (key >> shift | MASK)
                        .checked_add(1)
                        .and_then(|next| (next <= u64::MAX >> shift).then_some(next << shift))?;
                    break;
                };
                if first != index {
                    // The top level may have slots above the largest key: 11 levels have 66 bits.
                    let prefix = (key >> shift & !MASK) | first;
                    if prefix > u64::MAX >> shift {
                        return None;
                    }
                    key = prefix << shift;
                }
                // Ordering: Relaxed; only the writer stores this word.
                let word = at.slot(first).load(Ordering::Relaxed);
                if shift == 0 || !is_present::<FLOORS>(word) {
                    return (key <= to).then_some(key);
                }
                // SAFETY: the word is present and above level 0, so it is a node.
                node = unsafe { NodePtr::of_word(word) };
                shift -= BITS;
            }
        }
        None
    }

    /// Returns the mark bits and the full bit that the parent of `node` has for it.
    pub(super) fn summary(&self, node: NodePtr) -> ([bool; MARKS], bool) {
        let at = self.at(node);
        // Ordering: Relaxed; only the writer stores these words.
        let marks = std::array::from_fn(|mark| at.marks[mark].load(Ordering::Relaxed) != 0);
        (marks, at.full() == ALL)
    }
}
