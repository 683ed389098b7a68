//! One worker thread: an engine, its connections, and the loop that serves them.
//!
//! ```text
//!  epoll ─► receive ─► parse ─► engine (one batch) ─► completions ─► replies ─► send (one call)
//!    ▲ sockets, engine, inbox      ▲ queued operations            │
//!                                  └──── next operation ◄─────────┘
//! ```
//!
//! All bytes received at one time are parsed under one plug, so that the kernel gets their requests
//! in one submission. All operations completed by then are answered with one send per connection.
//! Bytes beyond a limit wait in their connection until replies have left.
//!
//! A request that the cache answers stays on this thread and allocates nothing. Its costs:
//!
//! - For a batch of requests one wait for events, one receive and one send. Reading from a socket
//!   without a wait would favour the client of the last event.
//! - For each block of 4 KiB a lookup in the cache and a guard, which are its only accesses to
//!   memory that other threads write.
//! - For each byte a copy between the cache and the request's buffer, besides the kernel's copy.
//!   Sending from the cache would hold guards for as long as a client takes to read; receiving into
//!   the cache, for as long as a client takes to write.
//! - For a batch of requests two reads of the clock, if there are several workers: see [`load`].
//! - No cache line that another core has written: `cargo bench --bench census -- --only served`.
//! - For each request one of the worker's buffers, and for each event three lookups of its
//!   connection, because an id that the kernel returns may be stale.
//!
//! Measured by `cargo bench --bench nbd -- --only N7` and perf: a random read of 4 KiB took 2.7 us
//! of an Intel Xeon, with 32 in flight and all of the 1 GiB image in the cache. The kernel's send
//! is 44 % of that (27 % its copy, 9 % its memory), its receive 5 %, and the waits for events are
//! 3 %; any server has these costs. The copy out of the cache is 22 %, because the block comes from
//! memory and not from the CPU's cache. Waiting for a busy client (see [`BusyPoll`]) is 8 %, and
//! the lookup of the block 6 %, nearly all of it one cache miss.
//!
//! # Busy polling
//!
//! Before a worker sleeps, it polls for events a moment longer, if that was successful lately: for
//! the rows N1, N2.twocpus and N3 of the bench, in which the client is on another CPU.
//!
//! A client that works through a queue of requests answers within microseconds, which is less than
//! it takes to put the thread to sleep and wake it. Each failed poll doubles the number of sleeps
//! until the next poll, and each success halves it. A client on the same CPU cannot run while the
//! worker polls, so a server on one CPU soon stops polling. It does not poll while threads of the
//! kernel work for it, which may need the CPU.
//!
//! # Batching
//!
//! A round waits a moment while its clients are busy with earlier replies.
//!
//! A client that has many replies to read loses nothing if its next requests wait. The requests
//! that it sends in that time join the batch: one submission and one send serve more of them, and
//! the two CPUs do not contend for the socket. The wait ends before the client would have to wait
//! for the server.

mod intake;
mod load;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use aio_reap::{Engine, EngineStats};
use percpu_list::InsertError;
use radix_ctx::{CtxRef, Id};
use rustix::event::{Timespec, epoll};
use slab::Slab;
use socket2::Socket;
use tracing::{info, warn};

pub(crate) use self::load::WorkerLoad;
use crate::conn::{Conn, Phase};
use crate::connection_limits::Permit;
use crate::export::ExportTable;
use crate::memory::{BufferPool, Limit};
use crate::notifier::{eventfd, notify, waker};
use crate::registry::{Client, Connection, Connections, Registry};
use crate::requests::{Counters, Limits, Requests};
use crate::tls::Wire;
use crate::waits;

/// Most bytes of one receive.
const SCRATCH: usize = 256 << 10;
/// Rounds of completions and replies before the sockets get their turn: one for the received
/// requests, and one for the requests that these unblock.
const ROUNDS: usize = 2;

