//! The intrusive list: items embed a [`Link`], and adding allocates nothing for them.
//!
//! ```text
//!  item (the caller's, pinned) -> | ... | link: home, index, shard, domain | ... |
//! ```
//!
//! The list does not keep items alive: an item that is dropped takes itself off its list first, under
//! its slot's lock, so a locked walk never sees one that is being destroyed.

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
