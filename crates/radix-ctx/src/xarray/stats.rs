//! Statistics of an array.

use std::fmt;

use super::array::XArray;
use super::entry::Entry;

/// Statistics of an [`XArray`]. Returned by [`XArray::stats`].
///
/// Each number is from about the moment of the call. They are not from one moment.
///
/// ```
/// use radix_ctx::xarray::{Value, XArray};
///
/// let array = XArray::<Value>::new();
/// array.store(100, 7.into())?;
/// let stats = array.stats();
/// assert_eq!((stats.entries, stats.nodes, stats.height), (1, 2, 2));
/// println!("{stats}");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The number of entries.
    pub entries: u64,
    /// The number of reserved indexes.
    pub reserved: u64,
    /// The number of nodes in the tree.
    pub nodes: usize,
    /// The number of levels of nodes.
    pub height: u32,
    /// The size of the nodes in bytes, without the memory of the entries.
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
    /// Returns statistics of the array. Wait-free.
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
