//! Connections that go from a busy worker to an idle one.
//!
//! ```text
//!  busy worker: begins no request of it ─► all it asked for is answered ─► Message::Move ─► idle worker
//! ```
//!
//! A connection that has nothing in flight is a socket, what was received of its next requests, and its
//! places on the lists: no buffer and no operation of its worker. Then the whole [`Conn`] goes by message.
//! The new worker notes itself in its [context](crate::contexts::Connection), so that what is left of it
//! elsewhere (an event, a place on a list) finds nothing.
//!
//! A busy worker looks periodically at how much the others have worked; an idle worker does nothing. A worker is
//! busy while it does not wait: it works, is kept from its CPU, or blocks, and each is a reason to give
//! connections away. It gives the connection that leaves the busier of the two workers the least busy, and keeps
//! a single busy connection. Only busy workers give and only idle ones receive, so no connection comes back at the
//! next look. A worker that has just received one receives no other, so several busy workers do not overload it.
//!
//! Measured with two workers on two CPUs, and two clients that came to the same one and read 4 KiB from the
//! cache, 32 at a time: 410 000 reads a second without this, 860 000 with it; and 126 000 and 181 000 where
//! the clients are fio, which needs the CPUs itself.

use std::time::{Duration, Instant};

use radix_ctx::Id;
use rustix::event::epoll;
use tracing::{debug, warn};

use super::{Inbox, Message, Worker};
use crate::conn::{Conn, Phase, Wait};

/// When a connection is moved. All guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// How often a busy worker looks, and so gives one away at most.
    pub(super) period: Duration,
    /// A connection that is not ready to go by then stays, and none is tried for ten times the period.
    pub(super) patience: Duration,
    /// Parts of a period: a worker that works more gives, one that works less receives,
    pub(super) busy: f64,
    pub(super) idle: f64,
    /// and by so much the busier of the two has to become less busy.
    pub(super) gain: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            period: Duration::from_millis(100),
            patience: Duration::from_millis(50),
            busy: 0.75,
            idle: 0.25,
            gain: 1.0 / 32.0,
        }
    }
}

/// How often the worker checks whether a connection that is to leave has become ready, or late.
const TICK: Duration = Duration::from_millis(5);

/// Connections that came from and went to other workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    pub(crate) came: u64,
    pub(crate) left: u64,
}

/// What a worker knows of the others.
pub(super) struct Balance {
    /// All, itself as well.
    workers: Vec<Inbox>,
    /// What each was at the last look.
    seen: Vec<Seen>,
    looked: Instant,
    next_look: Instant,
    leaving: Option<Leaving>,
    pub(super) rules: Rules,
}

/// What was seen of a worker.
#[derive(Clone, Copy, Default)]
struct Seen {
    worked: u64,
    connections: usize,
}

/// The connection that is about to leave.
#[derive(Clone, Copy)]
struct Leaving {
    id: Id,
    to: usize,
    /// Connections that were there.
    beside: usize,
    until: Instant,
}

impl Balance {
    pub(super) fn new(workers: Vec<Inbox>) -> Self {
        let (seen, now) = (vec![Seen::default(); workers.len()], Instant::now());
        let (leaving, rules) = (None, Rules::default());
        Self { workers, seen, looked: now, next_look: now, leaving, rules }
    }

    /// How soon to look again.
    pub(super) fn tick(&self) -> Option<Duration> {
        self.leaving.is_some().then_some(TICK)
    }

    /// Returns the least busy of the other workers, and how busy this worker and that one were since the last
    /// look, as parts of that time.
    fn look(&mut self, own: usize, now: Instant) -> Option<(usize, f64, f64)> {
        let time = now.duration_since(self.looked).as_nanos() as f64;
        self.looked = now;
        let (mut here, mut best) = (0.0, None);
        for (number, (Inbox { load, .. }, seen)) in
            self.workers.iter().zip(&mut self.seen).enumerate()
        {
            let is = Seen { worked: load.busy_nanos(), connections: load.connections() };
            let was = std::mem::replace(seen, is);
            let part = is.worked.wrapping_sub(was.worked) as f64 / time;
            // What has come is not in that figure, nor what is not over.
            let more = is.connections > was.connections;
            let stands = is.worked == was.worked && load.is_running();
            if number == own {
                here = part;
            } else if !more && !stands && best.is_none_or(|(_, least)| part < least) {
                best = Some((number, part));
            }
        }
        best.map(|(number, there)| (number, here, there))
    }
}

