//! What is known by an id: connections, and operations in the engine.
//!
//! ```text
//!  accept ─► CtxTable<Connection> ◄─ id ─ epoll's data, the worker's lists of connections
//!                   ▲ CtxRef
//!  submit ─► CtxTable<Operation>  ◄─ id ─ the engine's user data, which a completion brings back
//! ```
//!
//! A number that comes back from the kernel is looked up, not trusted. An id names one connection or
//! one operation and never another, however often its place in the table is used again. So a
//! completion of a request whose connection is closed is known as such, and one that nobody waits for
//! is refused, and both are counted.

use std::sync::atomic::{AtomicUsize, Ordering};

use aio_reap::AlignedBuf;
use radix_ctx::{CtxTable, LookupError};
use thiserror::Error;

/// The server's connections. As many as it takes at a time: the table's quota.
pub(crate) type Connections = CtxTable<Connection>;

/// What others need to know of a connection. Its worker holds a reference, and so does each of its
/// operations: it outlives the connection at least until the last of them has completed.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    slot: AtomicUsize,
}

impl Connection {
    /// Where its worker keeps it.
    pub(crate) fn slot(&self) -> usize {
        // Ordering: Relaxed; only its worker stores and loads it.
        self.slot.load(Ordering::Relaxed)
    }

    /// Says where the worker keeps it, before that looks for it.
    pub(crate) fn set_slot(&self, slot: usize) {
        self.slot.store(slot, Ordering::Relaxed); // see `slot`
    }
}

/// A completion that leads to no connection.
#[derive(Debug)]
pub(crate) struct Stray {
    pub(crate) why: Lost,
    /// Its buffer, which is on nobody's account.
    pub(crate) buf: Option<AlignedBuf>,
}

/// Why a completion leads to no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum Lost {
    #[error("its connection is closed")]
    Closed,
    #[error("no operation in the engine has this id: {0}")]
    Unknown(LookupError),
}
