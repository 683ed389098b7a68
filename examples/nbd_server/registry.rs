//! The lists of sessions: all connections of the server, and those of each export.
//!
//! ```text
//!  Registry ─┬─ sessions: every connection                   ◄─ entry ─ Conn
//!            └─ opens: for each export, its connections      ◄─ entry ─ Conn
//! ```
//!
//! A worker touches the lists once for each connection and export, never for a request. The main
//! thread walks them to print them, with no lock held meanwhile; and at the end it closes them, so
//! that no connection enters any more, and drains them: each connection there is told to end.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use percpu_list::{AllocError, Domain, Entry, InsertError, LockError, PerCpuList, Ref, Stats};
use radix_ctx::Id;
use socket2::Socket;

use crate::export::ExportTable;
use crate::upstream::UpstreamStats;

/// An entry in the list of sessions. Dropping it removes it.
pub(crate) type Listed = Entry<Arc<PerCpuList<Client>>>;
/// An entry in the list of an export.
pub(crate) type Opened = Entry<Arc<PerCpuList<Ref<Client>>>>;

/// A connection as the lists show it.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: Id,
    pub(crate) peer: Peer,
    /// The number of its worker.
    pub(crate) worker: usize,
    since: Instant,
    /// Index into the export table, once it is negotiated.
    export: OnceLock<usize>,
    requests: AtomicU64,
}

impl Client {
    pub(crate) fn new(id: Id, socket: &Socket, worker: usize) -> Self {
        let since = Instant::now();
        let (export, requests) = (OnceLock::new(), AtomicU64::new(0));
        Self { id, peer: Peer::of(socket), worker, since, export, requests }
    }

    /// Counts requests that its worker has begun, or refused.
    pub(crate) fn count(&self, requests: u64) {
        // Ordering: Relaxed, both; its worker alone stores it, and it publishes nothing.
        let before = self.requests.load(Ordering::Relaxed);
        self.requests.store(before + requests, Ordering::Relaxed);
    }
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Address(SocketAddr),
    /// A Unix socket was connected by the process with this id.
    Process(libc::pid_t),
    Unknown,
}

impl Peer {
    fn of(socket: &Socket) -> Self {
        match socket.peer_addr() {
            Ok(address) => match address.as_socket() {
                Some(address) => Self::Address(address),
                None => match peer_credentials(socket.as_raw_fd()) {
                    // No process if it is in another PID namespace.
                    Ok(credentials) if credentials.pid > 0 => Self::Process(credentials.pid),
                    _ => Self::Unknown,
                },
            },
            Err(_) => Self::Unknown, // it is gone already
        }
    }
}

/// The process and the user that connected a Unix socket.
pub(crate) fn peer_credentials(socket: RawFd) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED stores one `ucred`, of the size said, and keeps nothing.
    let ret = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if ret == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.pad(&address.to_string()),
            Self::Process(pid) => f.pad(&format!("pid {pid}")),
            Self::Unknown => f.pad("?"),
        }
    }
}

/// All sessions of the server, and by export those that have it open.
///
/// The lists share one set of locks: an export that no client opened costs 8 bytes for each CPU.
#[derive(Debug)]
pub(crate) struct Registry {
    sessions: Arc<PerCpuList<Client>>,
    /// By index of the export table.
    opens: Vec<Arc<PerCpuList<Ref<Client>>>>,
}

impl Registry {
    pub(crate) fn new(exports: &ExportTable) -> Result<Self, AllocError> {
        let domain = Domain::try_new()?;
        let opens = (0..exports.capacity()).map(|_| PerCpuList::try_new_in(&domain).map(Arc::new));
        Ok(Self {
            opens: opens.collect::<Result<_, _>>()?,
            sessions: Arc::new(PerCpuList::try_new_in(&domain)?),
        })
    }

    /// Lists a connection in the slot of the CPU that its worker runs on. Refused once the server
    /// stops.
    pub(crate) fn add(&self, client: Client) -> Result<Listed, InsertError<Client>> {
        self.sessions.insert_arc(client)
    }

