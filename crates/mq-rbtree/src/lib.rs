//! A priority message queue for the threads and tasks of one process, with the semantics of POSIX
//! message queues, that does not allocate under its lock.
//!
//! ```
//! use std::time::Duration;
//! use mq_rbtree::{Queue, ReceiveError, Wait};
//!
//! let (sender, receiver) = Queue::builder(100).channel()?; // room for 100 messages
//! sender.send("later", 1)?;
//! sender.send("now", 9)?; // priorities 0 to 32,767; waits while there is no room
//! sender.send("now, too", 9)?;
//!
//! assert_eq!(receiver.receive()?, ("now", 9)); // the highest first, of one priority the oldest
//! assert_eq!(receiver.try_receive()?, ("now, too", 9));
//!
//! let refused = sender.send("never", 40_000).unwrap_err(); // there is no such priority
//! assert_eq!(refused.value, "never"); // what is refused comes back
//!
//! drop(sender); // the last one: the queue closes, and what is in it is still received
//! assert_eq!(receiver.receive()?, ("later", 1));
//! let soon = Wait::at_most(Duration::from_millis(1));
//! assert_eq!(receiver.receive_with(soon), Err(ReceiveError::Closed));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to | |
//! |---|---|
//! | share one queue | [`Queue::new`], by reference or in an `Arc` |
//! | have it close with the last handle of a side | [`Builder::channel`]: [`Sender`], [`Receiver`] |
//! | order by something else than 0 to 32,767 | [`Queue::with_keys`], for any `K: Ord + Copy` |
//! | wait: for ever, not at all, to a deadline of either clock, before others | [`Wait`], [`Deadline`]; [`send_with`](Queue::send_with), [`receive_with`](Queue::receive_with) |
//! | wait in a task | [`send_async`](Queue::send_async), [`receive_async`](Queue::receive_async), [`into_send_async`](Sender::into_send_async), [`into_receive_async`](Receiver::into_receive_async); tasks and threads on one queue |
//! | take messages in a loop | [`Receiver`] is `IntoIterator`; [`try_iter`](Receiver::try_iter) |
//! | have a `Stream` and a `Sink` | `Receiver::into_stream` and `Sender::into_sink`, with the feature `futures` |
//! | wait in an event loop | [`Readiness`]: a descriptor for epoll |
//! | be told once that a message came | [`notify`](Queue::notify), as `mq_notify` |
//! | move many at a time | [`send_batch`](Queue::send_batch), [`receive_batch`](Queue::receive_batch) |
//! | limit bytes, of one message and of all | [`measure`](Builder::measure), [`max_message_bytes`](Builder::max_message_bytes), [`max_bytes`](Builder::max_bytes), [`fair_bytes`](Builder::fair_bytes); a [`Quota`] for several queues |
//! | keep room for what is urgent | [`reserve`](Builder::reserve) |
//! | keep what is not urgent from starving | [`ageing`](Builder::ageing) |
//! | look, or take out what is not next | [`peek`](Queue::peek), [`len_at`](Queue::len_at), [`drain_filter`](Queue::drain_filter) |
//! | end | [`close`](Queue::close), then receive, or [`drain`](Queue::drain) |
//! | see what it did | [`stats`](Queue::stats) |
//! | have the same without a lock, for one thread | [`Core`] |
//! | exchange it for the kernel's queue | [`MessageQueue`], and `KernelQueue` with the feature `kernel` |
//!
//! # Order
//!
//! Messages: the highest priority first, the oldest of it before the others; with ageing every so many
//! receives serve the priorities in turn instead. Who waits: by [urgency](Wait::urgency), then first
//! come, first served, whatever the priority of the message that a sender waits with. A send or receive
//! that need not wait may overtake a task that was told to look and has not looked yet, and with it
//! whoever waits behind that task; it overtakes no thread that is first, because to that the message was
//! handed, or its message taken, by whoever made it possible. With limits on bytes it overtakes a long
//! message too, for which there is not enough room yet: an endless stream of short ones keeps that
//! waiting, unless the queue is made with [`fair_bytes`](Builder::fair_bytes).
//!
//! # Who waits for whom
//!
//! There is one lock. It is neither fair nor recursive. Who waits for it looks again after pauses
//! that double up to some microseconds, ten times, and then sleeps: so two threads that use the queue
//! all the time have it for some microseconds each, rather than send it to and fro for every message.
//!
//! | | progress | system calls |
//! |---|---|---|
//! | send, receive, and their `try_` and async forms | the lock, for steps that do not depend on the depth; the logarithm of the number of priorities with an [`RbTree`] | none, unless somebody sleeps who is woken, or a [`Readiness`] is armed |
//! | a wait | the lock, for steps past those who wait with less urgency; then looks for up to some microseconds if that was worth it lately and there are CPUs to spare, then sleeps | one to sleep, one of whoever wakes |
//! | who waits with a message that a [`reserve`](Builder::reserve) alone keeps out | steps of whoever makes room past each of those | none |
//! | batches | the lock for at most 64 messages at a time | as above |
//! | [`close`](Queue::close) | the lock for four who wait, again and again | one for each who sleeps |
//! | [`len`](Queue::len), [`stats`](Queue::stats), [`peek`](Queue::peek) | the lock | none |
//! | [`drain`](Queue::drain), [`drain_filter`](Queue::drain_filter) | the lock, for as long as it takes to look at every message | as above |
//!
//! Outside the lock: allocation, freeing, the drop of messages, clones and calls of wakers, the callback
//! of [`notify`](Queue::notify), [`measure`](Builder::measure). Under it: the order of an [`RbTree`]'s
//! keys, and what is handed to [`peek`](Queue::peek) and [`drain_filter`](Queue::drain_filter).
//!
//! # Memory
//!
//! A message has 8 bytes beside it, in chunks that double and stay until the queue is dropped. A
//! [`Bitmap`] has a page of 776 bytes for 64 priorities, once one of them was used; an [`RbTree`] a node
//! for each priority that has messages, of which up to [`spare_nodes`](Builder::spare_nodes) are kept
//! when it has none any more. Waiting threads and futures bring their own; a thread allocates when
//! it first sleeps, once.
//!
//! What a send may need is made before the lock if a hint says so, and the hint is looked at again under
//! it. If another thread took what was there in between, memory is allocated under the lock, which
//! [`stats`](Queue::stats) counts. Once a queue has been as deep, with as many priorities as nodes
//! are kept for (of a bitmap: with those of the same pages), nothing is allocated. With [`no_alloc`](Builder::no_alloc) all of it is when the queue is made.
//!
//! # Errors
//!
//! What is refused comes back, and nothing has changed. Each error has `errno()`, and becomes an
//! [`io::Error`](std::io::Error).
//!
//! | errno | send: [`SendRefused`] | receive: [`ReceiveError`] | others |
//! |---|---|---|---|
//! | `EAGAIN` | `Full` | `Empty` | |
//! | `ETIMEDOUT` | `Timeout` | `Timeout` | |
//! | `ESHUTDOWN` | `Closed` | `Closed` | [`NotifyRefused::Closed`] |
//! | `EMSGSIZE` | `TooLong` | | |
//! | `EINVAL` | `BadPriority` | | [`BuildError::Limits`], [`BuildError::BadPriority`], [`InvalidDeadline`] |
//! | `ENOMEM` | `NoMemory` | | [`BuildError::NoMemory`] |
//! | `EBUSY` | | | [`NotifyRefused::Busy`], [`ReadinessError`]: there is one already |
//! | `EMFILE` | | | [`BuildError::Quota`] |
//!
//! # What happens when
//!
//! - *A queue is closed*: sends are refused; who waits to send gets its message back; messages that are
//!   there can be received, and then the queue says `Closed` to all who wait. The last [`Receiver`]
//!   drops them too.
//! - *A future is dropped* before it is ready: a receive has taken nothing, a send drops its message, and
//!   if it was told to look another one is told. One that is forgotten (`mem::forget` of its box) keeps
//!   its place among those who wait for ever, and if it was told to look nobody else is for that one
//!   message.
//! - *What the caller gave panics* under the lock (a comparison, `peek`, `drain_filter`): the lock is
//!   released, nothing is poisoned, and no message is lost but what `drain_filter` had taken, and the
//!   one that was being sent when its comparison panicked: of a batch it stays in front. Comparisons
//!   for somebody who waits are made again by whoever that is: it, and nobody else, sees the panic. What is
//!   dropped is dropped after the unlock. A message whose drop panics passes that on to whoever dropped it.
//!   A waker or notification that panics does so in whoever has it called, when everybody else was woken;
//!   if that was a receive, what it had taken is dropped.
//! - *There is no memory*: the send is refused with the message. A receive needs none.
//! - *A signal handler* may call nothing here: the thread that it interrupts may hold the lock.
//! - *The process forks*: the child may only exec or exit.
//!
//! # What it is not for
//!
//! - Other processes: its memory is this process's. `KernelQueue` (feature `kernel`) is for them, with
//!   the kernel's limits on depth and length.
//! - No bound on the number of messages, or none at all in between (a rendezvous).
//! - Another priority for a message that was sent, or a search by anything else:
//!   [`drain_filter`](Queue::drain_filter) looks at all.
//! - One wait for several queues: a [`Readiness`] each in an epoll set, or a `select` of futures.
//! - A copy of each message for each receiver.
//! - One priority only: a channel without priorities does less for each message.
//! - Real-time guarantees: the lock does not lend its holder the priority of who waits for it.
//!
//! # Source
//!
//! The idea is that of "ipc/mqueue: add rbtree node caching support" (Linux, 2012): a tree of
//! priorities, each with a list of messages; the node freed last is kept, and when none is, one is made
//! before the lock. The order of those who wait and the direct hand-over are those of that queue too.
//! What we changed:
//!
//! - Not one node is kept but a bounded number, so that a burst over many priorities allocates no more
//!   than a single one does; and for priorities that are small numbers there is no tree, but a bitmap.
//! - Messages lie in a slab and are linked by 32-bit indices: neither they nor their links are allocated
//!   one by one.
//! - A task gets a permit, not the message: a future that is dropped cannot put a message back behind
//!   younger ones.
//! - Whoever is to be woken is cloned before it is told, which is the last access to what it waits with.

// Which feature an item wants, on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod core;
mod deadline;
mod error;
mod event;
mod futures;
mod handles;
#[cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]
mod kernel;
mod parker;
mod posix;
mod queue;
mod quota;
mod readiness;
mod stats;
mod waiter;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES, RbTree};
pub use self::deadline::{Deadline, InvalidDeadline, Wait};
pub use self::error::{
    BatchError, BuildError, NotifyError, NotifyRefused, ReceiveError, SendError, SendRefused,
};
pub use self::futures::{ReceiveFuture, SendFuture};
#[cfg(feature = "futures")]
pub use self::futures::{ReceiveStream, SendSink};
pub use self::handles::{IntoIter, Iter, QueueHandle, Receiver, Sender, TryIter};
#[cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]
pub use self::kernel::{Exceeded, KernelQueue, OpenError};
pub use self::posix::{Attributes, Callback, MessageQueue};
pub use self::queue::{Builder, Queue, Received};
pub use self::quota::Quota;
pub use self::readiness::{Interest, Readiness, ReadinessError};
pub use self::stats::{LevelStats, QueueStats};
pub use percpu::AllocError;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
