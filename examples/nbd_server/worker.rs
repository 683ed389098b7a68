//! One worker thread: an engine, its connections, and the loop that serves them.
//!
//! ```text
//!  epoll ─► receive ─► parse ─► engine (one batch) ─► completions ─► replies ─► send (one call)
//!    ▲ sockets, engine, inbox                               └─ next operation ─┘
//! ```
//!
//! Everything received in one go is parsed under one plug, so it reaches the kernel in one
//! submission; everything that completed by then is answered with one send per connection.
//! Whatever was too much for a limit waits in its connection until replies have left.

use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use aio_reap::{Engine, EngineStats};
use nbd_protocol::{CloseReason, Command, Request, Step as HandshakeStep};
use rustix::event::{Timespec, epoll};
use slab::Slab;
use socket2::Socket;
use tracing::{debug, info, warn};

use crate::conn::{Conn, OUTSTANDING, Phase, Sent};
use crate::export::ExportTable;
use crate::memory::Memory;
use crate::requests::{ConnKey, Counters, Requests, Step};
use crate::session::{Next, Session};
use crate::spin::Spinner;

/// A client that has not finished its handshake by then is closed.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// A client that takes no byte of its replies for so long is closed if memory is short.
const STUCK_LIMIT: Duration = Duration::from_secs(30);
/// After a stop request, replies have so long to leave.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How often deadlines are looked at while there are any.
const TICK: Duration = Duration::from_millis(250);

/// Bytes received at a time; payloads larger than a part of it are received in place.
const SCRATCH: usize = 256 << 10;
const IN_PLACE: usize = 64 << 10;
/// Bytes received in place before others have their turn.
const IN_PLACE_TURN: usize = 4 << 20;

const ENGINE: u64 = u64::MAX;
const INBOX: u64 = u64::MAX - 1;

/// What the main thread tells a worker; signal the inbox's eventfd after sending.
pub(crate) enum Message {
    Serve(Socket),
    Report(Sender<WorkerReport>),
    /// Finish what is in flight, then end.
    Stop,
}

/// A worker's figures since it started.
#[derive(Debug)]
pub(crate) struct WorkerReport {
    pub(crate) counters: Counters,
    pub(crate) connections: usize,
    pub(crate) engine: EngineStats,
}

pub(crate) struct Worker {
    exports: Arc<ExportTable>,
    requests: Requests,
    memory: Memory,
    conns: Slab<Conn>,
    next_serial: u64,
    epoll: OwnedFd,
    inbox: Receiver<Message>,
    bell: Arc<OwnedFd>,
    /// Connections of the whole server.
    total: Arc<AtomicUsize>,
    scratch: Box<[u8]>,
    /// Connections with something to send.
    dirty: Vec<ConnKey>,
    /// Connections that wait for memory or room.
    blocked: Vec<ConnKey>,
    stopping: Option<Instant>,
    /// A connection has a deadline.
    watching: bool,
    spinner: Spinner,
}

impl Worker {
    /// To be called on the thread that will run it: the engine stays there.
    pub(crate) fn new(
        exports: Arc<ExportTable>,
        engine: Engine,
        most: usize,
        memory: usize,
        (inbox, bell): (Receiver<Message>, Arc<OwnedFd>),
        total: Arc<AtomicUsize>,
    ) -> io::Result<Self> {
        let engine = Rc::new(engine);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let input = epoll::EventFlags::IN;
        epoll::add(&epoll, engine.as_ref().as_fd(), epoll::EventData::new_u64(ENGINE), input)?;
        epoll::add(&epoll, bell.as_fd(), epoll::EventData::new_u64(INBOX), input)?;
        Ok(Self {
            requests: Requests::new(engine, &exports, most)?,
            exports,
            memory: Memory::new(memory),
            conns: Slab::new(),
            next_serial: 0,
            epoll,
            inbox,
            bell,
            total,
            scratch: vec![0; SCRATCH].into(),
            dirty: Vec::new(),
            blocked: Vec::new(),
            stopping: None,
            watching: false,
            spinner: Spinner::default(),
        })
    }