/// The reason for closing a half-open connection early.
const EVICTED: &str = "it has not finished its handshake, and gives way to a newer connection";

// Values that no id of a connection has.
const ENGINE: u64 = u64::MAX;
const INBOX: u64 = u64::MAX - 1;

/// A message from the main thread to a worker.
pub(crate) enum Message {
    Serve(Socket, CtxRef<Connection>, Permit),
    Report(Sender<WorkerReport>),
    /// Close the connection: it has not finished its handshake, and a newer one takes its place.
    Evict(Id),
    /// Answer the requests in flight, close the connections, then end. The list of sessions was closed
    /// before, so that no connection enters it.
    Stop,
}

/// State shared by all threads of the server.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) exports: Arc<ExportTable>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) registry: Arc<Registry>,
}

/// The sending half of a worker's inbox.
#[derive(Clone)]
pub(crate) struct Inbox {
    pub(crate) sender: Sender<Message>,
    pub(crate) notifier: Arc<OwnedFd>,
    pub(crate) load: Arc<WorkerLoad>,
}

impl Inbox {
    /// Makes both halves of an inbox. All workers have the same `start`.
    pub(crate) fn new(start: Instant) -> io::Result<(Self, Receiver<Message>)> {
        let (sender, receiver) = mpsc::channel();
        let load = Arc::new(WorkerLoad::new(start));
        Ok((Self { sender, notifier: eventfd()?, load }, receiver))
    }

    /// Sends a message. Returns whether the worker still runs.
    pub(crate) fn send(&self, message: Message) -> bool {
        let is_sent = self.sender.send(message).is_ok();
        notify(&self.notifier);
        is_sent
    }
}

/// A worker's statistics since it started.
#[derive(Debug)]
pub(crate) struct WorkerReport {
    pub(crate) counters: Counters,
    /// Operations in progress, by image.
    pub(crate) begun: Vec<(String, usize)>,
    pub(crate) engine: EngineStats,
    /// Operations that wait for a place.
    pub(crate) waiting: usize,
}

/// The connections of a worker, and which of them have something to do.
struct Conns {
    epoll: OwnedFd,
    open: Slab<Conn>,
    /// Connections with output to send.
    sendable: Vec<Id>,
    /// Connections whose next request waits for memory or another limit.
    blocked: VecDeque<Id>,
    /// Connections for which TLS has decrypted more than was read.
    undrained: Vec<Id>,
    /// Scratch space of `unblock`, kept to avoid an allocation.
    behind: Vec<Id>,
}

/// A worker: its connections, their requests with the engine and the tasks, and the memory of
/// payloads.
pub(crate) struct Worker {
    shared: Shared,
    conns: Conns,
    requests: Requests,
    memory: BufferPool,
    deadlines: Deadlines,
    inbox: Receiver<Message>,
    notifier: Arc<OwnedFd>,
    load: Arc<WorkerLoad>,
    /// There are several workers, so this one measures its load for the placement of new
    /// connections.
    has_peers: bool,
    scratch: Box<[u8]>,
    /// Do not sleep in the next wait: memory came free outside a round, or a round ended early.
    again: bool,
    busy_poll: BusyPoll,
}

impl Worker {
    /// Makes a worker of the calling thread, which owns the engine. `has_peers`: there are several
    /// workers.
    pub(crate) fn new(
        shared: Shared,
        engine: Engine,
        limits: Limits,
        memory: usize,
        has_peers: bool,
        (inbox, receiver): (Inbox, Receiver<Message>),
    ) -> io::Result<Self> {
        let Inbox { notifier, load, .. } = inbox;
        let engine = Rc::new(engine);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let input = epoll::EventFlags::IN;
        epoll::add(&epoll, engine.as_ref().as_fd(), epoll::EventData::new_u64(ENGINE), input)?;
        epoll::add(&epoll, notifier.as_fd(), epoll::EventData::new_u64(INBOX), input)?;
        Ok(Self {
            requests: Requests::new(engine, limits, waker(&notifier)),
            shared,
            conns: Conns {
                epoll,
                open: Slab::new(),
                sendable: Vec::new(),
                blocked: VecDeque::new(),
                undrained: Vec::new(),
                behind: Vec::new(),
            },
            memory: BufferPool::new(memory),
            deadlines: Deadlines::default(),
            inbox: receiver,
            notifier,
            load,
            has_peers,
            scratch: vec![0; SCRATCH].into(),
            again: false,
            busy_poll: BusyPoll::default(),
        })
    }

