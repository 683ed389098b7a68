//! The main thread of the server: starts the workers, accepts connections, and stops the server.

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aio_reap::Engine;
use radix_ctx::{CtxRef, CtxTable, InsertError, InsertRefused};
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::iterator::Signals;
use socket2::Socket;
use thiserror::Error;
use tracing::{info, warn};

use crate::args::Args;
use crate::connection_limits::{Admitted, ConnectionLimits, Peer, Refused, Waiting};
use crate::diagnostics;
use crate::export::{ExportError, ExportTable};
use crate::listeners::{ListenError, Listeners};
use crate::memory::LEAST;
use crate::metrics::{Metrics, Reporter};
#[cfg(feature = "objects")]
use crate::notifier::waker;
use crate::notifier::{eventfd, notify};
use crate::registry::{Connection, Registry};
use crate::requests::{Counters, Limits, MAX_BLOCKING};
#[cfg(feature = "objects")]
use crate::volume::Volume;
use crate::waits;
use crate::worker::{Inbox, Message, Shared, Worker};

/// Memory for payloads of all connections, at least [`LEAST`] per worker. Each connection has its
/// [`RESERVE`](crate::memory::RESERVE) in addition. A server may use as much.
const MEMORY: usize = 256 << 20;
/// Most threads of a worker's pool, if its engine uses one.
const POOL: usize = 16;
/// The most writes that a write-back of an image has in flight: the limit of bufcache.
const WRITE_BACK: usize = 256;
/// Most connections to accept before the signals are handled.
const ACCEPTED_AT_ONCE: usize = 64;
/// Requested size of the send buffer; the system may grant less. A few large replies.
const SEND_BUFFER: usize = 2 << 20;

