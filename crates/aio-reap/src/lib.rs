#![doc = include_str!("../README.md")]
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
//! [`ReapMode`] says when the engine looks for completions, and [`EngineBuilder`] has the limits. Tests
//! of the engine's users need no real device: see `aio-reap-test` in the repository.
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
//! [`Operation::cancel`] says which requests can be cancelled: block I/O that the kernel has begun almost
//! never. After a write that failed or was cancelled, [`RequestError::transferred`] returns how many bytes were
//! written before the error. Any part of the other bytes may have been written. A write whose
//! [`Operation`] was dropped may still write, and counts as in flight.
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
//! Each guarantee has tests, which `INVARIANTS.md` names.
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
pub mod guide {
    //! How this crate works: completions are reaped in the call that submits.
    #[doc = include_str!("guide/reaping.md")]
    pub mod reaping {}
}
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
pub use engine::{Engine, Plug};
pub use error::{BackendKind, Fallback, RequestError, StartError, SubmitError};
pub use file::{File, SharedFile};
pub use files::{IoPath, OpenOptions, Statx};
pub use op::{Alignment, AllocateMode};
pub use operation::Operation;
pub use payload::{Outcome, Reply};
pub use queue::{Completion, CompletionQueue};
pub use remote::Remote;
pub use request::{Request, Submission};
pub use slab::RequestId;
pub use stats::{EngineStats, Sizes};
