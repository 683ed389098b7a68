//! Numbers about an array.

use std::fmt;

use percpu::sync::native::atomic::{AtomicU64, Ordering::Relaxed};

use super::XArray;
use super::entry::Entry;

/// Written under the lock.
#[derive(Debug)]
pub(super) struct Counts {
    entries: AtomicU64,
    reserved: AtomicU64,
}

impl Counts {
    pub(super) const fn new() -> Self {
        Self { entries: AtomicU64::new(0), reserved: AtomicU64::new(0) }
    }

    pub(super) fn entries(&self) -> u64 {
        // Ordering: Relaxed, here and below; statistics, which publish nothing.
        self.entries.load(Relaxed)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Relaxed)
    }

    pub(super) fn add_entries(&self, by: i64) {
        self.entries.store(self.entries().wrapping_add_signed(by), Relaxed);
    }

    pub(super) fn add_reserved(&self, by: i64) {
        self.reserved.store(self.reserved().wrapping_add_signed(by), Relaxed);
    }
}

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