    /// Serves until told to stop and everything in flight is answered.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let engine = Rc::clone(&self.requests.engine);
        let mut events = Vec::with_capacity(256);
        loop {
            self.wait(&mut events)?;
            let (mut inbox, mut turn) = (false, false);
            {
                let _plug = engine.plug(); // what arrived together is submitted together
                for event in &events {
                    let (data, flags) = (event.data, event.flags); // the struct is packed
                    match data.u64() {
                        ENGINE => turn = true,
                        INBOX => inbox = true,
                        slot => self.ready(slot as usize, flags),
                    }
                }
            }
            if turn {
                engine.turn();
            }
            self.settle(&engine);
            if inbox {
                self.read_inbox();
            }
            if self.look_at_deadlines() {
                return Ok(());
            }
        }
    }

    /// Waits for events: looks for a moment, then sleeps.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let mut look = |timeout: Option<&Timespec>| {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout) {
                Ok(0) | Err(rustix::io::Errno::INTR) => Ok(None),
                Ok(_) => Ok(Some(())),
                Err(error) => Err(io::Error::from(error)),
            }
        };
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        if self.spinner.spin(|| look(Some(&NOW)))?.is_some() {
            return Ok(());
        }
        let ticking = self.watching || self.stopping.is_some();
        // The tick is a constant below a second.
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        look(ticking.then_some(&tick)).map(drop)
    }

    /// An event on a connection's socket.
    fn ready(&mut self, slot: usize, flags: epoll::EventFlags) {
        let Some(conn) = self.conns.get(slot) else { return };
        let key = conn.key;
        if flags.contains(epoll::EventFlags::IN) && conn.wants_input() {
            if let Err(reason) = self.receive(slot) {
                self.close(key, &reason);
            }
        } else if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
            // Nobody is left to reply to. What is in flight finishes without its connection.
            self.close(key, "the client hung up");
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.mark_dirty(key);
        }
    }

    /// Receives once and parses. An error is a reason to close the connection.
    fn receive(&mut self, slot: usize) -> Result<(), String> {
        let mut in_place = 0;
        while let Some(result) = self.conns[slot].receive_in_place(IN_PLACE) {
            match result {
                Ok((0, _)) => return Err("the client vanished inside a request".into()),
                Ok((count, left)) => {
                    in_place += count;
                    if left > 0 || in_place >= IN_PLACE_TURN {
                        return Ok(()); // drained, or enough for one turn
                    }
                    self.parse(slot, &[])?;
                    if !self.conns[slot].wants_input() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
        // What was left over, the start of a header at most, goes in front of what comes now.
        let conn = &mut self.conns[slot];
        let have = conn.unread.len();
        self.scratch[..have].copy_from_slice(&conn.unread);
        match (&conn.socket).read(&mut self.scratch[have..]) {
            Ok(0) => {
                self.end_of_input(slot);
                Ok(())
            }
            Ok(count) => {
                let scratch = std::mem::take(&mut self.scratch);
                let received = &scratch[..have + count];
                let parsed = self.parse(slot, received).map(|used| {
                    let conn = &mut self.conns[slot];
                    conn.unread.clear();
                    conn.unread.extend_from_slice(&received[used..]);
                });
                self.scratch = scratch;
                parsed
            }
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The client sends no more: its requests in flight are still answered.
    fn end_of_input(&mut self, slot: usize) {
        let conn = &mut self.conns[slot];
        match &conn.phase {
            Phase::Transmission(_) if conn.outstanding() > 0 => {
                info!(conn = conn.key.serial, "the client left without a disconnect");
            }
            _ => debug!(conn = conn.key.serial, "end of input"),
        }
        self.drain(slot);
    }

    /// Reads no more from a connection; it is closed once it has its replies.
    fn drain(&mut self, slot: usize) {
        let conn = &mut self.conns[slot];
        conn.unread = Vec::new();
        conn.blocked = false;
        let old = std::mem::replace(&mut conn.phase, Phase::Draining);
        if let Phase::Transmission(session) = old {
            if let Some(buf) = session.abandon() {
                self.memory.give(buf, Some(&mut conn.account));
            }
        }
        let key = conn.key;
        self.mark_dirty(key);
    }

    /// Understands bytes from a connection; returns how many are done with. The rest has to wait
    /// for more, or for a limit.
    fn parse(&mut self, slot: usize, bytes: &[u8]) -> Result<usize, String> {
        let Self { conns, requests, memory, exports, dirty, blocked, .. } = self;
        let conn = &mut conns[slot];
        let mut input = bytes;
        let mut finished = false;
        loop {
            match &mut conn.phase {
                Phase::Draining => break,
                Phase::Handshake(handshake, _) => {
                    let (used, step) =
                        handshake.receive(input, &**exports, &mut conn.out.handshake);
                    input = &input[used..];
                    conn.mark_dirty(dirty);
                    match step {
                        HandshakeStep::More => break,
                        HandshakeStep::Ready(negotiated) => {
                            // It was found a moment ago, and exports do not change.
                            let Some(export) = exports.index_of(&negotiated.export) else {
                                return Err("the export is gone".into());
                            };
                            let name = &exports.get(export).info.name;
                            info!(conn = conn.key.serial, export = name, "negotiated");
                            conn.phase =
                                Phase::Transmission(Session::new(export, negotiated.structured));
                        }
                        HandshakeStep::Close(reason) => {
                            log_refusal(conn.key, &reason);
                            finished = true;
                            break;
                        }
                    }
                }
                Phase::Transmission(session) => {
                    let outstanding = conn.active + conn.out.len();
                    if !requests.has_room() || outstanding >= OUTSTANDING {
                        conn.block(blocked, dirty);
                        break;
                    }
                    match session.next(&mut input, exports, memory, &mut conn.account) {
                        Next::More => break,
                        Next::NoMemory => {
                            conn.block(blocked, dirty);
                            break;
                        }
                        Next::Start(_, Command::Disconnect, _) => {
                            debug!(conn = conn.key.serial, "disconnect");
                            finished = true;
                            break;
                        }
                        Next::Start(request, command, buf) => {
                            let target = (exports.get(session.export).file, session.structured);
                            conn.active += 1;
                            let step = requests.start(conn.key, target, request, command, buf);
                            if let Some(step) = step {
                                conn.take(step, memory, dirty);
                            }
                        }
                        Next::Refuse(request, error) => {
                            let Request { command, offset, len, .. } = request;
                            info!(conn = conn.key.serial, command, offset, len, %error, "refused");
                            requests.counters.errors += 1;
                            conn.active += 1;
                            let step = Step::refuse(conn.key, &request, session.structured, error);
                            conn.take(step, memory, dirty);
                        }
                        Next::OutOfStep(error) => return Err(error.to_string()),
                    }
                }
            }
        }
        if finished {
            self.drain(slot);
            return Ok(bytes.len()); // whatever follows is not wanted
        }
        Ok(bytes.len() - input.len())
    }

    /// Answers what has completed, lets waiting connections go on, sends, until nothing is left
    /// that can be done now.
    fn settle(&mut self, engine: &Engine) {
        loop {
            let mut progress = false;
            {
                let _plug = engine.plug();
                while let Some(step) = self.requests.complete() {
                    progress = true;
                    self.take(step);
                }
                progress |= self.send_replies();
                progress |= self.unblock();
            }
            // With nothing else to do, send what `unblock` may have answered: what leaves makes
            // room for those that wait.
            if !progress && self.requests.nothing_completed() && !self.send_replies() {
                return;
            }
        }
    }

    /// Hands a step to its connection, if that is still there.
    fn take(&mut self, step: Step) {
        match live(&mut self.conns, step.conn) {
            Some(conn) => conn.take(step, &mut self.memory, &mut self.dirty),
            None => {
                for buf in [step.data, step.spent].into_iter().flatten() {
                    self.memory.give(buf, None);
                }
            }
        }
    }

    /// Lets connections that had to wait try again; whether one of them got on.
    fn unblock(&mut self) -> bool {
        let mut progress = false;
        for key in std::mem::take(&mut self.blocked) {
            let Some(conn) = live(&mut self.conns, key) else { continue };
            if !std::mem::take(&mut conn.blocked) {
                continue;
            }
            let mut unread = std::mem::take(&mut conn.unread);
            match self.parse(key.slot, &unread) {
                Ok(used) => {
                    progress |= used > 0;
                    unread.drain(..used);
                    self.conns[key.slot].unread = unread;
                    self.mark_dirty(key); // so that epoll hears whether input is wanted
                }
                Err(reason) => self.close(key, &reason),
            }
        }
        progress
    }

    fn mark_dirty(&mut self, key: ConnKey) {
        if let Some(conn) = live(&mut self.conns, key) {
            conn.mark_dirty(&mut self.dirty);
        }
    }

    /// Sends on every dirty connection, and tells epoll what each now waits for. Returns whether
    /// a reply left.
    fn send_replies(&mut self) -> bool {
        let mut left = false;
        for at in 0..self.dirty.len() {
            let key = self.dirty[at];
            let Some(conn) = live(&mut self.conns, key) else { continue };
            conn.dirty = false;
            let Conn { out, socket, account, .. } = conn;
            let waiting = out.len();
            let sent = out.send(&mut &*socket, &mut self.memory, account);
            left |= out.len() < waiting;
            match sent {
                Ok(Sent::All) => {}
                Ok(Sent::Blocked) => {
                    out.stuck.get_or_insert_with(Instant::now);
                    self.watching = true;
                }
                Err(error) => {
                    self.close(key, &error.to_string());
                    continue;
                }
            }
            if conn.is_finished() {
                self.close(key, "done");
                continue;
            }
            if conn.interest() != conn.told {
                conn.told = conn.interest();
                let data = epoll::EventData::new_u64(key.slot as u64);
                if let Err(error) = epoll::modify(&self.epoll, &conn.socket, data, conn.told) {
                    self.close(key, &error.to_string());
                }
            }
        }
        self.dirty.clear();
        left
    }

    fn read_inbox(&mut self) {
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]); // the count does not matter
        loop {
            match self.inbox.try_recv() {
                Ok(Message::Serve(socket)) => self.serve(socket),
                Ok(Message::Report(sender)) => {
                    let _ = sender.send(self.report()); // nobody waits any more: fine
                }
                Ok(Message::Stop) => self.stop(),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => return self.stop(),
            }
        }
    }

    fn serve(&mut self, socket: Socket) {
        let entry = self.conns.vacant_entry();
        let key = ConnKey { slot: entry.key(), serial: self.next_serial };
        self.next_serial += 1;
        let data = epoll::EventData::new_u64(key.slot as u64);
        let conn = Conn::new(socket, key, Instant::now() + HANDSHAKE_LIMIT);
        if self.stopping.is_some() {
            self.total.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        if let Err(error) = epoll::add(&self.epoll, &conn.socket, data, conn.told) {
            warn!(%error, "cannot watch a new connection");
            self.total.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        entry.insert(conn);
        self.watching = true;
        self.mark_dirty(key); // the greeting
        self.send_replies();
    }

    fn report(&self) -> WorkerReport {
        WorkerReport {
            counters: self.requests.counters,
            connections: self.conns.len(),
            engine: self.requests.engine.stats(),
        }
    }

    fn stop(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(Instant::now() + STOP_LIMIT);
        let slots: Vec<usize> = self.conns.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.drain(slot);
        }
        self.send_replies();
    }

    /// Closes who is late. Returns whether the worker is to end.
    fn look_at_deadlines(&mut self) -> bool {
        if !self.watching && self.stopping.is_none() {
            return false;
        }
        let now = Instant::now();
        let mut late = Vec::new();
        self.watching = false;
        for (_, conn) in &self.conns {
            let stuck = conn.out.stuck;
            match conn.phase {
                Phase::Handshake(_, deadline) if now >= deadline => {
                    late.push((conn.key, "no handshake within 10 s"));
                }
                _ if self.memory.is_tight()
                    && stuck.is_some_and(|since| now >= since + STUCK_LIMIT) =>
                {
                    late.push((conn.key, "it takes no replies and memory is short"));
                }
                Phase::Handshake(..) => self.watching = true,
                _ => self.watching |= stuck.is_some(),
            }
            if self.stopping.is_some_and(|limit| now >= limit) {
                late.push((conn.key, "it took no replies while the server stopped"));
            }
        }
        for (key, reason) in late {
            self.close(key, reason);
        }
        self.stopping.is_some() && self.conns.is_empty() && self.requests.is_idle()
    }

    fn close(&mut self, key: ConnKey, reason: &str) {
        let Some(conn) = live(&mut self.conns, key) else { return };
        info!(conn = key.serial, reason, "connection closed");
        conn.out.discard(&mut self.memory);
        let conn = self.conns.remove(key.slot);
        if let Phase::Transmission(session) = conn.phase {
            if let Some(buf) = session.abandon() {
                self.memory.give(buf, None);
            }
        }
        self.total.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The connection of that key, if it is still there.
fn live(conns: &mut Slab<Conn>, key: ConnKey) -> Option<&mut Conn> {
    conns.get_mut(key.slot).filter(|conn| conn.key == key)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn log_refusal(key: ConnKey, reason: &CloseReason) {
    match reason {
        CloseReason::Aborted => debug!(conn = key.serial, %reason),
        _ => warn!(conn = key.serial, %reason, "handshake refused"),
    }
}
