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

#[cfg(doc)]
pub mod guide {
    //! How this crate works, an idea at a time; and when to use which store.
    //!
    //! | chapter | the idea |
    //! |---|---|
    //! | [`allocation`] | memory is allocated before the lock and freed after it |
    //! | [`staged_sends`] | a ring in front of the ordered store, so that a send takes no lock |
    //!
    //! *Which store.* Take [`Bitmap`](crate::Bitmap), the default, if priorities are numbers up to 32,767: its sends
    //! take no lock, and it finds the next message by three words, however many priorities there are. Take
    //! [`RbTree`](crate::RbTree) if priorities are times, pairs or other ordered keys, or numbers without a small
    //! bound; to serve the least first, wrap them in [`Reverse`](std::cmp::Reverse). Its sends take the lock and
    //! search the tree, so keep comparisons short. Where keys can be rounded to some classes, a bitmap of the
    //! classes is usually the faster queue. Where one thread alone uses the queue, or a lock of your own protects it,
    //! take [`Core`](crate::Core) with either.

    #[doc = include_str!("guide/allocation.md")]
    pub mod allocation {}
    #[doc = include_str!("guide/staged_sends.md")]
    pub mod staged_sends {}
}