    /// Serves until it was told to stop and all requests in flight are answered.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let engine = Rc::clone(&self.requests.engine);
        let _lent = bufcache::lend_engine(&engine); // the engine makes the cache's loads
        let mut events = Vec::with_capacity(256);
        while !self.has_stopped() {
            self.round(&engine, &mut events)?;
        }
        Ok(())
    }

    /// Waits for events, handles them, and answers completed operations.
    fn round(&mut self, engine: &Engine, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        self.wait(events)?;
        self.fill_batch(events);
        let woke = self.has_peers.then(Instant::now);
        let (mut inbox, mut turn) = (false, false);
        {
            let _plug = engine.plug(); // requests that arrived together are submitted together
            for at in 0..self.conns.undrained.len() {
                self.ready(self.conns.undrained[at], epoll::EventFlags::IN);
            }
            self.conns.undrained.clear();
            for event in &*events {
                let (data, flags) = (event.data, event.flags); // the struct is packed
                match data.u64() {
                    ENGINE => turn = true,
                    INBOX => inbox = true,
                    bits => {
                        if let Some(id) = Id::from_bits(bits) {
                            self.ready(id, flags);
                        }
                    }
                }
            }
        }
        if turn {
            engine.turn();
        }
        self.complete_round(engine);
        if inbox {
            self.read_inbox();
        }
        self.check_deadlines();
        if let Some(woke) = woke {
            self.load.end_round(woke);
        }
        Ok(())
    }

    /// Waits for events: polls for a moment, then sleeps.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let mut poll = |timeout: Option<&Timespec>| {
            events.clear();
            match epoll::wait(&self.conns.epoll, rustix::buffer::spare_capacity(events), timeout) {
                Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
                Ok(_) => Ok(Some(())),
                Err(error) => Err(io::Error::from(error)),
            }
        };
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        if std::mem::take(&mut self.again) {
            return poll(Some(&NOW)).map(drop);
        }
        if !self.requests.need_threads() {
            let found = self.busy_poll.run(|| poll(Some(&NOW)));
            if found?.is_some() {
                return Ok(());
            }
        }
        // `TICK` is less than a second.
        const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: waits::TICK.subsec_nanos() as i64 };
        poll(self.deadlines.next_check.map(|_| &TICK)).map(drop)
    }

    /// Answers completed operations, unblocks connections, and sends replies, until there is
    /// nothing more to do or the rounds are used up.
    fn complete_round(&mut self, engine: &Engine) {
        for _ in 0..ROUNDS {
            let mut progress = false;
            {
                let _plug = engine.plug();
                while let Some((slot, step)) = self.requests.complete() {
                    progress = true;
                    let Conns { open, sendable, .. } = &mut self.conns;
                    match slot {
                        Some(slot) => open[slot].queue_reply(step, &mut self.memory, sendable),
                        None => step.release(&mut self.memory),
                    }
                }
                progress |= self.send_replies();
                progress |= self.unblock();
            }
            // Nothing else to do: send the answers that `unblock` may have produced. A reply that
            // leaves makes room for blocked requests.
            if !progress && self.requests.nothing_completed() && !self.send_replies() {
                return;
            }
        }
        self.again = true;
    }

    /// Returns the slot of a connection, unless it was closed.
    fn slot_of(&self, id: Id) -> Option<usize> {
        self.shared.connections.with(id, |conn| conn.slot.get().copied()).ok().flatten()
    }

    fn queue_send(&mut self, id: Id) {
        if let Some(slot) = self.slot_of(id) {
            self.conns.open[slot].queue_send(&mut self.conns.sendable);
        }
    }

    /// Sends on every sendable connection, and registers with epoll the events that each waits for.
    /// Returns whether any reply was sent completely.
    fn send_replies(&mut self) -> bool {
        let mut left = false;
        for at in 0..self.conns.sendable.len() {
            let id = self.conns.sendable[at];
            let Some(slot) = self.slot_of(id) else { continue };
            let conn = &mut self.conns.open[slot];
            conn.send_queued = false;
            let Conn { out, socket, tls, account, .. } = conn;
            let waiting = out.len();
            let mut wire = Wire { socket, tls: tls.as_deref_mut() };
            let sent = out.send(&mut wire, &mut self.memory, account).and_then(|()| wire.flush());
            left |= out.len() < waiting;
            match sent {
                Ok(()) => out.stuck = None,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    out.stuck.get_or_insert_with(Instant::now);
                    self.deadlines.watch();
                }
                Err(error) => {
                    self.close(id, &error.to_string());
                    continue;
                }
            }
            if conn.is_finished() {
                if let Some(mut tls) = conn.tls.take() {
                    tls.close();
                    let _ = tls.flush(&conn.socket); // best effort: the connection closes anyway
                }
                if !conn.tcp || conn.socket.shutdown(Shutdown::Write).is_err() {
                    self.close(id, "done");
                    continue;
                }
                conn.phase = Phase::Lingering;
                conn.deadline = Some(Instant::now() + waits::LINGER);
                self.deadlines.watch();
            }
            if conn.has_plaintext() {
                self.conns.undrained.push(id);
                self.again = true;
            }
            if conn.interest() != conn.registered {
                conn.registered = conn.interest();
                let data = epoll::EventData::new_u64(id.to_bits());
                if let Err(error) =
                    epoll::modify(&self.conns.epoll, &conn.socket, data, conn.registered)
                {
                    self.close(id, &error.to_string());
                }
            }
        }
        self.conns.sendable.clear();
        left
    }

    fn read_inbox(&mut self) {
        let _ = rustix::io::read(&*self.notifier, &mut [0; 8]); // resets the count
        // The event may report an operation that completed after `complete_round`.
        self.again |= !self.requests.nothing_completed();
        loop {
            match self.inbox.try_recv() {
                Ok(Message::Serve(socket, ctx, permit)) => self.serve(socket, ctx, permit),
                Ok(Message::Report(sender)) => {
                    let _ = sender.send(self.report()); // fails if the reporter no longer waits
                }
                Ok(Message::Evict(id)) => self.close(id, EVICTED),
                Ok(Message::Stop) => self.stop(),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => return self.stop(),
            }
        }
    }

    fn serve(&mut self, socket: Socket, ctx: CtxRef<Connection>, permit: Permit) {
        let id = CtxRef::id(&ctx);
        let listed = match self.shared.registry.insert(Client::default()) {
            Ok(listed) => listed,
            Err(InsertError { reason, .. }) => {
                info!(conn = %id, peer = %permit.peer, %reason, "connection refused");
                return self.remove_id(id);
            }
        };
        let entry = self.conns.open.vacant_entry();
        let _ = ctx.slot.set(entry.key()); // unset before: a connection is served once
        let data = epoll::EventData::new_u64(id.to_bits());
        let conn = Conn::new(
            socket,
            ctx,
            permit,
            listed,
            Instant::now() + waits::HANDSHAKE,
            self.shared.exports.tls.policy,
        );
        if let Err(error) = epoll::add(&self.conns.epoll, &conn.socket, data, conn.registered) {
            warn!(%error, "cannot watch a new connection");
            self.remove_id(id);
            return;
        }
        entry.insert(conn);
        self.deadlines.watch();
        self.queue_send(id); // the greeting
        self.send_replies();
    }

    fn report(&self) -> WorkerReport {
        WorkerReport {
            counters: self.requests.counters,
            begun: self.requests.begun_by_image(),
            engine: self.requests.engine.stats(),
            waiting: self.requests.waiting(),
        }
    }

    /// Closes a connection. Its operations in the engine continue and keep their buffers; its
    /// queued operations are dropped.
    fn close(&mut self, id: Id, reason: &str) {
        let Some(slot) = self.slot_of(id) else { return };
        self.remove_id(id);
        let mut conn = self.conns.open.remove(slot);
        let (peer, tls, refused) = (conn.permit.peer, conn.used_tls, conn.refused);
        info!(conn = %id, %peer, tls, reason, refused, "connection closed");
        conn.out.discard(&mut self.memory);
        self.requests.abandon(id, |buf| self.memory.release(buf, None));
        // Retries blocked connections, whose memory is free now, and handles operations that ended at
        // once.
        self.again = true;
        if let Phase::Transmission(session) = conn.phase {
            if let Some(buf) = session.abandon() {
                self.memory.release(buf, None);
            }
        }
    }

    /// Removes the id of a connection, and releases its place in this worker's load. Called once
    /// for each connection sent to this worker.
    fn remove_id(&self, id: Id) {
        self.load.release();
        if let Err(error) = self.shared.connections.remove(id) {
            warn!(conn = %id, %error, "a connection was forgotten before it was closed");
        }
    }
}

