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
//! classes is the faster queue. Where one thread alone uses the queue, or a lock of your own protects it, take
//! [`Core`](crate::Core) with either.

#[doc = include_str!("guide/allocation.md")]
pub mod allocation {}
#[doc = include_str!("guide/staged_sends.md")]
pub mod staged_sends {}
