//! The full bits of entries.

use percpu::sync::atomic::Ordering;

use super::edit::{Edit, Slot};
use super::node::NodePtr;
use super::word::{ALL, BITS, MASK, is_present};

impl Edit<'_> {
    /// Sets the full bit of the slot's entry: the owner of the tree has no room below it.
    pub(crate) fn set_full(&self, slot: Slot<'_>) {
        debug_assert!(is_present(self.get(slot)));
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
                if shift == 0 || !is_present(word) {
                    return (key <= to).then_some(key);
                }
                // SAFETY: the word is present and above level 0, so it is a node.
                node = unsafe { NodePtr::of_word(word) };
                shift -= BITS;
            }
        }
        None
    }

    /// Returns the full bit that the parent of `node` has for it.
    pub(super) fn summary(&self, node: NodePtr) -> bool {
        self.at(node).full() == ALL
    }
}