/// The deadlines of a worker's connections, and of its own end.
#[derive(Default)]
struct Deadlines {
    /// Set once the worker is to end; it closes what is left at this time.
    stopping: Option<Instant>,
    /// The next check. `None` while no connection has a deadline.
    next_check: Option<Instant>,
    /// The system had no memory for a request since the last check.
    refused_memory: bool,
}

impl Deadlines {
    fn watch(&mut self) {
        self.next_check.get_or_insert_with(|| Instant::now() + waits::TICK);
    }
}

impl Worker {
    /// Begins to stop: ends each session, which reads no more requests and answers those in flight. The
    /// worker ends once it has no connection. It closes the connections that are not finished in time.
    fn stop(&mut self) {
        if self.deadlines.stopping.is_some() {
            return;
        }
        self.deadlines.stopping = Some(Instant::now() + waits::STOP);
        self.deadlines.watch();
        let slots: Vec<_> = self.conns.open.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let phase = &self.conns.open[slot].phase;
            if matches!(phase, Phase::Handshake(_) | Phase::Transmission(_)) {
                self.drain(slot);
            }
        }
        self.send_replies();
    }

    /// Returns whether the worker has stopped: no connection is left and no request is in flight. No
    /// connection is on its way, because the main thread sends [`Message::Stop`] last.
    fn has_stopped(&self) -> bool {
        let is_stopping = self.deadlines.stopping.is_some();
        is_stopping && self.conns.open.is_empty() && self.requests.is_idle()
    }

    /// Closes connections past a deadline. Does so at most once per tick.
    fn check_deadlines(&mut self) {
        let Some(due) = self.deadlines.next_check else { return };
        let now = Instant::now();
        if now < due {
            return;
        }
        // A stuck connection does harm only while another one waits for memory or is refused it.
        let waits = |conn: &Conn| conn.blocked == Some(Limit::Worker) && conn.stuck().is_none();
        let refused = std::mem::take(&mut self.deadlines.refused_memory);
        let harm = refused || self.conns.open.iter().any(|(_, conn)| waits(conn));
        let mut late = Vec::new();
        let mut has_more = self.deadlines.stopping.is_some();
        for (_, conn) in &self.conns.open {
            let is_past = |deadline: Option<Instant>| deadline.is_some_and(|limit| now >= limit);
            let reason = if is_past(conn.deadline) {
                match conn.phase {
                    Phase::Lingering => "done",
                    _ => "no handshake within 10 s",
                }
            } else if harm && is_past(conn.stuck().map(|since| since + waits::STUCK)) {
                "it stands still, and others wait for its memory"
            } else if is_past(self.deadlines.stopping) {
                "it took no replies while the server stopped"
            } else {
                has_more |= conn.deadline.is_some() || conn.stuck().is_some();
                continue;
            };
            late.push((conn.id(), reason));
        }
        self.deadlines.next_check = has_more.then(|| now + waits::TICK);
        for (id, reason) in late {
            self.close(id, reason);
        }
    }
}

