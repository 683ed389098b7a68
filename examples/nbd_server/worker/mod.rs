//! One worker thread: an engine, its connections, and the loop that serves them.
//!
//! ```text
//!  epoll ─► receive ─► parse ─► engine (one batch) ─► completions ─► replies ─► send (one call)
//!    ▲ sockets, engine, inbox      ▲ queued operations            │
//!                                  └──── next operation ◄─────────┘
//! ```
//!
//! Everything received in one go is parsed under one plug, so it reaches the kernel in one
//! submission; everything that completed by then is answered with one send per connection.
//! Bytes above a limit wait in their connection until replies have left.
//!
//! A request that is answered from memory stays on this thread and allocates nothing. Its costs:
//!
//! - For a batch of requests one wait for events, one receive and one send. To read from the socket
//!   without a wait would favour the client of the last event.
//! - For each block of 4 KiB a lookup in the cache and a guard, which are its only accesses to memory
//!   that other threads write.
//! - For each byte a copy between the cache and the request's buffer, beside the kernel's own. To
//!   send from the cache would hold guards for as long as a client takes to read, and to receive
//!   into it for as long as a client takes to write.
//! - For a batch of requests two reads of the clock, if there are several workers: see
//!   [`load`].
//! - No cache line that another core wrote: `cargo bench --bench census -- --only served`.
//! - For each request one of the worker's buffers, and for each event three lookups of its
//!   connection, because an id that comes back from the kernel is not trusted.
//!
//! Measured by `cargo bench --bench nbd -- --only N7` and perf: random reads of 4 KiB, 32 at a
//! time, of 1 GiB that is all in the cache, took 2.7 us of an Intel Xeon each. The kernel's send is
//! 44 % of that (27 its copy, 9 the memory for it), its receive 5 and the looks for events 3: any
//! server pays these. Then the copy out of the cache, 22 %, because the block comes from memory,
//! not from the CPU's cache; to wait for a busy client (see [`batching`]), 8; to look the block up,
//! 6, nearly all of it one line from memory.

mod batching;
mod deadlines;
mod intake;
mod load;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use aio_reap::{Engine, EngineStats};
use percpu_list::InsertError;
use radix_ctx::{CtxRef, Id};
use rustix::event::{Timespec, epoll};
use slab::Slab;
use socket2::Socket;
use tracing::{info, warn};

pub(crate) use self::load::WorkerLoad;
use crate::admission::WaitStats;
use crate::busy_poll::BusyPoll;
use crate::conn::{Conn, Phase, Sent};
use crate::connection_limits::Permit;
use crate::contexts::{Connection, Connections};
use crate::counters::Counters;
use crate::export::ExportTable;
use crate::memory::BufferPool;
use crate::notifier::{eventfd, ring};
use crate::registry::{Client, Registry};
use crate::requests::{Limits, Requests};
use crate::tls::Wire;
use crate::upstream::Lanes;

/// A client that has not finished its handshake by then is closed.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// A connection at its end has so long to say that it got everything.
const LINGER_LIMIT: Duration = Duration::from_secs(1);
/// How often deadlines are looked at while there are any.
const TICK: Duration = Duration::from_millis(250);
/// Bytes received at a time.
const SCRATCH: usize = 256 << 10;
/// Rounds of completions and replies before the sockets have their turn: one for what was
/// received, one for what that set free.
const ROUNDS: usize = 2;

/// Why a half-open connection is closed before its time.
const GAVE_WAY: &str = "it has not finished its handshake, and gives way to a newer connection";

// None is an id.
const ENGINE: u64 = u64::MAX;
const INBOX: u64 = u64::MAX - 1;
const LANES: u64 = u64::MAX - 2;

/// What the main thread tells a worker.
pub(crate) enum Message {
    Serve(Socket, CtxRef<Connection>, Permit),
    Report(Sender<WorkerReport>),
    /// The session was taken off the list: answer what it asked for, then close it.
    End(Id),
    /// The connection has not finished its handshake, and gives way to a newer one.
    GiveWay(Id),
    /// Every session was told to end: finish what is in flight, then end.
    Stop,
}

/// What all threads of the server use.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) exports: Arc<ExportTable>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) registry: Arc<Registry>,
}

/// Where a worker gets its messages.
#[derive(Clone)]
pub(crate) struct Inbox {
    pub(crate) sender: Sender<Message>,
    pub(crate) bell: Arc<OwnedFd>,
    pub(crate) load: Arc<WorkerLoad>,
}

