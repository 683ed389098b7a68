//! Numbers about an array.

use std::fmt;

use super::array::XArray;
use super::entry::Entry;

/// Numbers about an array, each as of about the moment of [`XArray::stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Entries.
    pub entries: u64,
    /// Reserved indices without an entry.
    pub reserved: u64,
    /// Nodes in the tree.
    pub nodes: usize,
    /// Levels of nodes.
    pub height: u32,
    /// Bytes of those nodes, without the entries' own memory.
    pub bytes: usize,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entries, reserved, nodes, height, bytes } = self;
        write!(f, "{entries} entries, {reserved} reserved, ")?;
        write!(f, "{nodes} nodes on {height} levels, {bytes} bytes")
    }
}

impl<P: Entry> XArray<P> {
    /// Numbers about the array. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            entries: self.counts.entries(),
            reserved: self.counts.reserved(),
            nodes: self.tree.node_count(),
            height: self.tree.height(),
            bytes: self.tree.bytes(),
        }
    }
}
