//! Intake: receives bytes of a connection and parses them into requests, unless a limit blocks the
//! connection.

use std::io::{self, ErrorKind, Read};
use std::time::Instant;

use nbd_protocol::{CloseReason, Command, NbdError, Request, Step as HandshakeStep};
use radix_ctx::{CtxRef, Id};
use rustix::event::epoll;
use tracing::{debug, info, warn};

use super::{Conns, EVICTED, Worker};
use crate::conn::{Next, OUTSTANDING, Phase, Received, Session};
use crate::connection_limits::Peer;
use crate::export::Opening;
use crate::memory::{self, Limit};
use crate::requests::Step;

/// Most bytes that a receive in place takes beyond the payload: the next header, and a part of its
/// payload that is cheap to copy.
const AHEAD: usize = 4 << 10;
/// Most payloads that are received in place before other connections get their turn.
const PAYLOADS: usize = 4;
/// A payload makes progress only if at least this many bytes arrive. Otherwise a client could hold
/// its memory for ever with one byte now and then. Slow networks carry more in the time
/// that a stalled payload has.
const PROGRESS: u64 = 64 << 10;
/// Refused requests of a connection that are logged; later ones are only counted.
const LOGGED: u64 = 8;

/// The result of parsing the next bytes of a connection.
enum Parsed {
    /// A complete request, or the end of the handshake.
    Whole,
    /// At most a part of a request.
    Part,
    /// The bytes must wait, and were not consumed.
    Blocked(Limit),
    /// The connection ends: no further bytes are wanted.
    Last,
}