/// Of connections with what each has cost, the one to give away: with which the busier of the two workers
/// is the least busy, if that is a gain.
fn choose<T>(
    (here, there): (f64, f64),
    costs: impl Iterator<Item = (T, u64)> + Clone,
    gain: f64,
) -> Option<T> {
    let all: u64 = costs.clone().map(|(_, cost)| cost).sum();
    let busier = |cost: u64| {
        let goes = here * cost as f64 / all as f64;
        (here - goes).max(there + goes)
    };
    let (best, after) = costs
        .filter(|&(_, cost)| cost > 0)
        .map(|(conn, cost)| (conn, busier(cost)))
        .min_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (after <= here - gain).then_some(best)
}

impl Worker {
    /// At the begin of a round, which is of interest only to others.
    pub(super) fn begin_to_work(&self) -> Option<Instant> {
        (self.balance.workers.len() > 1).then(|| {
            self.load.begin_round();
            Instant::now()
        })
    }

    /// At the end of a round: says how long it took, and has a connection leave where that helps.
    pub(super) fn look_at_loads(&mut self, woke: Instant) {
        let now = Instant::now();
        self.load.end_round(now.duration_since(woke));
        if self.balance.leaving.is_some() {
            self.go_on_leaving(now);
        } else if now >= self.balance.next_look {
            self.balance.next_look = now + self.balance.rules.period;
            let looked = self.balance.look(self.number, now);
            let Rules { busy, idle, gain, .. } = self.balance.rules;
            if let Some((to, here, there)) = looked {
                if here > busy && there < idle && self.stopping.is_none() {
                    let costs = self.conns.iter().filter(|(_, conn)| conn.may_be_moved());
                    let costs = costs.map(|(_, conn)| (conn.id(), conn.cost));
                    if let Some(id) = choose((here, there), costs, gain) {
                        self.begin_to_leave(id, to);
                    }
                }
            }
            self.conns.iter_mut().for_each(|(_, conn)| conn.cost = 0);
        }
    }

    /// From now on no request of the connection is begun, until it is with the other worker, or stays
    /// after all.
    pub(super) fn begin_to_leave(&mut self, id: Id, to: usize) {
        let busy = self.balance.leaving.is_some() || self.stopping.is_some();
        let Some(slot) = self.slot_of(id).filter(|_| !busy && to != self.number) else { return };
        let conn = &mut self.conns[slot];
        if !conn.may_be_moved() {
            return;
        }
        conn.leaving = true;
        conn.mark_dirty(&mut self.dirty); // so that epoll hears that no input is wanted
        self.again = true;
        let now = Instant::now();
        let beside = self.balance.workers[to].load.connections();
        let until = now + self.balance.rules.patience;
        self.balance.leaving = Some(Leaving { id, to, beside, until });
        self.go_on_leaving(now);
    }

    /// Gives the connection away if it is ready, and gives that up if it is late.
    fn go_on_leaving(&mut self, now: Instant) {
        let Some(Leaving { id, to, beside, until }) = self.balance.leaving else { return };
        let slot = self.slot_of(id).filter(|&slot| self.conns[slot].leaving);
        let Some(slot) = slot else {
            self.balance.leaving = None; // it ends, or has ended
            return;
        };
        if self.balance.workers[to].load.connections() > beside {
            self.balance.leaving = None;
            self.go_on_with(slot); // another was first
        } else if self.conns[slot].may_leave() {
            self.balance.leaving = None;
            self.give_away(slot, to);
        } else if now >= until {
            self.balance.leaving = None;
            self.balance.next_look = now + 10 * self.balance.rules.period;
            debug!(conn = %id, to, "too busy to be moved");
            self.go_on_with(slot);
        }
    }

