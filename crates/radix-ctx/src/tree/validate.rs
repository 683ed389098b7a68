//! Checks of the invariants, for tests and fuzzing.

use percpu::sync::atomic::Ordering;

use super::edit::Edit;
use super::node::NodePtr;
use super::word::{ALL, BITS, FANOUT, is_present};

/// What the parent of a node has to agree with.
struct Summary {
    full: bool,
    nodes: usize,
}

impl Edit<'_> {
    /// Checks the counts, parents, offsets, shifts, heights and bits of all nodes.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let root = self.root();
        let Some((node, shift)) = NodePtr::of_root(root) else {
            let nodes = self.tree.node_count();
            return if nodes == 0 {
                Ok(())
            } else {
                Err(format!("{nodes} nodes of an empty tree"))
            };
        };
        let at = self.at(node);
        if at.parent().is_some() {
            return Err("the root has a parent".into());
        }
        if u32::from(at.shift) != shift {
            return Err(format!("the root word says shift {shift}, the node {}", at.shift));
        }
        // Ordering: Relaxed; only the writer stores this word.
        if at.count() == 1 && is_present(at.slot(0).load(Ordering::Relaxed)) {
            return Err("the root has child 0 only".into());
        }
        let nodes = self.validate_node(node, shift, 0)?.nodes;
        if nodes != self.tree.node_count() {
            return Err(format!("{nodes} nodes, counted {}", self.tree.node_count()));
        }
        Ok(())
    }

    fn validate_node(&self, node: NodePtr, shift: u32, offset: u64) -> Result<Summary, String> {
        let at = self.at(node);
        let place = format!("the node of shift {shift} at offset {offset}");
        if u32::from(at.shift) != shift || u64::from(at.offset) != offset {
            return Err(format!("{place} says {}, {}", at.shift, at.offset));
        }
        if at.is_dead() {
            return Err(format!("{place} is dead"));
        }
        let (mut count, mut nodes) = (0, 1);
        for index in 0..FANOUT as u64 {
            // Ordering: Relaxed, here and below; only the writer stores these words.
            let word = at.slot(index).load(Ordering::Relaxed);
            let full = at.full() & 1 << index != 0;
            if !is_present(word) {
                if full {
                    return Err(format!("{place}: absent {index} is full"));
                }
                continue;
            }
            count += 1;
            if shift == 0 {
                continue;
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            let child = unsafe { NodePtr::of_word(word) };
            if self.at(child).parent() != Some(node) {
                return Err(format!("{place}: child {index} has another parent"));
            }
            let below = self.validate_node(child, shift - BITS, index)?;
            if below.full != full {
                return Err(format!("{place}: child {index} differs in its full bit"));
            }
            nodes += below.nodes;
        }
        if count != at.count() || count == 0 {
            return Err(format!("{place} has {count} present, counted {}", at.count()));
        }
        Ok(Summary { full: at.full() == ALL, nodes })
    }
}
