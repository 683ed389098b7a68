//! A priority message queue that does not allocate under its lock.

mod alloc;
mod core;
mod deadline;
mod error;
mod handles;
mod parker;
mod queue;
mod quota;
mod stats;
mod waiter;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES, RbTree};
pub use self::deadline::{Deadline, InvalidDeadline, Wait};
pub use self::error::{BuildError, Busy, ReceiveError, SendError, SendRefused};
pub use self::handles::{Receiver, Sender};
pub use self::queue::{Builder, Interest, Queue, Readiness, Receive, Received, Send};
pub use self::quota::Quota;
pub use self::stats::{LevelStats, QueueStats};
