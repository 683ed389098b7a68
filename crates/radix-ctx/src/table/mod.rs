//! A table of contexts by ids that the table assigns.
//!
//! ```text
//!   CtxTable -> Core: tree -> node -> node -> Slab | state, T | state, T | ... 64
//!                                                      ^
//!   id = generation, index  -----------------------> state == id? then it is live
//! ```
//!
//! Each layer uses the ones above it:
//!
//! | modules | contents |
//! |---|---|
//! | [`id`], [`error`] | ids and errors |
//! | [`slab`], [`slab_tree`] | slots and their states; the tree of slabs, lookups |
//! | [`retire_list`], [`vacant_queue`] | per-CPU lists of dead slots; the lowest vacant slots |
//! | [`quota`], [`waiters`], [`user_code`] | the limit; blocked threads and wakers; drops of contexts and panics |
//! | [`core`] | the parts together, and the state under the lock |
//! | [`vacancy`], [`retire`], [`reclaim`], [`ending`] | from a vacant slot to a live one, to a dead one, to a vacant one; the end of a table |
//! | [`ctx_table`], [`builder`], [`insert`], [`remove`], [`mod@reference`], [`iter`], [`stats`] | the table and its operations |

mod builder;
mod core;
mod ctx_table;
mod ending;
mod error;
mod id;
mod insert;
mod iter;
mod quota;
mod reclaim;
mod reference;
mod remove;
mod retire;
mod retire_list;
mod slab;
mod slab_tree;
mod stats;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod user_code;
mod vacancy;
mod vacant_queue;
mod waiters;

pub use self::builder::Builder;
pub use self::ctx_table::CtxTable;
pub use self::error::{GetRefError, InsertError, InsertRefused, LookupError, WaitError};
pub use self::id::Id;
pub use self::iter::Iter;
pub use self::reference::{CtxRef, RemovedFuture};
pub use self::remove::{Removal, RemoveAll};
pub use self::stats::TableStats;
