//! What a queue counts.

/// What the levels of a queue consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelStats {
    /// Levels with messages.
    pub live: usize,
    /// Nodes or pages kept for levels to come.
    pub kept: usize,
    /// Levels that took a kept node, or a page that was there.
    pub from_cache: u64,
    /// Levels that took a node or page made before the lock.
    pub from_preload: u64,
    /// Nodes or pages allocated under the lock, because nothing else was there.
    pub fallback: u64,
}