    fn give_away(&mut self, slot: usize, to: usize) {
        let there = self.balance.workers[to].clone();
        let id = self.conns[slot].id();
        if !there.load.reserve() {
            return self.go_on_with(slot); // that one has stopped
        }
        if let Err(error) = epoll::delete(&self.epoll, &self.conns[slot].socket) {
            warn!(conn = %id, %error, "cannot let go of a connection");
            there.load.release();
            return self.go_on_with(slot);
        }
        let mut conn = self.conns.remove(slot);
        debug_assert!(conn.account.is_settled(), "the buffers stay here");
        if conn.blocked.take().is_some() {
            self.blocked.retain(|other| *other != id);
        }
        (conn.dirty, conn.stalled) = (false, None); // a place on the list of dirty ones leads nowhere now
        conn.ctx.set_place(None);
        match there.give(Message::Move(Box::new(conn))) {
            Ok(()) => {
                debug!(conn = %id, to, "moved");
                self.load.release();
                self.moves.left += 1;
            }
            Err(Message::Move(conn)) => {
                there.load.release(); // its thread has failed
                self.settle_in(*conn);
            }
            Err(_) => unreachable!("what was sent comes back"),
        }
    }

    /// A connection comes from another worker.
    pub(super) fn adopt(&mut self, conn: Box<Conn>) {
        self.moves.came += 1;
        conn.listed.set_worker(self.number);
        self.settle_in(*conn);
    }

    fn settle_in(&mut self, mut conn: Conn) {
        let id = conn.id();
        let entry = self.conns.vacant_entry();
        let slot = entry.key();
        conn.ctx.set_place(Some((self.number, slot)));
        conn.told = conn.interest();
        let data = epoll::EventData::new_u64(id.to_bits());
        let watched = epoll::add(&self.epoll, &conn.socket, data, conn.told);
        entry.insert(conn);
        if let Err(error) = watched {
            warn!(conn = %id, %error, "cannot watch a connection that came");
            self.close(id, &error.to_string());
        } else if self.stopping.is_some() {
            self.end(id);
        } else {
            self.go_on_with(slot);
        }
    }

    /// Its requests are begun again, first those that were received.
    fn go_on_with(&mut self, slot: usize) {
        let conn = &mut self.conns[slot];
        conn.leaving = false;
        conn.block(Wait::Own, &mut self.blocked, &mut self.dirty); // as if it had waited for a limit
        self.again = true;
    }
}

impl Conn {
    /// Whether it is one of those that may go to another worker.
    fn may_be_moved(&self) -> bool {
        matches!(self.phase, Phase::Transmission(_)) && !self.leaving
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(here: f64, there: f64, costs: &[u64]) -> Option<usize> {
        choose((here, there), costs.iter().copied().enumerate(), Rules::default().gain)
    }

    #[test]
    fn the_one_goes_that_leaves_both_least_busy() {
        assert_eq!(chosen(1.0, 0.0, &[50, 50]), Some(0));
        assert_eq!(chosen(1.0, 0.0, &[10, 20, 40, 30]), Some(2));
        assert_eq!(chosen(1.0, 0.2, &[10, 40, 20, 30]), Some(1));
        assert_eq!(chosen(1.0, 0.2, &[0, 70, 30]), Some(2), "of 70 the other would be as busy");
    }

    #[test]
    fn none_goes_where_little_is_gained() {
        assert_eq!(chosen(1.0, 0.0, &[]), None);
        assert_eq!(chosen(1.0, 0.0, &[0, 0]), None, "nobody asked for anything");
        assert_eq!(chosen(1.0, 0.0, &[100, 0]), None, "it would be as busy there");
        assert_eq!(chosen(1.0, 0.0, &[100, 1, 1]), None, "nor do those help that ask for little");
        assert_eq!(chosen(0.8, 0.79, &[50, 50]), None);
    }
}
