//! Block I/O that reaps completions right after submitting.
//!
//! An [`Engine`] belongs to one thread. Requests are queued, submitted to the kernel in batches,
//! and whatever has completed by then is reaped in user memory before the call returns, so a
//! device (or a page cache) that answers at once costs one system call per batch and no wake-up.
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
//! let engine = Engine::new()?; // io_uring, Linux AIO or threads: whatever the system allows
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
//! # What is guaranteed
//!
//! **Exactly once.** A request that was accepted completes once, with its buffer; a refused one
//! comes back in the error. At most [`depth`](EngineBuilder::depth) are in flight, and
//! cancellations count too, so the completion ring cannot overflow.
//!
//! **Order.** The kernel sees requests in the order they were queued; a short transfer that goes on,
//! and a request that is tried again, queue up behind what is pending then. Requests complete in any
//! order, also two on the same bytes: of those, submit the second when the first is done. `fsync`
//! covers writes that completed before it was submitted. Callbacks and wake-ups run in the order in
//! which completions were reaped. Requests of other threads queue up when a turn takes them, each
//! thread's in the order in which it sent them, behind futures that already wait for a slot.
//!
//! **Buffers** belong to the engine from submission to completion, whatever becomes of the future
//! that waits: dropped, forgotten, or past its deadline. They are freed or come back after that, and
//! on the engine's thread, or to the thread that collects a [`RemoteOperation`]. If the engine cannot
//! wait for the kernel when it is dropped, it leaks them.
//!
//! **Cancellation** is best effort, and never loses a buffer:
//!
//! | | ends the request | ends the wait |
//! |---|---|---|
//! | dropping an [`Operation`] | no | yes |
//! | [`Operation::deadline`], [`Operation::wait_timeout`] | no | yes, in time |
//! | [`Operation::cancel`], [`Engine::cancel_all`] | if the kernel lets go of it: `ECANCELED` | with the request |
//! | [`Request::cancel_at`] | as above, at that time: `ETIMEDOUT` | with the request |
//! | dropping a [`Submission`] | it was never queued | yes |
//! | dropping a [`RemoteOperation`] | no | yes |
//!
//! What still waits in the engine, or for a thread of the pool, can always be taken back. Block I/O
//! that the kernel has begun hardly ever can: it then ends with its own result. After a write that
//! failed or was cancelled, [`RequestError::transferred`] tells how many bytes were written before; of
//! the rest any part may have been. A write whose [`Operation`] was dropped may still write, and counts
//! as in flight.
//!
//! **Short transfers** are continued where they stopped (a direct file at the block where they
//! stopped): a read ends early only at the end of the file, where it stops, goes on with
//! [zeros](Request::zero_fill), or [fails](Request::exact); a write never, it fails with `ENOSPC` when
//! the device takes nothing more. `EINTR` and `EAGAIN` are tried again, 16 times in a row.
//!
//! **Stack.** Callbacks run after the reap loop and never inside each other unless one asks for it
//! by waiting; a request made in a callback is only queued. The stack stays flat on a device that
//! completes inside submit, and no call stays in a loop for as long as requests keep coming.
//!
//! **No allocation** per request once the engine's queues have been filled once.
//!
//! **The end.** [`Engine::shutdown`] and dropping the engine deliver all that was accepted, also from
//! other threads, and refuse the rest. Nobody waits for ever, but where the thread ends by a panic and an
//! [`Operation`] was forgotten ([`mem::forget`](std::mem::forget)): that keeps the engine's state, and
//! with it requests of other threads that the kernel had by then.
//!
//! Each of these has its tests, and `INVARIANTS.md` names all. The first to look at:
//!
//! | | `tests/` | |
//! |---|---|---|
//! | once, in order | `api/engine_model.rs` | `inv02_device_sees_enqueue_order_and_each_completes_once` |
//! | callbacks in order | `api/callbacks.rs` | `inv02_callbacks_run_in_the_order_of_the_reap` |
//! | other threads in order | `api/remote.rs` | `inv02_requests_of_a_thread_keep_their_order` |
//! | buffers | `api/buffers.rs` | `inv13_writes_land_whole_when_their_operations_are_dropped_or_forgotten` |
//! | cancellation | `api/endings.rs` | `requests_in_flight_are_cancelled_if_the_device_can` |
//! | deadlines | `api/endings.rs` | `inv13_a_deadline_abandons_the_wait_and_not_the_request` |
//! | short transfers | `api/engine_model.rs` | `inv11_any_split_of_short_transfers_gives_the_same_bytes` |
//! | stack depth | `api/callbacks.rs` | `inv14_stack_stays_flat_on_a_device_that_completes_inside_submit` |
//! | allocation | `no_alloc.rs` | `no_allocation_per_request_after_warm_up` |
//! | the end | `api/remote.rs` | `inv14_the_end_answers_every_remote_request` |
//!
//! Callbacks and wake-ups run inside any call that can reap: submitting without a plug (unless the
//! [`ReapMode`] says otherwise), dropping the last plug, [`Engine::turn`], [`Engine::wait`] and what
//! waits by it. Hold no `RefCell` borrow that a callback needs across those.
//!
//! After `fork` the child may only exec or exit.
//!
//! An engine stays on its thread; others make requests of it by a [`Remote`]:
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

// Which feature an item wants, on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod adaptive;
mod alignment;
mod backend;
mod buf;
mod buf_list;
mod buffer_pool;
mod builder;
mod closed_loop;
mod completion_state;
mod core;
mod deadlines;
mod drive;
mod engine;
mod error;
mod file;
mod histogram;
mod op;
mod operation;
mod outcome;
mod payload;
mod perform;
mod plug;
mod queue;
mod raw;
mod reap;
mod registry;
mod remote;
mod request;
mod slab;
mod start;
mod state;
mod stats;
mod submission;
mod sys;
mod turn;
mod wait_queue;
mod wake_fd;
mod waker;

pub use alignment::Alignment;
pub use backend::{scripted, sim};
pub use buf::{AlignedBuf, IoBuf, IoBufMut, Registered};
pub use buf_list::{BufList, TooManyBuffers};
pub use buffer_pool::{BufferPool, PoolBuf};
pub use builder::EngineBuilder;
pub use engine::Engine;
pub use error::{RequestError, SubmitError};
pub use file::File;
pub use histogram::Histogram;
pub use op::AllocateMode;
pub use operation::{Deadline, DeadlinePassed, Operation};
pub use outcome::Outcome;
pub use plug::Plug;
pub use queue::{Completion, CompletionQueue};
pub use reap::ReapMode;
pub use remote::{Remote, RemoteOperation, RemoteRequest, SharedFile};
pub use request::Request;
pub use start::{BackendKind, Fallback, StartError};
pub use stats::{EngineStats, Sizes};
pub use submission::Submission;
pub use turn::Turn;

/// The pieces a model checker drives directly; outside semantic versioning.
#[doc(hidden)]
pub mod model {
    pub use crate::backend::pool::Jobs;
    pub use crate::backend::ring::{Event, Ring};
    pub use crate::drive::round;
    pub use crate::remote::mailbox::{Answer, Mailbox, SendError, Sent, SlotIndex};
}
