//! A priority message queue that does not allocate under its lock.

mod alloc;
mod core;
mod deadline;
mod stats;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES};
pub use self::deadline::{Deadline, InvalidDeadline, Wait};
pub use self::stats::LevelStats;