impl Inbox {
    /// With the end that the worker has. `start` is the same for all workers.
    pub(crate) fn new(start: Instant) -> io::Result<(Self, Receiver<Message>)> {
        let (sender, receiver) = mpsc::channel();
        let load = Arc::new(WorkerLoad::new(start));
        Ok((Self { sender, bell: eventfd()?, load }, receiver))
    }

    /// Whether the worker is still there to get it.
    pub(crate) fn send(&self, message: Message) -> bool {
        let is_sent = self.sender.send(message).is_ok();
        ring(&self.bell);
        is_sent
    }
}

/// A worker's figures since it started.
#[derive(Debug)]
pub(crate) struct WorkerReport {
    pub(crate) counters: Counters,
    /// Operations that have begun, by image.
    pub(crate) begun: Vec<(String, usize)>,
    pub(crate) engine: EngineStats,
    pub(crate) waits: WaitStats,
}

/// Has the worker look at what has completed, from any thread.
struct Bell(Arc<OwnedFd>);

impl Bell {
    fn waker(bell: &Arc<OwnedFd>) -> Waker {
        Arc::new(Self(Arc::clone(bell))).into()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        ring(&self.0);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        ring(&self.0);
    }
}

pub(crate) struct Worker {
    exports: Arc<ExportTable>,
    requests: Requests,
    memory: BufferPool,
    conns: Slab<Conn>,
    epoll: OwnedFd,
    inbox: Receiver<Message>,
    bell: Arc<OwnedFd>,
    /// Of the whole server.
    connections: Arc<Connections>,
    /// Of the whole server.
    registry: Arc<Registry>,
    /// Which worker it is.
    number: usize,
    load: Arc<WorkerLoad>,
    /// There are other workers: the load tells which of them gets a new connection.
    has_peers: bool,
    scratch: Box<[u8]>,
    /// Connections with something to send.
    sendable: Vec<Id>,
    /// Connections that wait for memory or room.
    blocked: VecDeque<Id>,
    /// Connections of which TLS has decrypted more than was read.
    undrained: Vec<Id>,
    /// Reused by `unblock`.
    behind: Vec<Id>,
    /// Memory came free outside a round, or a round ended early: do not sleep.
    again: bool,
    stopping: Option<Instant>,
    /// A connection has a deadline.
    watching: bool,
    /// A request was refused because the system has no memory, since the last look at the
    /// deadlines.
    refused_memory: bool,
    next_look: Instant,
    busy_poll: BusyPoll,
    /// To servers that hold exports of this one.
    lanes: Lanes,
    /// A lane has received more than it has handled.
    lanes_have_more: bool,
}

impl Worker {
    /// To be called on the thread that will run it: the engine stays there. `workers` is how many
    /// there are.
    pub(crate) fn new(
        Shared { exports, connections, registry }: Shared,
        engine: Engine,
        limits: Limits,
        memory: usize,
        (number, workers): (usize, usize),
        (inbox, receiver): (Inbox, Receiver<Message>),
    ) -> io::Result<Self> {
        let Inbox { bell, load, .. } = inbox;
        let engine = Rc::new(engine);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let input = epoll::EventFlags::IN;
        epoll::add(&epoll, engine.as_ref().as_fd(), epoll::EventData::new_u64(ENGINE), input)?;
        epoll::add(&epoll, bell.as_fd(), epoll::EventData::new_u64(INBOX), input)?;
        let lanes = Lanes::start()?;
        epoll::add(&epoll, lanes.as_fd(), epoll::EventData::new_u64(LANES), input)?;
        Ok(Self {
            requests: Requests::new(engine, limits, Bell::waker(&bell)),
            exports,
            memory: BufferPool::new(memory),
            conns: Slab::new(),
            epoll,
            inbox: receiver,
            bell,
            connections,
            registry,
            number,
            load,
            has_peers: workers > 1,
            scratch: vec![0; SCRATCH].into(),
            sendable: Vec::new(),
            blocked: VecDeque::new(),
            undrained: Vec::new(),
            behind: Vec::new(),
            again: false,
            stopping: None,
            watching: false,
            refused_memory: false,
            next_look: Instant::now(),
            busy_poll: BusyPoll::default(),
            lanes,
            lanes_have_more: false,
        })
    }

