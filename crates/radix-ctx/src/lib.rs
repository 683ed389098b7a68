#![doc = include_str!("../README.md")]

// Each layer uses the ones above it.
// Ids and errors.
mod error;
mod id;
// The radix tree; slots and their states; the lists of dead slots.
mod retire_list;
mod slab;
mod tree;
// Calls of user code, blocked threads and wakers; the parts of a table together, and its lock.
mod core;
mod user_code;
mod waiters;
// From a vacant slot to a live one, to a dead one, to a vacant one.
mod reclaim;
mod vacancy;
// The table and its operations.
mod iter;
mod reference;
mod remove;
mod stats;
mod table;
#[cfg(all(test, not(offlock_model)))]
mod tests;

pub use offlock_percpu::{AllocError, rcu};

pub use self::error::{GetRefError, InsertError, InsertRefused, LookupError, WaitError};
pub use self::id::Id;
pub use self::iter::Iter;
pub use self::reference::{CtxRef, RemovedFuture};
pub use self::remove::{Removal, RemoveAll};
pub use self::stats::TableStats;
pub use self::table::{Builder, CtxTable};
