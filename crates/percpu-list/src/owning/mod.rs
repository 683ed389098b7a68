//! The owning list: it allocates a node for each value.
//!
//! ```text
//!  insert: allocate a node | lock the slot of this CPU | append to its array | unlock
//!  remove: lock the node's home slot | take it out | unlock | drop the value, unless a Ref has it
//! ```

mod deferred;
mod drain;
mod entry;
mod list;
mod node;
mod snapshot;
mod walk;

pub use self::drain::Drain;
pub use self::entry::{Entry, Holder};
pub use self::list::PerCpuList;
pub use self::node::Ref;
pub use self::snapshot::{Snapshot, SnapshotIter};
pub use self::walk::Iter;
