//! The intrusive list, whose items embed a [`Link`]. Adding an item allocates nothing for it.
//!
//! ```text
//!  pinned item of the owner   -> | ... | link: home, index, shard, domain | ... |
//! ```
//!
//! The list does not keep items alive. The drop of an item first unlinks it under the lock of its
//! slot, so a locked walk never sees an item that is being destroyed.

mod items;
mod iter;
mod link;
mod list;
mod macros;
mod snapshot;

pub use self::iter::PinnedIter;
pub use self::link::{Link, Linked, Pinned};
pub use self::list::IntrusiveList;
pub use self::snapshot::{IntrusiveIter, IntrusiveSnapshot};
