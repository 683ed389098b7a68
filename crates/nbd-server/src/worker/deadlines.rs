//! Deadlines: late connections are closed, and a worker that stops ends in time.

use std::time::{Duration, Instant};

use radix_ctx::Id;

use super::{TICK, Worker};
use crate::conn::{BlockedOn, Conn, Phase};

/// A client that takes no byte of its replies, or whose payload does not progress, for this long is
/// closed if another client waits for memory or was refused it.
const STUCK_LIMIT: Duration = Duration::from_secs(3);
/// How long replies have to leave after a stop request.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// What of a worker waits for a time.
#[derive(Default)]
pub(super) struct Deadlines {
    /// Set once the worker is to end; it closes what is left at this time.
    pub(super) stopping: Option<Instant>,
    /// Some connection has a deadline.
    pub(super) watching: bool,
    /// The system had no memory for a request since the last check.
    pub(super) refused_memory: bool,
    /// The next check. `None` before the first.
    pub(super) next_look: Option<Instant>,
}

impl Worker {
    /// Ends a session: reads no more requests, and answers those in flight.
    pub(super) fn end(&mut self, id: Id) {
        let Some(slot) = self.slot_of(id) else { return };
        if matches!(self.conns.open[slot].phase, Phase::Handshake(..) | Phase::Transmission(_)) {
            self.drain(slot);
            self.send_replies();
        }
    }

    /// Begins to stop: the worker ends once it has no connection. It closes the connections that
    /// are not finished in time. Each listed session was told to [`end`](Self::end) before.
    pub(super) fn stop(&mut self) {
        if self.deadlines.stopping.is_some() {
            return;
        }
        self.deadlines.stopping = Some(Instant::now() + STOP_LIMIT);
        let left: Vec<_> = self.conns.open.iter().map(|(_, conn)| conn.id()).collect();
        left.into_iter().for_each(|id| self.end(id));
    }

    /// Returns whether the worker has stopped: no connection is left or on its way, and no request
    /// is in flight.
    pub(super) fn has_stopped(&self) -> bool {
        let done = self.deadlines.stopping.is_some()
            && self.conns.open.is_empty()
            && self.requests.is_idle();
        done && self.load.close()
    }

    /// Closes connections past a deadline. Does so at most once per tick.
    pub(super) fn check_deadlines(&mut self) {
        if !self.deadlines.watching && self.deadlines.stopping.is_none() {
            return;
        }
        let now = Instant::now();
        if self.deadlines.next_look.is_some_and(|next| now < next) {
            return;
        }
        self.deadlines.next_look = Some(now + TICK);
        // A stuck connection does harm only while another one waits for memory or is refused it.
        let waits = |conn: &Conn| conn.blocked == Some(BlockedOn::Others) && conn.stuck().is_none();
        let refused = std::mem::take(&mut self.deadlines.refused_memory);
        let harm = refused || self.conns.open.iter().any(|(_, conn)| waits(conn));
        let mut late = Vec::new();
        self.deadlines.watching = false;
        for (_, conn) in &self.conns.open {
            let stuck = conn.stuck().is_some_and(|since| now >= since + STUCK_LIMIT);
            match conn.phase {
                Phase::Handshake(_, deadline) if now >= deadline => {
                    late.push((conn.id(), "no handshake within 10 s"));
                }
                Phase::Lingering(deadline) if now >= deadline => late.push((conn.id(), "done")),
                _ if harm && stuck => {
                    late.push((conn.id(), "it stands still, and others wait for its memory"));
                }
                _ if self.deadlines.stopping.is_some_and(|limit| now >= limit) => {
                    late.push((conn.id(), "it took no replies while the server stopped"));
                }
                Phase::Handshake(..) | Phase::Lingering(_) => self.deadlines.watching = true,
                _ => self.deadlines.watching |= conn.stuck().is_some(),
            }
        }
        for (id, reason) in late {
            self.close(id, reason);
        }
    }
}
