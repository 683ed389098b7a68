#![doc = include_str!("../README.md")]

// Ids and errors.
mod error;
mod id;
// The radix tree; slots and their states.
mod slab;
mod tree;
// The parts of a table together, and its lock.
mod core;
// From a vacant slot to a live one, to a dead one, to a vacant one.
mod reclaim;
mod remove;
mod vacancy;
// The table and its other operations.
mod iter;
mod reference;
mod stats;
mod table;
#[cfg(all(test, not(offlock_model)))]
mod tests;

pub use offlock_percpu::{AllocError, rcu};

pub use self::error::{GetRefError, InsertError, InsertRefused, LookupError, WaitError};
pub use self::id::Id;
pub use self::iter::Iter;
pub use self::reference::CtxRef;
pub use self::remove::{Removal, RemoveAll};
pub use self::stats::TableStats;
pub use self::table::{Builder, CtxTable};
