//! Objects and nodes kept for the next time, so that the hot path allocates nothing.
//!
//! | | [`ObjectCache`] | [`NodeCache`], with [`Preload`] |
//! |---|---|---|
//! | for | whole objects, taken by any thread | the nodes of a structure behind one lock |
//! | kept | per CPU, up to k each | inside that lock, up to k |
//! | when none is kept | the caller makes one | one was made before the lock was taken |
//!
//! Neither allocates after it was made, and neither drops an object of its own accord while it
//! holds a lock: what does not fit is handed back to the caller.

mod node;
mod object;

pub use self::node::{NodeCache, NodeHint, NodeStats, Preload};
pub use self::object::{Drain, ObjectCache, ObjectStats};
