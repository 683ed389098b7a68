//! Connections, each known by an id.
//!
//! ```text
//!  accept ─► CtxTable<Connection> ◄─ id ─ epoll's data, the worker's lists of connections
//!                   ▲ CtxRef
//!               requests
//! ```
//!
//! A number that comes back from the kernel is looked up, not trusted. An id names one connection and never another,
//! however often its place in the table is used again. So a request that ends after its connection is known as such.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use radix_ctx::CtxTable;

use crate::open_files::FileUse;

/// The server's connections. As many as it takes at a time: the table's quota.
pub(crate) type Connections = CtxTable<Connection>;

/// What others need to know of a connection. Its worker holds a reference, and so does each of its
/// operations: it outlives the connection at least until the last of them has completed.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Its worker, and above that where it is there.
    place: AtomicU64,
    /// What it uses, and its operations do.
    pub(crate) used: OnceLock<FileUse>,
}

/// The place of a connection that no worker has yet.
const NOWHERE: u64 = u64::MAX;

impl Default for Connection {
    fn default() -> Self {
        Self { place: AtomicU64::new(NOWHERE), used: OnceLock::new() }
    }
}

impl Connection {
    /// Where its worker keeps it, for that worker: it has requests of it, and so the connection.
    pub(crate) fn slot(&self) -> usize {
        (self.place.load(Ordering::Relaxed) >> 32) as usize // see `slot_at`
    }

    /// Where that worker keeps it; `None` if it does not, for what is left there of one that has gone to
    /// another.
    pub(crate) fn slot_at(&self, worker: usize) -> Option<usize> {
        // Ordering: Relaxed. The worker that has the connection stores its own place, and takes that back before the
        // message with which it gives the connection away. A worker never sees an older value of this one word
        // than what it stored itself: so it finds its own number only while it has the connection.
        let place = self.place.load(Ordering::Relaxed);
        (place != NOWHERE && place as u32 as usize == worker).then_some((place >> 32) as usize)
    }

    /// Says where its worker keeps it, before that looks for it; `None` before it goes to another.
    pub(crate) fn set_place(&self, at: Option<(usize, usize)>) {
        let place = at.map_or(NOWHERE, |(worker, slot)| (slot as u64) << 32 | worker as u64);
        self.place.store(place, Ordering::Relaxed); // see `slot_at`
    }
}
