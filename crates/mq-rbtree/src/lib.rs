#![doc = include_str!("../README.md")]
// Shows on docs.rs which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

// Each layer uses the ones above it.
mod error;
mod stats;
// The ordered store, for one thread at a time; the ring in front of it.
mod core;
mod staging;
// What an unlock signals; the lock, the waits and the operations of a queue.
mod notifier;
mod queue;
// What is around a queue.
mod guard;
#[cfg(doc)]
pub mod guide;
mod handles;
mod readiness;
#[cfg(feature = "stream")]
mod stream;

pub use offlock_sync::AllocError;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES, RbTree};
pub use self::error::{BatchError, BuildError, ReceiveError, SendError, SendRefused};
pub use self::guard::MessageGuard;
pub use self::handles::{Iter, QueueHandle, Receiver, Sender};
pub use self::notifier::Interest;
pub use self::queue::{Builder, Queue, Received};
pub use self::readiness::{Readiness, ReadinessError};
pub use self::stats::{LevelStats, QueueStats};
#[cfg(feature = "stream")]
pub use self::stream::ReceiveStream;
