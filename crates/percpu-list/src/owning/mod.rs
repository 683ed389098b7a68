//! The owning list, which stores each value in a node.
//!
//! ```text
//!  insert: lock the slot of this CPU | take a node from the pool, append it to the array | unlock
//!          (if the pool is empty: allocate a node before the lock)
//!  remove: lock the home of the node | remove it, put it into the pool | unlock | drop the value
//!          (if there is a Ref: the last one drops the value and frees the node)
//! ```

mod deferred;
mod drain;
mod entry;
mod list;
mod node;
mod nodes;
mod pool;
mod snapshot;
mod walk;

pub use self::drain::Drain;
pub use self::entry::{Entry, Holder};
pub use self::list::{ArcEntry, PerCpuList};
pub use self::node::Ref;
pub use self::snapshot::{Snapshot, SnapshotIter};
pub use self::walk::Iter;