impl Worker {
    /// Handles an event on a connection's socket. Does nothing if the connection was closed in the
    /// meantime.
    pub(super) fn ready(&mut self, id: Id, flags: epoll::EventFlags) {
        let Some(slot) = self.slot_of(id) else { return };
        let conn = &self.conns.open[slot];
        if flags.contains(epoll::EventFlags::IN) && conn.wants_input() {
            match self.receive(slot) {
                Ok(()) => {
                    self.watch_payload(slot);
                    if self.slot_of(id).is_some_and(|slot| self.conns.open[slot].tls.is_some()) {
                        self.queue_send(id); // TLS may have decrypted more, or have bytes to send
                    }
                }
                Err(reason) => self.close(id, &reason),
            }
        } else if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
            // The client reads no more replies. Requests in flight finish without their connection.
            self.close(id, "the client hung up");
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.queue_send(id);
        }
    }

    /// Records when a payload, which holds memory, last made progress. Not while the connection is
    /// blocked: then the server, not the client, reads no more of it.
    fn watch_payload(&mut self, slot: usize) {
        let Some(conn) = self.conns.open.get_mut(slot) else { return };
        let inside = match &conn.phase {
            Phase::Transmission(session) => session.is_inside_payload() && conn.blocked.is_none(),
            _ => false,
        };
        if inside {
            self.deadlines.watch();
        }
        let goes_on = |&(_, before): &(Instant, u64)| conn.received >= before + PROGRESS;
        if !inside {
            conn.stalled = None;
        } else if conn.stalled.as_ref().is_none_or(goes_on) {
            conn.stalled = Some((Instant::now(), conn.received));
        }
    }

    /// Receives and parses a scratch buffer of bytes, or a few long payloads in place. An error is
    /// a reason to close the connection.
    fn receive(&mut self, slot: usize) -> Result<(), String> {
        if matches!(self.conns.open[slot].phase, Phase::Lingering) {
            return self.discard_input(slot);
        }
        for _ in 0..PAYLOADS {
            let conn = &mut self.conns.open[slot];
            let is_long = conn.writes_long();
            // The unparsed bytes, at most the start of a header, come before the new ones.
            let have = conn.unparsed.len();
            self.scratch[..have].copy_from_slice(&conn.unparsed);
            // A short receive leaves the payload of the next long WRITE to be received in place.
            let end = if is_long { have + AHEAD } else { self.scratch.len() };
            let Received { count, missing, ahead } =
                match conn.receive(&mut self.scratch[have..end]) {
                    Ok(received) => received,
                    Err(error) if is_transient(&error) => return Ok(()),
                    Err(error) => return Err(error.to_string()),
                };
            if count == 0 {
                self.end_of_input(slot);
                return Ok(());
            }
            if missing > 0 {
                return Ok(()); // nothing more has arrived
            }
            self.parse_scratch(slot, have + ahead)?;
            // The first is true after a payload, whose request was started above.
            let may_be_more = count > ahead || ahead == AHEAD;
            if !is_long || !may_be_more || !self.conns.open[slot].wants_input() {
                return Ok(());
            }
        }
        Ok(()) // epoll reports the rest
    }

    /// Parses the first `len` bytes of the scratch buffer, and keeps the bytes that must wait.
    fn parse_scratch(&mut self, slot: usize, len: usize) -> Result<(), String> {
        let scratch = std::mem::take(&mut self.scratch);
        let parsed = self.parse(slot, &scratch[..len]).map(|used| {
            let conn = &mut self.conns.open[slot];
            let left = &scratch[used..len];
            conn.unparsed.clear();
            let has_memory = memory::reserve(&mut conn.unparsed, left.len());
            if has_memory {
                conn.unparsed.extend_from_slice(left);
            }
            has_memory
        });
        self.scratch = scratch;
        if !parsed? {
            warn!(conn = %self.conns.open[slot].id(), "no memory for a request, the connection ends");
            self.drain(slot);
        }
        Ok(())
    }

    /// Reads and discards bytes after the last request.
    fn discard_input(&mut self, slot: usize) -> Result<(), String> {
        match (&self.conns.open[slot].socket).read(&mut self.scratch) {
            Ok(0) => Err("done".into()),
            Ok(_) => Ok(()),
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Handles the end of a client's input. Its requests in flight are still answered.
    fn end_of_input(&mut self, slot: usize) {
        let conn = &mut self.conns.open[slot];
        match &conn.phase {
            Phase::Transmission(_) if conn.outstanding() > 0 => {
                info!(conn = %conn.id(), "the client left without a disconnect");
            }
            _ => debug!(conn = %conn.id(), "end of input"),
        }
        self.drain(slot);
    }

    /// Stops reading from a connection, which is closed once its replies are sent.
    pub(super) fn drain(&mut self, slot: usize) {
        let conn = &mut self.conns.open[slot];
        conn.unparsed = Vec::new();
        (conn.blocked, conn.stalled) = (None, None);
        if let Phase::Transmission(session) = std::mem::replace(&mut conn.phase, Phase::Draining) {
            if let Some(buf) = session.abandon() {
                self.memory.release(buf, Some(&mut conn.account));
            }
        }
        let id = conn.id();
        self.queue_send(id);
    }

    /// Parses bytes of a connection and starts their requests. Returns the number of bytes used;
    /// the rest must wait for more bytes or for a limit.
    fn parse(&mut self, slot: usize, bytes: &[u8]) -> Result<usize, String> {
        let mut input = bytes;
        let last = loop {
            let parsed = match self.conns.open[slot].phase {
                Phase::Draining | Phase::Lingering => Parsed::Part,
                Phase::Handshake(_) => self.negotiate(slot, &mut input)?,
                Phase::Transmission(_) => self.start_request(slot, &mut input),
            };
            if !matches!(parsed, Parsed::Whole) {
                break parsed;
            }
        };
        let conn = &mut self.conns.open[slot];
        match last {
            Parsed::Last => {
                self.drain(slot);
                return Ok(bytes.len()); // later bytes are ignored
            }
            Parsed::Blocked(on) => {
                conn.block(on, &mut self.conns.blocked, &mut self.conns.sendable)
            }
            Parsed::Whole | Parsed::Part => {}
        }
        Ok(bytes.len() - input.len())
    }

    /// Parses handshake options until the handshake ends or needs more bytes.
    fn negotiate(&mut self, slot: usize, input: &mut &[u8]) -> Result<Parsed, String> {
        let Self { conns, requests, memory, shared, .. } = self;
        let (conns, sendable, exports) = (&mut conns.open, &mut conns.sendable, &shared.exports);
        let conn = &mut conns[slot];
        let Phase::Handshake(handshake) = &mut conn.phase else { return Ok(Parsed::Part) };
        let tls = if conn.tls.is_none() { exports.tls.room() } else { 0 };
        if !memory.has_room_for_handshake(exports.handshake_room(input.len()) + tls) {
            return Ok(Parsed::Blocked(Limit::Worker));
        }
        let opening = Opening::new(exports);
        let (peer, is_tls) = (conn.permit.peer, conn.tls.is_some());
        let lacked_tls = handshake.lacked_tls();
        let (used, step) = handshake.receive(input, &opening, &mut conn.out.handshake);
        *input = &input[used..];
        if handshake.lacked_tls() && !lacked_tls {
            let conn = CtxRef::id(&conn.ctx);
            warn!(%conn, %peer, "refused: TLS is required, and the client has not started it");
        }
        conn.queue_send(sendable);
        match step {
            HandshakeStep::More => Ok(Parsed::Part),
            HandshakeStep::StartTls => {
                let start = |error| format!("cannot start TLS: {error}");
                let tls = exports.tls.accept().map_err(start)?;
                conn.start_tls(tls, memory).map_err(start)?;
                Ok(Parsed::Part)
            }
            HandshakeStep::Ready(negotiated) => {
                let Some(export) = opening.opened.into_inner() else {
                    return Err("no export was opened".into()); // `Ready` follows an open
                };
                let image = requests.open(&export.image).map_err(|error| error.to_string())?;
                // The last step that may fail: from here on the client counts as served.
                if !conn.permit.finish_handshake() {
                    return Err(EVICTED.into());
                }
                let name = &export.info.name;
                info!(conn = %conn.id(), %peer, tls = is_tls, export = name, "negotiated");
                conn.listed.set_export(&export.info.name);
                conn.phase = Phase::Transmission(Session::new(export, image, negotiated.agreed()));
                conn.deadline = None;
                Ok(Parsed::Whole)
            }
            HandshakeStep::Close(reason) => {
                log_refusal(conn.id(), peer, is_tls, &reason);
                Ok(Parsed::Last)
            }
        }
    }

    /// Parses a request, and starts it unless it must wait.
    fn start_request(&mut self, slot: usize, input: &mut &[u8]) -> Parsed {
        let Self { conns, requests, memory, .. } = self;
        let Conns { open: conns, sendable, .. } = conns;
        let conn = &mut conns[slot];
        let Phase::Transmission(session) = &mut conn.phase else { return Parsed::Part };
        if conn.active + conn.out.len() >= OUTSTANDING {
            return Parsed::Blocked(Limit::Connection);
        }
        if !requests.has_room(&session.image) {
            return Parsed::Blocked(Limit::Worker);
        }
        if !conn.out.reserve(conn.active + 1) {
            warn!(conn = %CtxRef::id(&conn.ctx), "no memory for a reply, the connection ends");
            return Parsed::Last;
        }
        let step = match session.next(input, memory, &mut conn.account) {
            Next::More => return Parsed::Part,
            Next::Blocked(limit) => return Parsed::Blocked(limit),
            Next::Start(_, Command::Disconnect, _) => {
                debug!(conn = %conn.id(), "disconnect");
                return Parsed::Last;
            }
            Next::Start(request, command, buf) => {
                let session = (&session.image, session.unit(), session.style());
                requests.start(&conn.ctx, session, request, command, buf)
            }
            Next::Refuse(request, error) => {
                conn.refused += 1;
                if conn.refused <= LOGGED {
                    let Request { command, offset, len, .. } = request;
                    let conn = CtxRef::id(&conn.ctx);
                    info!(%conn, command, offset, len, %error, "request refused");
                }
                self.deadlines.refused_memory |=
                    error == NbdError::NoMem && conn.out.stuck.is_none();
                requests.counters.errors += 1;
                Some(Step::refuse(&request, session.style(), error))
            }
            Next::OutOfStep(error) => {
                // Requests before this one still get their replies.
                warn!(conn = %CtxRef::id(&conn.ctx), %error, "the connection ends");
                return Parsed::Last;
            }
        };
        conn.active += 1;
        if let Some(step) = step {
            conn.queue_reply(step, memory, sendable);
        }
        Parsed::Whole
    }

    /// Retries connections that are blocked, the longest blocked first. Returns whether one of them
    /// made progress. A connection that made progress and is blocked again queues after those that
    /// did not.
    pub(super) fn unblock(&mut self) -> bool {
        self.memory.forget_refusals();
        let mut ahead = 0;
        let mut progress = false;
        for _ in 0..self.conns.blocked.len() {
            let Some(id) = self.conns.blocked.pop_front() else { break };
            let Some(slot) = self.slot_of(id) else { continue };
            let conn = &mut self.conns.open[slot];
            if conn.blocked.take().is_none() {
                continue;
            }
            let mut unparsed = std::mem::take(&mut conn.unparsed);
            match self.parse(slot, &unparsed) {
                Ok(used) => {
                    progress |= used > 0;
                    unparsed.drain(..used);
                    let conn = &mut self.conns.open[slot];
                    if matches!(conn.phase, Phase::Handshake(_) | Phase::Transmission(_)) {
                        conn.unparsed = unparsed;
                    }
                    self.watch_payload(slot); // the payload may have got its memory just now
                    let conn = &self.conns.open[slot];
                    if used == 0 && conn.blocked.is_some() {
                        ahead += 1; // `parse` has put it at the back of the list
                    } else {
                        // Registers with epoll whether input is wanted.
                        self.queue_send(id);
                        if self.conns.open[slot].blocked.is_some() {
                            self.conns.behind.extend(self.conns.blocked.pop_back());
                        }
                    }
                }
                Err(reason) => self.close(id, &reason),
            }
        }
        debug_assert_eq!(ahead, self.conns.blocked.len());
        self.conns.blocked.extend(self.conns.behind.drain(..));
        progress
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn log_refusal(conn: Id, peer: Peer, tls: bool, reason: &CloseReason) {
    match reason {
        CloseReason::Aborted => debug!(%conn, %peer, tls, %reason),
        _ => warn!(%conn, %peer, tls, %reason, "handshake refused"),
    }
}
