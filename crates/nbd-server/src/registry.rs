//! The list of sessions: all connections of the server.
//!
//! A worker changes the list once for each connection, never for a request. The main thread
//! iterates over the list without holding a lock, to count the connections of each export. When
//! the server stops, it closes the list, so that no connection enters it. Then each worker ends its
//! connections.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use percpu_list::{Entry, PerCpuList};
use radix_ctx::CtxTable;

use crate::export::ExportTable;

/// An entry in the list of sessions. Dropping it removes it.
pub(crate) type Listed = Entry<Client>;

/// A connection in the list of sessions.
#[derive(Debug, Default)]
pub(crate) struct Client {
    /// The name of its export, once it is negotiated.
    export: OnceLock<String>,
}

impl Client {
    pub(crate) fn set_export(&self, name: &str) {
        let _ = self.export.set(name.to_owned()); // unset before: a connection negotiates once
    }
}

/// All sessions of the server. A worker adds a session in the slot of its CPU.
pub(crate) type Registry = PerCpuList<Client>;

/// Returns the number of sessions of each export: those of the command line, and others that are
/// open. Sessions may come and go during the iteration; a session that stays is seen once.
pub(crate) fn by_export(sessions: &Registry, exports: &ExportTable) -> BTreeMap<String, usize> {
    let fixed = exports.names().map(|name| (name.to_owned(), 0));
    let open = sessions.iter().filter_map(|client| Some((client.export.get()?.clone(), 1)));
    by_name(fixed.chain(open))
}

/// Returns the sum of the figures of each name, in order of the names.
pub(crate) fn by_name(figures: impl Iterator<Item = (String, usize)>) -> BTreeMap<String, usize> {
    let mut sums = BTreeMap::new();
    for (name, figure) in figures {
        *sums.entry(name).or_default() += figure;
    }
    sums
}

/// The contexts of all connections of the server.
pub(crate) type Connections = CtxTable<Connection>;

/// The context of a connection. The worker and each operation of the connection hold a reference,
/// so the context lives at least until the last operation has completed.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// The index of the connection in its worker's slab, set by the worker.
    pub(crate) slot: OnceLock<usize>,
}
