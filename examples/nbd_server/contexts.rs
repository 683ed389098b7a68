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

use radix_ctx::CtxTable;

/// The contexts of all connections of the server.
pub(crate) type Connections = CtxTable<Connection>;

/// The context of a connection. The worker and each operation of the connection hold a reference,
/// so the context lives at least until the last operation has completed.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// The place of the connection in its worker's slab, once it is there.
    pub(crate) slot: OnceLock<usize>,
}