/// Why the server could not start or went down.
#[derive(Debug, Error)]
pub(crate) enum ServerError {
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start a worker: {0}")]
    Start(String),
    #[error("cannot make the images durable: {0}")]
    Sync(io::Error),
    #[error("a panic made the images {} fail", .0.join(", "))]
    Images(Vec<String>),
    #[error("a volume has ended: {}. What was not confirmed by a FLUSH may be lost", .0.join(", "))]
    Ended(Vec<String>),
    #[error("{0} panics, which the log tells of")]
    Panics(u64),
    #[error("a worker failed: {0}")]
    Worker(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A running server, with its workers started and its listeners bound.
pub(crate) struct Server {
    shared: Shared,
    /// In the order of the inboxes in `reporter`.
    workers: Vec<JoinHandle<io::Result<()>>>,
    reporter: Reporter,
    /// Serves metrics while the server runs.
    metrics: Option<Metrics>,
    listeners: Listeners,
    limits: Arc<ConnectionLimits>,
    /// Connections that wait for a place within the limits.
    waiting: Waiting<Socket>,
    next_worker: usize,
    /// Readable when a worker or a volume has ended.
    ended: Arc<OwnedFd>,
    /// With `--exit-with-last`: readable when the last client has left.
    all_served: Option<Arc<OwnedFd>>,
    /// The last accept failed, and the failure was logged.
    accept_failed: bool,
}

/// Notifies the main thread when a worker ends, even by a panic.
struct Ended(Arc<OwnedFd>);

impl Drop for Ended {
    fn drop(&mut self) {
        notify(&self.0);
    }
}

impl Server {
    /// Opens the images, starts the workers and binds the listeners.
    ///
    /// `handed_over` are sockets that another program has bound for the server.
    pub(crate) fn start(args: &Args, handed_over: Vec<OwnedFd>) -> Result<Self, ServerError> {
        let exports = Arc::new(ExportTable::open(args)?);
        let max_connections = args.max_connections;
        let all_served = args.exit_with_last.then(eventfd).transpose()?;
        let limits = ConnectionLimits::new(max_connections as usize, all_served.clone())?;
        // An evicted connection keeps its context until its worker has closed it, so there may be
        // twice as many contexts as connections.
        let connections = CtxTable::builder().max_contexts(2 * u64::from(max_connections)).build();
        let connections = Arc::new(connections);
        let registry = Arc::new(Registry::new());
        let listeners = Listeners::open(args, handed_over)?;
        let ended = eventfd()?;
        let count = args.workers.map_or_else(default_workers, |count| count as usize);
        let shared = Shared { exports, connections, registry };
        let (mut inboxes, mut workers) = (Vec::new(), Vec::new());
        let start = Instant::now();
        for number in 0..count {
            let (inbox, receiver) = Inbox::new(start)?;
            inboxes.push(inbox.clone());
            let ends = (inbox, receiver);
            workers.push(start_worker((number, count), ends, args, shared.clone(), &ended)?);
        }
        let reporter =
            Reporter { workers: inboxes, shared: shared.clone(), patience: waits::REPORT };
        let metrics = args.metrics.as_ref().map(|path| Metrics::start(path, reporter.clone()));
        Ok(Self {
            shared,
            workers,
            reporter,
            metrics: metrics.transpose()?,
            listeners,
            limits,
            waiting: Waiting::default(),
            next_worker: 0,
            ended,
            all_served,
            accept_failed: false,
        })
    }

    /// Returns one line per listener.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.listeners.addresses()
    }

    /// Returns the name of the first image, or an empty name if there is only a folder.
    pub(crate) fn default_export(&self) -> String {
        self.shared.exports.names().next().unwrap_or_default().to_owned()
    }

    /// Lets exports grow with their files when one of the signals arrives. A thread of its own
    /// checks the files, because a file that hangs must not stop the main thread from accepting.
    pub(crate) fn grow_at(&self, mut signals: Signals) -> io::Result<()> {
        // Weak, so that the thread does not keep the images of a stopped server open.
        let exports = Arc::downgrade(&self.shared.exports);
        let grow = move || {
            for _ in signals.forever() {
                let Some(exports) = exports.upgrade() else { return };
                exports.images.grow();
            }
        };
        thread::Builder::new().name("grow".into()).spawn(grow).map(drop)
    }

    /// Accepts connections until `stop` is readable or, with `--exit-with-last`, the last client
    /// has left. Fails if a worker ends.
    pub(crate) fn accept_until(&mut self, stop: BorrowedFd<'_>) -> Result<(), ServerError> {
        let mut idle_check = self.shared.exports.has_folder().then(Instant::now);
        loop {
            // Before the wait, so that a volume that ends notifies `ended`.
            if !self.ended_volumes().is_empty() {
                return Ok(()); // the stop says so
            }
            let all_served = self.all_served.as_deref().map(AsFd::as_fd);
            let freed = Arc::clone(self.limits.freed());
            let fds = [stop, self.ended.as_fd(), freed.as_fd()];
            let fds = fds.into_iter().chain(self.listeners.fds());
            let fds = fds.chain(all_served);
            let mut fds: Vec<_> =
                fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let soon = idle_check.into_iter().chain(self.waiting.until()).min();
            let left = soon.map(|soon| soon.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok()); // some seconds at most
            match rustix::event::poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            let ready = fds.iter().filter(|fd| !fd.revents().is_empty());
            let ready: Vec<_> = ready.map(|fd| fd.as_fd().as_raw_fd()).collect();
            let is_ready = |fd: BorrowedFd<'_>| ready.contains(&fd.as_raw_fd());
            if is_ready(self.ended.as_fd()) && !is_ready(stop) && self.ended_volumes().is_empty() {
                return Err(ServerError::Worker("a worker ended by itself".into()));
            }
            if is_ready(stop) {
                return Ok(());
            }
            // Reset both before looking at the limits: a connection that ends later notifies again.
            let _ = rustix::io::read(&freed, &mut [0; 8]);
            let take = |fd| is_ready(fd) && rustix::io::read(fd, &mut [0; 8]).is_ok();
            let last_ended = all_served.is_some_and(take);
            self.place_waiting();
            self.accept();
            if last_ended && self.limits.is_unused() {
                return Ok(()); // no client that has come has taken the place of the last one
            }
            let now = Instant::now();
            if idle_check.is_some_and(|due| now >= due) {
                self.shared.exports.images.release_idle(now, waits::IDLE);
                idle_check = Some(now + waits::IDLE_CHECK);
            }
        }
    }

    /// Accepts waiting connections, from each listener in turn. A failure ends that for now.
    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let accepted: Vec<_> = self.listeners.accept().collect();
            if accepted.is_empty() {
                return;
            }
            let mut has_failed = false;
            for accepted in accepted {
                match accepted {
                    Ok(socket) => {
                        self.accept_failed = false;
                        let peer = Peer::of(&socket);
                        let admitted =
                            self.waiting.admit(&self.limits, socket, peer, Instant::now());
                        if let Some(admitted) = admitted {
                            self.place(admitted);
                        }
                    }
                    Err(error) => {
                        has_failed = true;
                        self.cannot_accept(&error);
                    }
                }
            }
            if has_failed {
                return;
            }
        }
    }

    /// Logs a failure to accept, and pauses. Usually the process is out of descriptors, and a
    /// connection that ends frees one.
    fn cannot_accept(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.accept_failed, true) {
            warn!(%error, "cannot accept connections");
        }
        thread::sleep(Duration::from_millis(10));
    }

    /// Serves waiting connections that are within the limits now. Those that have waited long enough
    /// evict others, or are refused.
    fn place_waiting(&mut self) {
        while let Some(next) = self.waiting.next(&self.limits, Instant::now()) {
            self.place(next);
        }
    }

    /// Sends a connection to the worker with the least load, in turn if several have the least.
    fn place(&mut self, admitted: Result<Admitted<Socket>, (Peer, Refused)>) {
        let (socket, permit, evicted) = match admitted {
            Ok(admitted) => admitted,
            Err((peer, reason)) => {
                return warn!(%peer, %reason, "connection limit reached, one more refused");
            }
        };
        if let Some((id, worker)) = evicted {
            self.reporter.workers[worker].send(Message::Evict(id));
        }
        let Some(ctx) = self.context() else { return };
        let id = CtxRef::id(&ctx);
        // On failure the system's default is used, which is slower.
        let _ = socket.set_send_buffer_size(SEND_BUFFER);
        let count = self.workers.len();
        let from_next = (0..count).map(|step| (self.next_worker + step) % count);
        let load = |&number: &usize| self.reporter.workers[number].load.get();
        let Some(number) = from_next.min_by_key(load) else { return };
        let inbox = &self.reporter.workers[number];
        inbox.load.reserve();
        permit.set_location(id, number);
        if !inbox.send(Message::Serve(socket, ctx, permit)) {
            inbox.load.release();
            let _ = self.shared.connections.remove(id); // no worker has got it
        }
        self.next_worker = (number + 1) % count;
    }

    /// Makes the context of a new connection. Waits a moment if too many evicted connections are
    /// not closed yet.
    fn context(&self) -> Option<CtxRef<Connection>> {
        let connections = &self.shared.connections;
        let since = Instant::now();
        let inserted = loop {
            match connections.insert(Connection::default()) {
                Err(InsertError { reason: InsertRefused::Quota { .. }, .. })
                    if since.elapsed() < waits::CLOSING =>
                {
                    thread::sleep(Duration::from_millis(1));
                }
                inserted => break inserted,
            }
        };
        let made = inserted.map_err(|error| error.to_string()).and_then(|id| {
            connections.get_ref(id).map_err(|error| {
                let _ = connections.remove(id); // no worker has got it
                error.to_string()
            })
        });
        made.inspect_err(|error| warn!(%error, "no room for one more connection")).ok()
    }

    /// Returns the fraction of reads that the cache answered.
    pub(crate) fn hit_rate(&self) -> f64 {
        let reports = self.reporter.reports();
        let sum = |figure: fn(&Counters) -> u64| {
            reports.iter().map(|report| figure(&report.counters)).sum::<u64>()
        };
        sum(|counters| counters.hits) as f64 / sum(|counters| counters.reads).max(1) as f64
    }

    /// Returns the volumes that have ended, with the reasons. A later end notifies `ended`.
    #[cfg(feature = "objects")]
    fn ended_volumes(&self) -> Vec<String> {
        let waker = waker(&self.ended);
        let reason = |(name, volume): (&str, &Volume)| {
            volume.ended(&waker).map(|reason| format!("'{name}': {reason}"))
        };
        self.shared.exports.volumes().filter_map(reason).collect()
    }

    #[cfg(not(feature = "objects"))]
    #[expect(clippy::unused_self, reason = "that with volumes needs it")]
    fn ended_volumes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Answers the requests in flight, closes the connections, and makes the images durable.
    pub(crate) fn stop(mut self) -> Result<(), ServerError> {
        self.listeners = Listeners::none();
        self.waiting = Waiting::default();
        self.metrics = None;
        // A worker ends its sessions, and refuses connections that are on their way to it.
        match self.shared.registry.close() {
            Ok(()) => info!(sessions = self.shared.registry.len(), "told to end"),
            Err(error) => warn!(%error, "connections on their way are not refused"),
        }
        for worker in &self.reporter.workers {
            worker.send(Message::Stop);
        }
        let mut failed = None;
        for worker in self.workers.drain(..) {
            match worker.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed = Some(error.to_string()),
                Err(_) => failed = Some("it panicked".into()),
            }
        }
        // Only a worker that failed leaves connections. `remove_all` waits for the last reference.
        match self.shared.connections.remove_all() {
            Ok(0) => {}
            Ok(left) => warn!(left, "connections were left by a worker that failed"),
            Err(error) => warn!(%error, "cannot close the table of connections"),
        }
        let synced = self.shared.exports.sync();
        let images = self.shared.exports.blocks.failed();
        if !images.is_empty() {
            return Err(ServerError::Images(images)); // their sync fails for the same reason
        }
        let ended = self.ended_volumes();
        if !ended.is_empty() {
            return Err(ServerError::Ended(ended)); // as above
        }
        synced.map_err(ServerError::Sync)?;
        info!("images are durable");
        if let Some(reason) = failed {
            return Err(ServerError::Worker(reason));
        }
        match diagnostics::panics() {
            0 => Ok(()),
            panics => Err(ServerError::Panics(panics)), // of a thread that serves no request
        }
    }
}