    /// Lists a connection under its export. Refused once the server stops.
    pub(crate) fn open(
        &self,
        export: usize,
        listed: &Listed,
    ) -> Result<Opened, InsertError<Ref<Client>>> {
        let opened = self.opens[export].insert_arc(listed.share())?;
        let _ = listed.export.set(export); // a connection negotiates once
        Ok(opened)
    }

    /// Refuses connections from now on, removes all from the lists, and calls `tell` with each
    /// session once. Returns their number.
    pub(crate) fn end(&self, mut tell: impl FnMut(&Client)) -> Result<usize, LockError> {
        self.sessions.close()?;
        self.opens.iter().try_for_each(|opens| opens.close())?;
        let mut told = 0;
        for client in self.sessions.drain() {
            tell(&*client?);
            told += 1;
        }
        for opens in &self.opens {
            opens.drain().try_for_each(|client| client.map(drop))?;
        }
        Ok(told)
    }

    /// The report to print. Sessions come and go meanwhile; those that stay are seen once.
    pub(crate) fn report(&self, exports: &ExportTable) -> RegistryReport {
        let name = |export: usize| exports.get(export).info.name.clone();
        let row = |client: Ref<Client>| Row {
            id: client.id,
            peer: client.peer,
            export: client.export.get().map(|&export| name(export)),
            worker: client.worker,
            slot: client.slot().get(),
            // Ordering: Relaxed; see `count`.
            requests: client.requests.load(Ordering::Relaxed),
            age: client.since.elapsed(),
        };
        let mut opened = Stats::default();
        for opens in &self.opens {
            opened += opens.stats();
        }
        RegistryReport {
            rows: self.sessions.iter().map(|client| client.map(row)).collect(),
            exports: by_name(exports.names().zip(self.opens.iter().map(|opens| opens.len()))),
            upstreams: exports.upstreams(),
            sessions: self.sessions.stats(),
            opened,
        }
    }

    /// The number of connections that each of `workers` workers has.
    #[cfg(test)]
    pub(crate) fn by_worker(&self, workers: usize) -> Vec<usize> {
        let mut counts = vec![0; workers];
        self.sessions.iter().for_each(|client| counts[client.unwrap().worker] += 1);
        counts
    }

    /// Returns whether no connection is listed, and checks the lists.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.sessions.validate();
        self.opens.iter().for_each(|opens| opens.validate());
        self.sessions.is_empty() && self.opens.iter().all(|opens| opens.is_empty())
    }
}

/// One figure for each name: in a folder another file may have got the name of one that is still
/// open.
pub(crate) fn by_name<'a>(exports: impl Iterator<Item = (&'a str, usize)>) -> Vec<(String, usize)> {
    let (mut places, mut sums) = (HashMap::new(), Vec::<(String, usize)>::new());
    for (name, open) in exports {
        let place = *places.entry(name).or_insert(sums.len());
        match sums.get_mut(place) {
            Some((_, sum)) => *sum += open,
            None => sums.push((name.into(), open)),
        }
    }
    sums
}

/// A session.
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

/// The live sessions, and the figures of the lists.
#[derive(Debug)]
pub(crate) struct RegistryReport {
    rows: Result<Vec<Row>, LockError>,
    /// Each name of an export, once, and how many have one of that name open.
    pub(crate) exports: Vec<(String, usize)>,
    /// Exports of other servers, by their names here.
    pub(crate) upstreams: Vec<(String, UpstreamStats)>,
    pub(crate) sessions: Stats,
    pub(crate) opened: Stats,
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
        for (name, stats) in &self.upstreams {
            writeln!(f, "upstream   '{name}': {stats}")?;
        }
        writeln!(f, "list of sessions\n{}", self.sessions)?;
        write!(f, "lists of exports' sessions\n{}", self.opened)
    }
}
