//! Rebalancing: connections move from a busy worker to an idle one.
//!
//! ```text
//!  busy worker: begins no more requests of it ─► all earlier ones are answered ─┐
//!  idle worker: takes the connection over ◄───────── Message::Adopt ────────────┘
//! ```
//!
//! A connection without requests in flight is a socket, the received bytes of its next requests,
//! and its entries in the lists: no buffer and no operation of its worker. Then the whole [`Conn`]
//! is sent by message. The new worker stores its own location in the connection's
//! [context](crate::contexts::Connection), so that an event or a list entry left with the old
//! worker finds nothing.
//!
//! The [rebalancer](super::rebalancer) decides which connection moves, and where it moves to.

use std::time::Instant;

use radix_ctx::Id;
use rustix::event::epoll;
use tracing::{debug, warn};

use super::rebalancer::PendingMove;
use super::{Message, Worker};
use crate::conn::{BlockedOn, Conn, Phase};

impl Worker {
    /// Notes that a round begins, if there are other workers. Returns the time.
    pub(super) fn begin_round(&self) -> Option<Instant> {
        (self.workers.len() > 1).then(|| {
            self.load.begin_round();
            Instant::now()
        })
    }

    /// Notes how long the round took, and begins or continues a move.
    pub(super) fn end_round(&mut self, woke: Instant) {
        let now = Instant::now();
        self.load.end_round(now.duration_since(woke));
        if self.rebalancer.pending.is_some() {
            self.continue_move(now);
        } else if now >= self.rebalancer.next_look {
            let costs = self.conns.iter().filter(|(_, conn)| conn.is_movable());
            let costs = costs.map(|(_, conn)| (conn.id(), conn.cost));
            if let Some((id, to)) = self.rebalancer.compare(self.number, now, costs) {
                self.begin_move(id, to);
            }
            self.conns.iter_mut().for_each(|(_, conn)| conn.cost = 0);
        }
    }

    /// Begins to move a connection: none of its requests is begun until it is with the other
    /// worker, or stays after all.
    pub(super) fn begin_move(&mut self, id: Id, to: usize) {
        let busy = self.rebalancer.pending.is_some() || self.stopping.is_some();
        let Some(slot) = self.slot_of(id).filter(|_| !busy && to != self.number) else { return };
        let conn = &mut self.conns[slot];
        if !conn.is_movable() {
            return;
        }
        conn.moving = true;
        conn.queue_send(&mut self.sendable); // so that epoll is told that no input is wanted
        self.again = true;
        let now = Instant::now();
        let beside = self.workers[to].load.connections();
        let until = now + self.rebalancer.rules.patience;
        self.rebalancer.pending = Some(PendingMove { id, to, beside, until });
        self.continue_move(now);
    }

    /// Moves the connection if it is quiescent, and gives up if it is late.
    fn continue_move(&mut self, now: Instant) {
        let Some(PendingMove { id, to, beside, until }) = self.rebalancer.pending else { return };
        let slot = self.slot_of(id).filter(|&slot| self.conns[slot].moving);
        let Some(slot) = slot else {
            self.rebalancer.pending = None; // it ends, or has ended
            return;
        };
        if self.workers[to].load.connections() > beside {
            self.rebalancer.pending = None;
            self.resume(slot); // another one arrived there first
        } else if self.conns[slot].is_quiescent() {
            self.rebalancer.pending = None;
            self.send_away(slot, to);
        } else if now >= until {
            self.rebalancer.pending = None;
            self.rebalancer.next_look = now + 10 * self.rebalancer.rules.period;
            debug!(conn = %id, to, "too busy to be moved");
            self.resume(slot);
        }
    }

    fn send_away(&mut self, slot: usize, to: usize) {
        let there = self.workers[to].clone();
        let id = self.conns[slot].id();
        if !there.load.reserve() {
            return self.resume(slot); // the receiver has stopped
        }
        if let Err(error) = epoll::delete(&self.epoll, &self.conns[slot].socket) {
            warn!(conn = %id, %error, "cannot stop watching a connection");
            there.load.release();
            return self.resume(slot);
        }
        let mut conn = self.conns.remove(slot);
        debug_assert!(conn.account.is_settled(), "its buffers are this worker's");
        if conn.blocked.take().is_some() {
            self.blocked.retain(|other| *other != id);
        }
        (conn.send_queued, conn.stalled) = (false, None); // its entry in the list of sendable ones finds nothing now
        conn.ctx.set_place(None);
        match there.give(Message::Adopt(Box::new(conn))) {
            Ok(()) => {
                debug!(conn = %id, to, "moved");
                self.load.release();
                self.moves.departed += 1;
            }
            Err(Message::Adopt(conn)) => {
                there.load.release(); // the receiver's thread has failed
                self.install(*conn);
            }
            Err(_) => unreachable!("the refused message comes back"),
        }
    }

    /// Takes over a connection from another worker.
    pub(super) fn adopt(&mut self, conn: Box<Conn>) {
        self.moves.arrived += 1;
        conn.listed.set_worker(self.number);
        self.install(*conn);
    }

    fn install(&mut self, mut conn: Conn) {
        let id = conn.id();
        let entry = self.conns.vacant_entry();
        let slot = entry.key();
        conn.ctx.set_place(Some((self.number, slot)));
        conn.registered = conn.interest();
        let data = epoll::EventData::new_u64(id.to_bits());
        let watched = epoll::add(&self.epoll, &conn.socket, data, conn.registered);
        entry.insert(conn);
        if let Err(error) = watched {
            warn!(conn = %id, %error, "cannot watch a connection that arrived");
            self.close(id, &error.to_string());
        } else if self.stopping.is_some() {
            self.end(id);
        } else {
            self.resume(slot);
        }
    }

    /// Begins the requests of a connection again, first those that were received already.
    fn resume(&mut self, slot: usize) {
        let conn = &mut self.conns[slot];
        conn.moving = false;
        conn.block(BlockedOn::Own, &mut self.blocked, &mut self.sendable); // as if it had waited for a limit
        self.again = true;
    }
}

impl Conn {
    /// Whether the connection may be chosen for a move.
    fn is_movable(&self) -> bool {
        matches!(self.phase, Phase::Transmission(_)) && !self.moving
    }
}
