//! Nodes kept for the next time, so that the hot path allocates nothing.

mod node;

pub use self::node::{NodeCache, NodeHint, NodeStats, Preload};
