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
//! - **Exactly once.** A request that was accepted completes once, with its buffer; a refused one
//!   comes back in the error. At most [`depth`](EngineBuilder::depth) are in flight, so the
//!   completion ring cannot overflow.
//! - **Order.** The kernel sees requests in the order they were queued. They complete in any
//!   order; two requests that must not overtake each other are submitted one after the other.
//!   What one call reaps is in the completion queues before the first callback or wake-up runs;
//!   those run in the order of their completions.
//! - **Buffers** belong to the engine until completion, also when the future that waits for one
//!   is dropped or forgotten.
//! - **Short transfers** are continued: a read ends early only at the end of the file, a write
//!   never (it fails with `ENOSPC` when the device takes nothing more).
//! - **Stack.** Callbacks run after the reap loop and never inside each other unless one asks for
//!   it by waiting; a request made in a callback is only queued. The stack stays flat on a device
//!   that completes inside submit.
//! - **No allocation** per request once the engine's queues have been filled once.
//!
//! Callbacks and wake-ups run inside any call that can reap: submitting without a plug, dropping
//! the last plug, [`Engine::turn`], [`Engine::wait`]. Hold no `RefCell` borrow that a callback
//! needs across those.

mod alarm;
mod backend;
mod books;
mod buf;
mod buf_list;
mod buffer_pool;
mod builder;
mod cargo;
mod core;
mod doorbell;
mod engine;
mod file;
mod op;
mod operation;
mod plug;
mod queue;
mod reap;
mod registry;
mod request;
mod slab;
mod state;
mod stats;
mod sys;

pub use backend::scripted;
pub use buf::{AlignedBuf, IoBuf, IoBufMut};
pub use buf_list::{BufList, TooManyBuffers};
pub use buffer_pool::{BufferPool, PoolBuf, Registered};
pub use builder::{BackendKind, EngineBuilder, Fallback, StartError};
pub use engine::{Engine, Turn};
pub use file::{Alignment, File};
pub use op::AllocateMode;
pub use operation::Operation;
pub use plug::Plug;
pub use queue::{Completion, CompletionQueue};
pub use reap::ReapMode;
pub use request::{Request, SubmitError};
pub use stats::{EngineStats, Latency, ReapSizes};

/// What every front end delivers: bytes transferred or the error, and the buffer.
pub type Outcome<B> = (std::io::Result<usize>, B);

/// The pieces a model checker drives directly; outside semantic versioning.
#[doc(hidden)]
pub mod model {
    pub use crate::backend::pool::Jobs;
    pub use crate::backend::ring::{Event, Ring};
}
