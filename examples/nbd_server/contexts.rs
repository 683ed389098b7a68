//! Connection ids: a table from which the context of a connection is found, and in which a stale id
//! finds nothing.
//!
//! ```text
//!  accept ─► CtxTable<Connection> ◄─ id ─ epoll's data, the worker's lists of connections
//!                   ▲ CtxRef
//!               requests
//! ```
//!
//! A number that comes back from the kernel is looked up, not trusted. An id names one connection
//! and never another, however often its place in the table is used again. So a request that ends
//! after its connection is known as such.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use radix_ctx::CtxTable;

use crate::open_files::FileUse;

/// The contexts of all connections of the server.
pub(crate) type Connections = CtxTable<Connection>;

/// The context of a connection. The worker and each operation of the connection hold a reference,
/// so the context lives at least until the last operation has completed.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The worker in the low half, and the slot there in the high half.
    place: AtomicU64,
    /// The file that the connection and its operations use.
    pub(crate) used: OnceLock<FileUse>,
}

/// The place of a connection that no worker has.
const NOWHERE: u64 = u64::MAX;

impl Default for Connection {
    fn default() -> Self {
        Self { place: AtomicU64::new(NOWHERE), used: OnceLock::new() }
    }
}

impl Connection {
    /// The slot of the connection. Called by its worker only.
    pub(crate) fn slot(&self) -> usize {
        (self.place.load(Ordering::Relaxed) >> 32) as usize // see `slot_at`
    }

    /// The slot of the connection at that worker. `None` if another worker has the connection, or
    /// none.
    pub(crate) fn slot_at(&self, worker: usize) -> Option<usize> {
        // Ordering: Relaxed. The worker that has the connection stores its own place, and takes
        // that back before the message with which it gives the connection away. A worker never sees
        // an older value of this one word than what it stored itself: so it finds its own number
        // only while it has the connection.
        let place = self.place.load(Ordering::Relaxed);
        (place != NOWHERE && place as u32 as usize == worker).then_some((place >> 32) as usize)
    }

    /// Sets the worker and the slot. `None` before the connection moves to another worker.
    pub(crate) fn set_place(&self, at: Option<(usize, usize)>) {
        let place = at.map_or(NOWHERE, |(worker, slot)| (slot as u64) << 32 | worker as u64);
        self.place.store(place, Ordering::Relaxed); // see `slot_at`
    }
}
