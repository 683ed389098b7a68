//! A priority message queue for the threads and tasks of one process, with the semantics of POSIX
//! message queues. It allocates outside its lock, except after a lost race, which [`stats`](Queue::stats)
//! counts; never with [`no_alloc`](Builder::no_alloc).
//!
//! ```
//! use std::time::Instant;
//! use mq_rbtree::{Queue, ReceiveError};
//!
//! let (sender, receiver) = Queue::builder(100).channel()?; // at most 100 messages
//! sender.send("later", 1)?;
//! sender.send("now", 9)?; // priorities are 0 to 32,767; waits while there is no room
//! sender.send("now, too", 9)?;
//!
//! assert_eq!(receiver.receive()?, ("now", 9)); // highest priority first, then first in, first out
//! assert_eq!(receiver.try_receive()?, ("now, too", 9));
//!
//! let refused = sender.send("never", 40_000).unwrap_err();
//! assert_eq!(refused.to_string(), "the priority is 40000; the highest is 32767");
//! assert_eq!(refused.value, "never"); // a refused message comes back
//!
//! drop(sender); // the last sender: the queue closes, and its messages can still be received
//! assert_eq!(receiver.receive()?, ("later", 1));
//! assert_eq!(receiver.receive_deadline(Instant::now()), Err(ReceiveError::Closed));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The chapters of the [`guide`] explain allocation outside the lock and staged sends with a picture each.
//!
//! # Choosing
//!
//! First the type. All have the same order and limits:
//!
//! | use | if |
//! |---|---|
//! | [`Sender`], [`Receiver`] | the queue ends when the last user of one side is gone: [`Builder::channel`] |
//! | [`Queue`], by reference or in an `Arc` | every user sends and receives, or the program closes the queue itself |
//! | [`Core`] | one thread uses the queue, or a lock of your own protects it |
//!
//! Then the priorities:
//!
//! | use | if | finding the next message |
//! |---|---|---|
//! | [`Bitmap`], the default | priorities are numbers from 0 to 32,767 | at most three words of a bitmap |
//! | [`RbTree`]: [`Queue::with_keys`] | priorities have any other ordered type that is `Copy` and `Debug`: times, pairs, [`Reverse`](std::cmp::Reverse) | the highest is cached; a send searches a tree |
//!
//! Then the way to wait:
//!
//! | use | in |
//! |---|---|
//! | [`send`](Queue::send), [`receive`](Queue::receive); with a deadline [`send_deadline`](Queue::send_deadline), [`receive_deadline`](Queue::receive_deadline) | a thread |
//! | [`send_async`](Queue::send_async), [`receive_async`](Queue::receive_async) | a task; tasks and threads may share one queue |
//! | `Receiver::into_stream`, with the feature `stream` | code that expects a `Stream` |
//! | [`Readiness`], a file descriptor | an event loop: epoll, or tokio's `AsyncFd` |
//!
//! And the rest:
//!
//! | to | use |
//! |---|---|
//! | receive in a loop | a `for` loop over a [`Receiver`], [`try_iter`](Receiver::try_iter) |
//! | lose no message to a consumer that panics or is cancelled | [`receive_guard`](Queue::receive_guard): a [`MessageGuard`] puts its message back unless it is accepted |
//! | send or receive many messages at once | [`send_batch`](Queue::send_batch), [`receive_batch`](Queue::receive_batch), [`receive_batch_async`](Queue::receive_batch_async) |
//! | reserve room for urgent messages | [`reserve`](Builder::reserve) |
//! | prevent the starvation of low priorities | [`ageing`](Builder::ageing) |
//! | remove messages out of order | [`drain_filter`](Queue::drain_filter) |
//! | end | [`close`](Queue::close), then [`receive`](Queue::receive) until it returns `Closed` |
//! | observe | [`stats`](Queue::stats) |
//!
//! # Features
//!
//! `stream`, which is off by default, adds `ReceiveStream`: the trait `Stream` of futures-core. The
//! asynchronous operations need no feature.
//!
//! # Order
//!
//! Messages of the highest priority are received first, and messages of equal priority in the order
//! in which they were sent. With [`ageing`](Builder::ageing), every so many receives serve the
//! priorities in turn.
//!
//! Waiters are served in the order of their arrival. The priority
//! of the message that a sender waits with does not matter.
//!
//! A waiter is woken, and then looks at the queue itself. An operation that need not wait may come before
//! it and take the message or the room. Then the waiter waits again, in its former place.
//!
//! # Progress
//!
//! A send that need not wait takes no lock: it claims a slot of a ring by one compare-exchange and
//! publishes its message there. Receives, which take the lock, drain the ring into the ordered
//! store; they take a message that is alone from the ring. Sends take the lock as well while a
//! thread or task waits, a [`Readiness`] is armed, or memory is missing; and always in queues
//! with an [`RbTree`] or [`reserve`](Builder::reserve).
//!
//! A sender that is stopped between its claim and its publication, a few instructions, delays the
//! receives that come to its slot, and all operations if the queue is full or a thread begins to
//! wait: also [`try_send`](Queue::try_send), [`try_receive`](Queue::try_receive) and
//! [`len`](Queue::len). Deadlines still end such a wait, with `Timeout`; tasks poll again at once;
//! and [`close`](Queue::close) and the drop of a future do not wait. The drop of the last receiver
//! waits for such a sender for at most 50 ms.
//!
//! The lock is neither fair nor recursive. A thread that finds it locked tries again ten times,
//! after pauses that double up to some microseconds, and then sleeps. So each of two threads that
//! use the queue all the time keeps it for some microseconds, and it does not move between their
//! CPUs for every message. Before all that, `receive`, `try_receive` and `receive_deadline` yield the
//! CPU up to 32 times if the queue's sends take no lock, and not after their deadline.
//!
//! | operation | time under the lock | system calls |
//! |---|---|---|
//! | receive, and a send that takes the lock, with `try_` and async forms | constant in the depth, up to 1,024 messages are drained; with an [`RbTree`] logarithmic in the number of priorities | none, unless it wakes a sleeping thread or signals a [`Readiness`] |
//! | a wait | constant; then, if there are several CPUs, the thread spins for up to some microseconds, as that has helped lately, and yields some times | one to sleep, one of the waking thread |
//! | a receive beside waiting senders that only a [`reserve`](Builder::reserve) keeps out | linear in their number | as for a receive |
//! | batches | up to 64 messages at a time | as for a send or receive |
//! | [`close`](Queue::close) | constant | one for each sleeping thread |
//! | [`len`](Queue::len), [`stats`](Queue::stats) | constant in the depth | none |
//! | [`drain`](Queue::drain), [`drain_filter`](Queue::drain_filter) | linear in the depth | as for a receive |
//!
//! These run outside the lock: allocation (but see [Memory](#memory)), freeing, the drop of messages, clones and calls of
//! wakers. These run
//! under it: comparisons of an [`RbTree`]'s keys, and the function passed to
//! [`drain_filter`](Queue::drain_filter).
//!
//! # Memory
//!
//! A message takes 8 bytes beside its own size, in chunks that double in size and are kept until
//! the queue is dropped. The ring has 8 bytes and the message in each of up to 1,024 slots, at most 64
//! KiB in all, which are allocated when the queue is made. So is a [`Bitmap`]: 4 KiB, and 384 KiB of which
//! the system provides a page of 4 KiB for each 341 priorities when one of them is first used. An [`RbTree`] has a node for each priority with messages, and keeps up to
//! [`spare_nodes`](Builder::spare_nodes) freed nodes. Waiting threads and futures bring their own
//! memory; a thread allocates once, when it first sleeps.
//!
//! A message moves by value through several stack frames on its way: put a large one into a `Box`.
//!
//! A send allocates before it takes the lock, if a hint shows that memory is missing, and checks
//! again under the lock. If another thread took the memory in between, it is allocated under the
//! lock, which [`stats`](Queue::stats) counts. A queue that was as deep before allocates nothing,
//! if nodes are kept for as many priorities as it has. With
//! [`no_alloc`](Builder::no_alloc) everything is allocated when the queue is made.
//!
//! # Errors
//!
//! A refused message comes back in the error, and the queue is unchanged. Each error converts to
//! [`io::Error`](std::io::Error), and has `errno()`, except [`ReadinessError`], whose `reason` is an
//! [`io::Error`](std::io::Error). The cause is in the field `reason`.
//!
//! | errno | send: [`SendRefused`] | receive: [`ReceiveError`] | other errors |
//! |---|---|---|---|
//! | `EAGAIN` | `Full` | `Empty` | |
//! | `ETIMEDOUT` | `Timeout` | `Timeout` | |
//! | `ESHUTDOWN` | `Closed` | `Closed` | |
//! | `EINVAL` | `BadPriority` | | [`BuildError::Limits`], [`BuildError::BadPriority`] |
//! | `ENOMEM` | `NoMemory` | `NoMemory` | [`BuildError::NoMemory`] |
//! | `EBUSY` | | | [`ReadinessError`] |
//!
//! # Special situations
//!
//! - *Close*: sends are refused, and waiting senders get their messages back. The messages in the
//!   queue can still be received; after that every receive returns `Closed`. Dropping the last
//!   [`Receiver`] also drops the messages.
//! - *A dropped future*: a receive has taken no message, and a send drops its message. If the
//!   future was woken, another waiter is woken for it. A future that is kept and not polled any more, or
//!   leaked (`mem::forget` of its box), keeps its position among the waiters; if it was woken, no other
//!   waiter is woken for that message or room until it is polled or dropped.
//! - *A dropped [`MessageGuard`]* puts its message back, in front of its priority, also into a closed
//!   queue. Until the last guard ends, a receive on a closed and empty queue waits, or is refused with
//!   `Empty`. A thread or task that holds a guard must not wait on the same queue, not even to send:
//!   the guard's message keeps its place. If a comparison panics in the drop, the message is dropped.
//! - *A panic of user code under the lock* (a comparison, `drain_filter`) releases the lock
//!   and poisons nothing. It loses no message, except those that `drain_filter` had removed, and
//!   one whose comparison panicked in its own send, or in that of its batch.
//! - *A panic in a drop* of a message is the panic of the thread that dropped it.
//! - *A panic of a waker* resumes in the thread that called it, after all other
//!   waiters were woken. If that thread was in a receive, the received message is dropped; so is that of
//!   [`MessageGuard::accept`], and so are those of a drain, and that of a send that was refused. A batch has put
//!   its messages into its vector. If two wakers panic in one call, the process aborts.
//! - *Memory is exhausted*: a send is refused. A receive needs no memory; in a
//!   guard, with an [`RbTree`], it may need a node. The drop of the guard needs none. These end the process, as a
//!   `Vec` without memory does: [`drain`](Queue::drain), [`drain_filter`](Queue::drain_filter).
//! - *In a signal handler* no function of this crate may be called: the interrupted thread may hold
//!   the lock.
//! - *After `fork`* the child may only exec or exit.
//!
//! # Limitations
//!
//! The crate is not for:
//!
//! - Other processes: a queue is in the memory of this process.
//! - Unbounded queues, and queues of no capacity (rendezvous).
//! - Changing the priority of a sent message, or finding messages by other properties:
//!   [`drain_filter`](Queue::drain_filter) examines all messages.
//! - One wait for several queues: use a [`Readiness`] of each in an epoll set, or a `select` of
//!   futures.
//! - Broadcasts: each message goes to one receiver.
//! - A single priority: a channel without priorities does less work for each message.
//! - Real-time guarantees: the lock has no priority inheritance.
//!
//! # Source
//!
//! The idea is that of "ipc/mqueue: add rbtree node caching support" (Linux, 2012): a tree of
//! priorities, each with a list of messages; the node freed last is kept, and if none is kept, one
//! is allocated before the lock. This crate differs:
//!
//! - It keeps a bounded number of nodes, and not only one, so that a burst over many priorities
//!   allocates nothing once the nodes exist. For small numbers as priorities there is a bitmap in
//!   place of the tree.
//! - Messages are stored in a slab and linked by 32-bit indices. Neither messages nor links are
//!   allocated one by one.
//! - A waiter is woken and takes its message itself. The kernel hands it the message: a dropped future could
//!   only put that back behind younger ones, and a sender would have to touch the memory of a thread that
//!   may be gone.

// Shows on docs.rs which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod core;
mod error;
mod guard;
#[cfg(doc)]
pub mod guide;
mod handles;
mod queue;
mod readiness;
mod staging;
mod stats;
#[cfg(feature = "stream")]
mod stream;

pub use self::core::{Bitmap, Core, Levels, PRIORITIES, RbTree};
pub use self::error::{BatchError, BuildError, ReceiveError, SendError, SendRefused};
pub use self::guard::MessageGuard;
pub use self::handles::{Iter, QueueHandle, Receiver, Sender};
pub use self::queue::{Builder, Queue, Received};
pub use self::readiness::{Interest, Readiness, ReadinessError};
pub use self::stats::{LevelStats, QueueStats};
#[cfg(feature = "stream")]
pub use self::stream::ReceiveStream;
pub use offlock_sync::AllocError;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
