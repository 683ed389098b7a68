//! The list of sessions: all connections of the server.
//!
//! A worker changes the list once for each connection, never for a request. The main thread
//! iterates over the list without holding a lock, to print it. When the server stops, it closes the
//! list, so that no connection enters it, and drains it to tell each connection to end.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use percpu_list::{AllocError, Entry, InsertError, LockError, PerCpuList, Ref, Stats};
use radix_ctx::Id;

use crate::export::ExportTable;
use crate::peer::Peer;

/// An entry in the list of sessions. Dropping it removes it.
pub(crate) type Listed = Entry<Arc<PerCpuList<Client>>>;

/// A connection in the list of sessions.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: Id,
    pub(crate) peer: Peer,
    /// The index of its worker.
    pub(crate) worker: usize,
    since: Instant,
    /// The name of its export, once it is negotiated.
    export: OnceLock<String>,
    requests: AtomicU64,
}

impl Client {
    pub(crate) fn new(id: Id, peer: Peer, worker: usize) -> Self {
        let since = Instant::now();
        let (export, requests) = (OnceLock::new(), AtomicU64::new(0));
        Self { id, peer, worker, since, export, requests }
    }

    pub(crate) fn set_export(&self, name: &str) {
        let _ = self.export.set(name.to_owned()); // unset before: a connection negotiates once
    }

    /// Counts requests that the worker has started or refused.
    pub(crate) fn count(&self, requests: u64) {
        // Ordering: Relaxed, both; only the connection's worker stores the count, and it publishes
        // nothing.
        let before = self.requests.load(Ordering::Relaxed);
        self.requests.store(before + requests, Ordering::Relaxed);
    }
}

/// All sessions of the server.
#[derive(Debug)]
pub(crate) struct Registry {
    sessions: Arc<PerCpuList<Client>>,
}

impl Registry {
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { sessions: Arc::new(PerCpuList::try_new()?) })
    }

    /// Adds a connection to the list, in the slot of the worker's CPU. Fails once the server stops.
    pub(crate) fn add(&self, client: Client) -> Result<Listed, InsertError<Client>> {
        self.sessions.insert_arc(client)
    }

    /// Refuses further connections, removes all from the list, and calls `tell` once with each
    /// session. Returns the number of sessions.
    pub(crate) fn end(&self, mut tell: impl FnMut(&Client)) -> Result<usize, LockError> {
        self.sessions.close()?;
        let mut told = 0;
        for client in self.sessions.drain() {
            tell(&*client?);
            told += 1;
        }
        Ok(told)
    }

    /// Makes the report. Sessions may come and go during the iteration; a session that stays is
    /// seen once.
    pub(crate) fn report(&self, exports: &ExportTable) -> RegistryReport {
        let row = |client: Ref<Client>| Row {
            id: client.id,
            peer: client.peer,
            export: client.export.get().cloned(),
            worker: client.worker,
            slot: client.slot().get(),
            // Ordering: Relaxed; see `count`.
            requests: client.requests.load(Ordering::Relaxed),
            age: client.since.elapsed(),
        };
        let rows: Result<Vec<Row>, _> =
            self.sessions.iter().map(|client| client.map(row)).collect();
        let fixed = exports.names().map(|name| (name.to_owned(), 0));
        let open = rows.iter().flatten().filter_map(|row| Some((row.export.clone()?, 1)));
        let counts = by_name(fixed.chain(open));
        RegistryReport { exports: counts, rows, sessions: self.sessions.stats() }
    }

    /// Returns the number of connections of each of `workers` workers.
    #[cfg(test)]
    pub(crate) fn by_worker(&self, workers: usize) -> Vec<usize> {
        let mut counts = vec![0; workers];
        self.sessions.iter().for_each(|client| counts[client.unwrap().worker] += 1);
        counts
    }

    /// Returns whether the list is empty, after a check of its structure.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.sessions.validate();
        self.sessions.is_empty()
    }
}

/// Returns the sum of the figures of each name, in order of the names.
pub(crate) fn by_name(figures: impl Iterator<Item = (String, usize)>) -> BTreeMap<String, usize> {
    let mut sums = BTreeMap::new();
    for (name, figure) in figures {
        *sums.entry(name).or_default() += figure;
    }
    sums
}

/// A line of the report: one session.
#[derive(Debug)]
struct Row {
    id: Id,
    peer: Peer,
    export: Option<String>,
    worker: usize,
    slot: u32,
    requests: u64,
    age: Duration,
}

/// The report on the sessions and the list.
#[derive(Debug)]
pub(crate) struct RegistryReport {
    rows: Result<Vec<Row>, LockError>,
    /// The number of sessions of each export: those of the command line, and others that are open.
    pub(crate) exports: BTreeMap<String, usize>,
    pub(crate) sessions: Stats,
}

impl fmt::Display for RegistryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rows {
            Ok(rows) if rows.is_empty() => {}
            Ok(rows) => {
                writeln!(
                    f,
                    "  {:<18}  {:<21}  {:<16}  {:>6}  {:>4}  {:>10}  {:>8}",
                    "session", "peer", "export", "worker", "slot", "requests", "seconds"
                )?;
                for Row { id, peer, export, worker, slot, requests, age } in rows {
                    writeln!(
                        f,
                        "  {:<18}  {peer:<21}  {:<16}  {worker:>6}  {slot:>4}  {requests:>10}  \
                         {:>8.1}",
                        id.to_string(),
                        export.as_deref().unwrap_or("-"),
                        age.as_secs_f64(),
                    )?;
                }
            }
            Err(error) => writeln!(f, "  the sessions cannot be listed: {error}")?,
        }
        for (name, count) in &self.exports {
            writeln!(f, "open       '{name}': {count}")?;
        }
        write!(f, "list of sessions\n{}", self.sessions)
    }
}
