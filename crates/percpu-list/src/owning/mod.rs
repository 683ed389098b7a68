//! The owning list: it allocates a node for each value.
//!
//! ```text
//!  insert: lock the slot of this CPU | take a spare node, append it to the array | unlock
//!          (no spare node: allocate one before)
//!  remove: lock the node's home slot | take it out, keep it as a spare | unlock | drop the value
//!          (a Ref has it: the last one drops and frees it)
//! ```

mod deferred;
mod drain;
mod entry;
mod list;
mod node;
mod node_shard;
mod nodes;
mod pool;
mod snapshot;
mod walk;

pub use self::drain::Drain;
pub use self::entry::{Entry, Holder};
pub use self::list::PerCpuList;
pub use self::node::Ref;
pub use self::snapshot::{Snapshot, SnapshotIter};
pub use self::walk::Iter;
