//! Connection ids, and the table from which the context of a connection is looked up.
//!
//! ```text
//!  accept ─► CtxTable<Connection> ◄─ id ─ epoll's data, the worker's lists of connections
//!                   ▲ CtxRef
//!               requests
//! ```
//!
//! An id that the kernel returns is looked up, because it may be stale. An id never names another
//! connection, even if the slot in the table is reused. So a request that ends after its connection
//! is recognised.

use std::sync::OnceLock;

use radix_ctx::CtxTable;

/// The contexts of all connections of the server.
pub(crate) type Connections = CtxTable<Connection>;

/// The context of a connection. The worker and each operation of the connection hold a reference,
/// so the context lives at least until the last operation has completed.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// The index of the connection in its worker's slab, set by the worker.
    pub(crate) slot: OnceLock<usize>,
}
