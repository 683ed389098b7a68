//! Contexts by ids that the table hands out.
//!
//! ```text
//!   CtxTable -> Core: tree -> node -> node -> Slab | state, T | state, T | ... 64
//!                                                      ^
//!   id = generation, index  -----------------------> state == id? then it is live
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`id`] | what names a context |
//! | [`slab`] | slots side by side, and what their words say |
//! | [`core`] | the tree of slabs, and what belongs to it |
//! | [`vacancy`] | which slots are vacant, and who gets the lowest |
//! | [`limbo`], [`reclaim`] | from a removed context to a vacant slot |
//! | [`ending`] | the tick, and the end of a table |
//! | [`reference`] | references that outlive a guard |
//! | [`dropping`] | whose contexts a thread is dropping |
//! | [`panics`] | where panics of others' code end |
//! | [`insert`], [`inserter`], [`remove`], [`iter`] | the operations |
//! | [`quota`], [`waiters`] | limits; who waits |

mod builder;
mod core;
mod ctx_table;
mod dropping;
mod ending;
mod error;
mod id;
mod insert;
mod inserter;
mod iter;
mod panics;
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
mod vacancy;
mod vacant_queue;
mod waiters;

pub use self::builder::Builder;
pub use self::ctx_table::CtxTable;
pub use self::error::{
    GetRefError, InsertError, InsertRefused, LookupError, RemoveError, WaitError,
};
pub use self::id::{Id, ParseIdError};
pub use self::insert::Reservation;
pub use self::inserter::Inserter;
pub use self::iter::Iter;
pub use self::quota::Usage;
pub use self::reference::{CtxRef, Killed};
pub use self::remove::{Closing, ClosingFuture, Removal, RemovalFuture};
pub use self::stats::TableStats;
