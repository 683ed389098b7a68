//! Block I/O that reaps completions right after submitting.
//!
//! An [`Engine`] belongs to one thread. The engine queues requests, submits them to the kernel in
//! batches, and reaps completions in user memory before the call returns. A device (or a page
//! cache) that answers at once then costs one system call per batch and no wake-up.
//!
//! ```text
//!  read/write/fsync ──► pending ──flush──► in flight ──reap──► queue
//!     Err(Full) ◄── no slot free       └── same call ──┘  └──► ready ──► callback | future
//! ```
//!
//! ```
//! use aio_reap::Engine;
//!
//! # fn main() -> std::io::Result<()> {
//! let engine = Engine::new()?; // the best of io_uring, Linux AIO and threads
//! let file = engine.attach(tempfile::tempfile()?)?;
//!
//! // Everything queued under a plug goes to the kernel in one batch when it drops.
//! let plug = engine.plug();
//! let hello = engine.write(&file, b"hello ".to_vec(), 0).submit()?;
//! let world = engine.write(&file, b"world".to_vec(), 6).submit()?;
//! drop(plug);
//! assert_eq!(hello.wait().0?, 6);
//! assert_eq!(world.wait().0?, 5);
//!
//! let (read, buf) = engine.read(&file, vec![0; 11], 0).submit()?.wait();
//! assert_eq!((read?, &buf[..]), (11, &b"hello world"[..]));
//! # Ok(())
//! # }
//! ```
//!
//! The [`guide`] explains the reap after a submission with a picture.
//!
//! # Choosing
//!
//! | the program | uses |
//! |---|---|
//! | has one thread, and a loop of its own | [`Engine`], a [`CompletionQueue`], [`Engine::turn`]; the engine's descriptor ([`AsFd`](std::os::fd::AsFd)) for its epoll |
//! | runs futures and no other runtime | [`Engine::block_on`] and [`Operation`]s |
//! | runs on tokio | `Engine::run_until` or `Engine::drive` on a `LocalSet` (feature `tokio`) |
//! | has many threads | an engine on each; or one thread that [serves](Engine::serve) [`Remote`]s |
//! | is a library that uses the engine of its caller | [`Request::callback_on_turn`], which runs no callback of the caller |
//! | must not allocate per request | a [`CompletionQueue`] or [`Operation`]s, and buffers that it reuses |
//! | asks for more than the engine takes | [`Request::submit_async`], which waits for a slot, or [`SubmitError::Full`] and a turn |
//!
//! | front end | the result goes to |
//! |---|---|
//! | [`submit`](Request::submit) | an [`Operation`]: a future, or [`wait`](Operation::wait) |
//! | [`callback`](Request::callback) | a closure, on the engine's thread, after the reap; with the buffer at most 96 bytes, or it does not compile: box what it captures |
//! | [`enqueue`](Request::enqueue) | a [`CompletionQueue`], with a number of the caller; the cheapest one |
//!
//! | buffer | for |
//! |---|---|
//! | `Vec<u8>`, `Box<[u8]>`, `&'static [u8]` | files that were not opened with `O_DIRECT`; a read fills `len`, not the capacity: `vec![0; 4096]` |
//! | `String`, `&'static str` | the same, for writes |
//! | `BytesMut`, and for writes `Bytes` | the same (feature `bytes`) |
//! | [`AlignedBuf`] | `O_DIRECT`; [`Alignment::of`] returns what a file needs |
//! | [`BufList`] | one request on several buffers |
//! | an [`IoBuf`] of the program | memory that it manages, such as the frames of a cache |
//!
//! | backend | used when | how it completes |
//! |---|---|---|
//! | [`Uring`](BackendKind::Uring) | the kernel and seccomp filters allow it | ring in user memory |
//! | [`Aio`](BackendKind::Aio) | io_uring is refused | ring peeked in user memory; threads for all but `O_DIRECT` reads and writes |
//! | [`Threads`](BackendKind::Threads) | both are refused | queue and eventfd |
//!
//! [`ReapMode`] says when the engine looks for completions, and [`EngineBuilder`] has the limits. Tests
//! of the engine's users need no real device: see `aio-reap-test` in the repository.
//!
//! | feature | off by default, adds |
//! |---|---|
//! | `bytes` | [`IoBuf`] for `Bytes` and `BytesMut`, [`IoBufMut`] for `BytesMut` |
//! | `tokio` | `Engine::drive` and `Engine::run_until` |
//!
//! # What is guaranteed
//!
//! **Exactly once.** An accepted request completes once, with its buffer. A refused request comes
//! back in the error. At most [`depth`](EngineBuilder::depth) requests are in flight.
//! Cancellations have a limit of their own, so that the completion ring has room for both.
//!
//! **Order.** The kernel sees requests in the order in which they were queued. A continued short
//! transfer and a retried request go to the end of the queue. Requests complete in any order, even
//! if they use the same bytes: submit a dependent request after the first has completed. `fsync`
//! covers the writes that completed before it was submitted. Callbacks and wake-ups run in the
//! order in which completions were reaped. Calls of a [`Remote`] run in the
//! order in which their thread made them.
//!
//! **Buffers** belong to the engine from submission to completion, even if the waiting future is
//! dropped or forgotten. After the completion the engine's thread frees or
//! returns the buffer. If the engine cannot wait for the kernel when it is dropped, it leaks the buffers. The same holds for paths. An
//! opened file that no code receives is closed.
//!
//! **Cancellation** is best effort, and never loses a buffer:
//!
//! | | ends the request | ends the wait |
//! |---|---|---|
//! | dropping an [`Operation`] | no | yes |
//! | the timeout of [`Engine::wait`], or a runtime's timeout of an [`Operation`] | no | yes, in time |
//! | [`Operation::cancel`], [`Engine::cancel`] | if the kernel can cancel it: `ECANCELED` | with the request |
//! | [`Request::cancel_at`] | if the kernel can cancel it at that time: `ETIMEDOUT` | with the request |
//! | dropping a [`Submission`] | it was never queued | yes |
//! | dropping a [`Response`] of another thread | no | yes |
//!
//! A request that still waits in the engine, or for a thread of the pool, can always be cancelled,
//! with two exceptions: a [close](Engine::close) cannot, and neither can a request in io_uring's
//! submission ring that the kernel has no room for. Block I/O that the kernel has begun can almost
//! never be cancelled and ends with its own result. After a write that failed or was cancelled,
//! [`RequestError::transferred`] returns how many bytes were written before the error. Any part of
//! the other bytes may have been written. A write whose [`Operation`] was dropped may still write,
//! and counts as in flight.
//!
//! **Short transfers** are continued where they stopped (on a direct file, at the start of the
//! block where they stopped). A read ends early only at the end of the file. There it stops, or is filled
//! with [zeros](Request::zero_fill). A write never ends early: it fails with `ENOSPC` if the device takes no
//! more bytes. `EINTR` and `EAGAIN` are retried up to 16 times in a row.
//!
//! **Stack.** Callbacks run after the reap loop. A callback runs inside another one only if the
//! outer callback waits. A request made in a callback is only queued. So the stack stays flat on a
//! device that completes inside submit, and no call loops for as long as requests keep coming.
//!
//! **No allocation** per request after the engine's queues have been full once. A call of a [`Remote`]
//! allocates once, with a [`Response`] twice.
//!
//! **The end.** [`Engine::shutdown`] and dropping the engine deliver every accepted request,
//! run every queued call of a [`Remote`], and refuse all later ones. No waiter is left behind, with two
//! exceptions, which are cycles of owners. If the engine's thread panics while an [`Operation`]
//! exists that was forgotten ([`mem::forget`](std::mem::forget)) or that a callback of the engine
//! captures, the engine's state stays allocated, and a [`Response`] whose request was in flight never
//! resolves. A callback that captures the engine (in an `Rc`) keeps it until the callback has run:
//! [drain](Engine::drain) the engine before its last other owner is dropped.
//!
//! Each guarantee has tests. `INVARIANTS.md` names all of them. The most important ones are:
//!
//! | | `tests/` | |
//! |---|---|---|
//! | once, in order | `api/engine_model.rs` | `inv02_device_sees_enqueue_order_and_each_completes_once` |
//! | callbacks in order | `api/callbacks.rs` | `inv02_callbacks_run_in_the_order_of_the_reap` |
//! | other threads in order | `api/remote.rs` | `inv02_calls_of_a_thread_keep_their_order` |
//! | buffers | `api/buffers.rs` | `inv13_writes_land_whole_when_their_operations_are_dropped_or_forgotten` |
//! | cancellation | `api/endings.rs` | `requests_in_flight_are_cancelled_if_the_device_can` |
//! | short transfers | `api/engine_model.rs` | `inv11_any_split_of_short_transfers_gives_the_same_bytes` |
//! | opened files | `api/files.rs` | `inv19_an_opened_file_without_a_receiver_is_closed` |
//! | stack depth | `api/callbacks.rs` | `inv14_stack_stays_flat_on_a_device_that_completes_inside_submit` |
//! | allocation | `no_alloc.rs` | `no_allocation_per_request_after_warm_up` |
//! | the end | `api/remote.rs` | `inv14_the_end_runs_every_queued_call` |
//!
//! Callbacks and wake-ups run inside every call that can reap: a submission without a plug (unless
//! the [`ReapMode`] forbids it), the drop of the last plug, [`Engine::turn`], [`Engine::wait`], and
//! functions that call `wait`. Do not hold a `RefCell` borrow that a callback needs across such a
//! call.
//!
//! After `fork` the child may only exec or exit.
//!
//! An engine stays on its thread. Other threads run closures there through a [`Remote`]:
//!
//! ```compile_fail
//! fn send<T: Send>(_: T) {}
//! send(aio_reap::Engine::new().unwrap());
//! ```
//!
//! ```compile_fail
//! fn share<T: Sync>(_: T) {}
//! share(aio_reap::Engine::new().unwrap());
//! ```

// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_debug_implementations)]

mod backend;
mod buf;
mod builder;
mod calls;
mod completion_state;
mod core;
mod drive;
mod engine;
mod error;
mod file;
mod files;
#[cfg(doc)]
pub mod guide;
#[cfg(all(test, offlock_model))]
mod models;
mod op;
mod operation;
mod payload;
mod queue;
mod remote;
mod request;
mod slab;
mod state;
mod stats;
mod sys;
#[cfg(feature = "tokio")]
mod tokio_drive;
mod wake_fd;

#[doc(hidden)]
pub use backend::external;
pub use buf::{AlignedBuf, BufList, IoBuf, IoBufMut};
pub use builder::EngineBuilder;
pub use calls::{NoResponse, Responder, Response};
pub use completion_state::Turn;
pub use core::ReapMode;
pub use engine::Engine;
pub use engine::Plug;
pub use error::{BackendKind, Fallback, StartError};
pub use error::{RequestError, SubmitError};
pub use file::File;
pub use file::SharedFile;
pub use files::{IoPath, OpenOptions, Statx};
pub use op::Alignment;
pub use op::AllocateMode;
pub use operation::Operation;
pub use operation::Outcome;
pub use operation::Reply;
pub use queue::{Completion, CompletionQueue};
pub use remote::Remote;
pub use request::Request;
pub use request::Submission;
pub use slab::RequestId;
pub use stats::{EngineStats, Sizes};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