/// How long to poll: the measured time to wake a client on another CPU of a virtual machine, and as
/// much again for its answer.
const POLL_LIMIT: Duration = Duration::from_micros(100);
/// Most sleeps between two busy polls. Failed polls then cost less than a thousandth of
/// the time.
const MAX_SKIPPED: u32 = 1024;

/// Decides before each sleep whether to poll.
#[derive(Debug, Default)]
struct BusyPoll {
    /// Sleeps until the next busy poll.
    skip: u32,
    /// Sleeps to skip after the next failed poll.
    penalty: u32,
}

impl BusyPoll {
    /// Calls `poll` until it finds something or the time is over. Returns `None` if the caller
    /// should sleep.
    fn run<T, E>(
        &mut self,
        mut poll: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(None);
        }
        // An event that is ready at once does not show that longer polling pays.
        let first = poll()?;
        if first.is_some() {
            return Ok(first);
        }
        let start = Instant::now();
        loop {
            if let Some(found) = poll()? {
                self.penalty /= 2;
                return Ok(Some(found));
            }
            if start.elapsed() >= POLL_LIMIT {
                self.penalty = (self.penalty * 2).clamp(1, MAX_SKIPPED);
                self.skip = self.penalty;
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }
}

/// How long a batch may wait. Measured: 20 to 40 us made no difference.
const BATCH_WAIT: Duration = Duration::from_micros(25);
/// A client with this many unread replies is busy for longer than a batch takes. Measured: with
/// four, waiting halved the throughput.
const BUSY_REPLIES: usize = 8;

impl Worker {
    /// Waits while every client of `events` has many replies to read, for [`BATCH_WAIT`] at most.
    fn fill_batch(&mut self, events: &[epoll::Event]) {
        let mut busy = || !events.is_empty() && events.iter().all(|event| self.is_busy(event));
        if !busy() {
            return;
        }
        let start = Instant::now();
        while start.elapsed() < BATCH_WAIT && busy() {
            std::thread::yield_now(); // the client may need this CPU to read
        }
    }

    fn is_busy(&mut self, event: &epoll::Event) -> bool {
        let (data, flags) = (event.data, event.flags); // the struct is packed
        if flags != epoll::EventFlags::IN {
            return false;
        }
        let slot = Id::from_bits(data.u64()).and_then(|id| self.slot_of(id));
        let Some(conn) = slot.and_then(|slot| self.conns.open.get_mut(slot)) else { return false };
        if conn.writes_long() {
            return false; // few of its requests fit into the socket, so no batch grows
        }
        let Conn { socket, out, .. } = conn;
        // Asks the kernel only if the bytes sent since the last answer may be enough, not for each
        // request of a client that waits for its reply before the next.
        let many = BUSY_REPLIES * out.reply_cost;
        if out.unread >= many {
            out.unread = unread(socket);
        }
        out.unread >= many
    }
}

/// Returns the bytes that the other end of a Unix socket has not read, with the kernel's overhead.
/// On TCP: the bytes that the other end's kernel has not acknowledged.
fn unread(socket: &Socket) -> usize {
    let mut unread: libc::c_int = 0;
    // SAFETY: TIOCOUTQ stores one int, and keeps no pointer to it.
    let ret = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    if ret == 0 { unread.max(0) as usize } else { 0 }
}