fn default_workers() -> usize {
    thread::available_parallelism().map_or(1, |cpus| cpus.get().min(4))
}

/// Returns the number of slots of a worker's engine, of 192 bytes each. Write-backs leave half of them
/// ([`Engine::is_half_free`]) to the requests of clients: `depth`, and the blocking ones beside them. In one half
/// a write-back has room beside these.
pub(crate) fn slots(depth: usize) -> usize {
    2 * (depth + MAX_BLOCKING + WRITE_BACK)
}

fn start_worker(
    (number, count): (usize, usize),
    inbox: (Inbox, Receiver<Message>),
    args: &Args,
    shared: Shared,
    ended: &Arc<OwnedFd>,
) -> Result<JoinHandle<io::Result<()>>, ServerError> {
    let (ready, started) = mpsc::channel();
    let depth = args.depth as usize;
    let limits = Limits { depth, most: depth.max(256) * 4 };
    let threads = depth.min(POOL);
    let slots = slots(depth);
    let mut builder = Engine::builder().depth(slots).capacity(slots).threads(threads);
    if let Some(kind) = args.backend {
        builder = builder.backend(kind);
    }
    let ended = Ended(Arc::clone(ended));
    let run = move || {
        let _ended = ended;
        // The engine is made here because it belongs to this thread.
        let made = builder.build().map_err(io::Error::from).and_then(|engine| {
            log_backend(number, &engine);
            let memory = (MEMORY / count).max(LEAST);
            Worker::new(shared, engine, limits, memory, count > 1, inbox)
        });
        match made {
            Ok(worker) => {
                let _ = ready.send(Ok(()));
                worker.run()
            }
            Err(error) => {
                let _ = ready.send(Err(error.to_string()));
                Ok(())
            }
        }
    };
    let thread = thread::Builder::new().name(format!("worker-{number}")).spawn(run)?;
    match started.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(reason)) => Err(ServerError::Start(reason)),
        Err(_) => Err(ServerError::Start("it ended at once".into())),
    }
}

fn log_backend(number: usize, engine: &Engine) {
    for fallback in engine.fallbacks() {
        if number == 0 {
            warn!(%fallback, "backend refused, falling back");
        }
    }
    info!(worker = number, backend = %engine.backend(), "worker up");
}
