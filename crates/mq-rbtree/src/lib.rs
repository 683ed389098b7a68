//! A priority message queue that does not allocate under its lock.

mod alloc;
mod core;
mod deadline;
mod error;
mod handles;
#[cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]
mod kernel;
mod parker;
mod posix;
mod queue;
mod quota;
mod stats;
mod waiter;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES, RbTree};
pub use self::deadline::{Deadline, InvalidDeadline, Wait};
pub use self::error::{BuildError, Busy, ReceiveError, SendError, SendRefused};
pub use self::handles::{Receiver, Sender};
#[cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]
pub use self::kernel::{Exceeded, KernelQueue, OpenError};
pub use self::posix::{Attributes, Callback, MessageQueue, NotifyError, NotifyRefused};
pub use self::queue::{Builder, Interest, Queue, Readiness, Receive, Received, Send};
pub use self::quota::Quota;
pub use self::stats::{LevelStats, QueueStats};