    /// Serves until told to stop and everything in flight is answered.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let engine = Rc::clone(&self.requests.engine);
        let _lent = bufcache::lend_engine(&engine); // the cache's loads are the engine's
        let mut events = Vec::with_capacity(256);
        while !self.has_stopped() {
            self.round(&engine, &mut events)?;
        }
        Ok(())
    }

    /// Waits for events, handles them, and answers what has completed.
    fn round(&mut self, engine: &Engine, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        self.wait(events)?;
        self.gather_upstream_replies(events);
        self.fill_batch(events);
        let woke = self.has_peers.then(Instant::now);
        let (mut inbox, mut turn) = (false, false);
        let mut lanes = std::mem::take(&mut self.lanes_have_more);
        {
            let _plug = engine.plug(); // what arrived together is submitted together
            for at in 0..self.undrained.len() {
                self.ready(self.undrained[at], epoll::EventFlags::IN);
            }
            self.undrained.clear();
            for event in &*events {
                let (data, flags) = (event.data, event.flags); // the struct is packed
                match data.u64() {
                    ENGINE => turn = true,
                    INBOX => inbox = true,
                    LANES => lanes = true,
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
        if lanes {
            self.lanes_have_more = self.lanes.turn();
            self.again |= self.lanes_have_more;
        }
        self.complete_round(engine);
        if inbox {
            self.read_inbox();
        }
        self.check_deadlines();
        if let Some(woke) = woke {
            self.load.end_round(woke);
        }
        self.lanes.send();
        Ok(())
    }

    /// Waits for events: polls for a moment, then sleeps.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let mut poll = |timeout: Option<&Timespec>| {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout) {
                Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
                Ok(_) => Ok(Some(())),
                Err(error) => Err(io::Error::from(error)),
            }
        };
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        if std::mem::take(&mut self.again) {
            return poll(Some(&NOW)).map(drop);
        }
        let upstream_works = self.lanes.in_flight() > 0;
        let mut looked = false;
        let found = self.busy_poll.run(|| {
            if std::mem::replace(&mut looked, true) && upstream_works {
                std::thread::yield_now(); // it may need this CPU
            }
            poll(Some(&NOW))
        });
        if found?.is_some() {
            return Ok(());
        }
        let ticking = self.watching || self.stopping.is_some() || upstream_works;
        let tick = ticking.then_some(TICK);
        // A tick is a constant below a second.
        let tick = tick.map(|tick| Timespec { tv_sec: 0, tv_nsec: tick.subsec_nanos().into() });
        poll(tick.as_ref()).map(drop)
    }

    /// Answers what has completed, lets blocked connections continue, and sends, until nothing more
    /// can be done now.
    fn complete_round(&mut self, engine: &Engine) {
        for _ in 0..ROUNDS {
            let mut progress = false;
            {
                let _plug = engine.plug();
                while let Some(completed) = self.requests.complete() {
                    progress = true;
                    match completed {
                        Ok((slot, step)) => {
                            self.conns[slot].take(step, &mut self.memory, &mut self.sendable);
                        }
                        Err(buf) => {
                            buf.into_iter().for_each(|buf| self.memory.release(buf, None));
                        }
                    }
                }
                self.lanes.send(); // first: the upstream works while replies leave
                progress |= self.send_replies();
                progress |= self.unblock();
            }
            // With nothing else to do, send what `unblock` may have answered: what leaves makes
            // room for those that wait.
            if !progress && self.requests.nothing_completed() && !self.send_replies() {
                return;
            }
        }
        self.again = true;
    }

    /// Where the connection of that id is, unless it was closed.
    fn slot_of(&self, id: Id) -> Option<usize> {
        self.connections.with(id, |conn| conn.slot.get().copied()).ok().flatten()
    }

    fn queue_send(&mut self, id: Id) {
        if let Some(slot) = self.slot_of(id) {
            self.conns[slot].queue_send(&mut self.sendable);
        }
    }

    /// Sends on every sendable connection, and registers with epoll what each waits for. Returns
    /// whether a reply left.
    fn send_replies(&mut self) -> bool {
        let mut left = false;
        for at in 0..self.sendable.len() {
            let id = self.sendable[at];
            let Some(slot) = self.slot_of(id) else { continue };
            let conn = &mut self.conns[slot];
            conn.send_queued = false;
            let Conn { out, socket, tls, account, .. } = conn;
            let waiting = out.len();
            let mut wire = Wire { socket, tls: tls.as_deref_mut() };
            let sent = match out.send(&mut wire, &mut self.memory, account) {
                Ok(Sent::All) => match wire.flush() {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Sent::Blocked),
                    flushed => flushed.map(|()| Sent::All),
                },
                other => other,
            };
            left |= out.len() < waiting;
            match sent {
                Ok(Sent::All) => out.stuck = None,
                Ok(Sent::Blocked) => {
                    out.stuck.get_or_insert_with(Instant::now);
                    self.watching = true;
                }
                Err(error) => {
                    self.close(id, &error.to_string());
                    continue;
                }
            }
            if conn.is_finished() {
                if let Some(mut tls) = conn.tls.take() {
                    tls.close();
                    let _ = tls.flush(&conn.socket); // a courtesy
                }
                if !conn.tcp || conn.socket.shutdown(Shutdown::Write).is_err() {
                    self.close(id, "done");
                    continue;
                }
                conn.phase = Phase::Lingering(Instant::now() + LINGER_LIMIT);
                self.watching = true;
            }
            if conn.has_plaintext() {
                self.undrained.push(id);
                self.again = true;
            }
            if conn.interest() != conn.registered {
                conn.registered = conn.interest();
                let data = epoll::EventData::new_u64(id.to_bits());
                if let Err(error) = epoll::modify(&self.epoll, &conn.socket, data, conn.registered)
                {
                    self.close(id, &error.to_string());
                }
            }
        }
        self.sendable.clear();
        left
    }

    fn read_inbox(&mut self) {
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]); // the count does not matter
        self.again |= !self.requests.nothing_completed(); // it may have rung for that since `settle`
        loop {
            match self.inbox.try_recv() {
                Ok(Message::Serve(socket, ctx, permit)) => self.serve(socket, ctx, permit),
                Ok(Message::Report(sender)) => {
                    let _ = sender.send(self.report()); // fails if the report is no longer awaited
                }
                Ok(Message::End(id)) => self.end(id),
                Ok(Message::GiveWay(id)) => self.close(id, GAVE_WAY),
                Ok(Message::Stop) => self.stop(),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => return self.stop(),
            }
        }
    }

    fn serve(&mut self, socket: Socket, ctx: CtxRef<Connection>, permit: Permit) {
        let id = CtxRef::id(&ctx);
        let listed = match self.registry.add(Client::new(id, permit.peer, self.number)) {
            Ok(listed) => listed,
            Err(InsertError { value: Client { id, peer, .. }, reason }) => {
                info!(conn = %id, %peer, %reason, "connection refused");
                return self.forget(id);
            }
        };
        let entry = self.conns.vacant_entry();
        let _ = ctx.slot.set(entry.key()); // it is served once
        let data = epoll::EventData::new_u64(id.to_bits());
        let conn = Conn::new(
            socket,
            ctx,
            permit,
            listed,
            Instant::now() + HANDSHAKE_LIMIT,
            self.exports.tls.policy,
        );
        if let Err(error) = epoll::add(&self.epoll, &conn.socket, data, conn.registered) {
            warn!(%error, "cannot watch a new connection");
            self.forget(id);
            return;
        }
        entry.insert(conn);
        self.watching = true;
        self.queue_send(id); // the greeting
        self.send_replies();
    }

    fn report(&self) -> WorkerReport {
        WorkerReport {
            counters: self.requests.counters,
            begun: self.requests.begun_by_image(),
            engine: self.requests.engine.stats(),
            waits: self.requests.waits(),
        }
    }

    /// Ends a connection. Its operations in the engine go on, and keep their buffers; what waits is
    /// dropped.
    fn close(&mut self, id: Id, reason: &str) {
        let Some(slot) = self.slot_of(id) else { return };
        self.forget(id);
        let mut conn = self.conns.remove(slot);
        info!(conn = %id, reason, refused = conn.refused, "connection closed");
        conn.out.discard(&mut self.memory);
        self.requests.abandon(id, |buf| self.memory.release(buf, None));
        self.again |= !self.blocked.is_empty(); // what it held is free for them
        if let Phase::Transmission(session) = conn.phase {
            if let Some(buf) = session.abandon() {
                self.memory.release(buf, None);
            }
        }
    }

    /// From now on the id names no connection, and another may take its place. Once for each that
    /// was placed here.
    fn forget(&self, id: Id) {
        self.load.release();
        if let Err(error) = self.connections.remove(id) {
            warn!(conn = %id, %error, "a connection was forgotten before it was closed");
        }
    }
}
