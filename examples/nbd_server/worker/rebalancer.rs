//! The rebalancer decides which connection moves from a busy worker to an idle one.
//!
//! A busy worker periodically compares how much time each worker spent in rounds; an idle worker
//! does nothing. A worker is busy while it does not wait: it works, is kept from its CPU, or
//! blocks, and each is a reason to move connections away. It moves the connection that makes the
//! busier of the two workers the least busy, and keeps a single busy connection. Only busy workers
//! send and only idle ones receive, so no connection comes back at the next comparison. A worker
//! that has just received one receives no other, so several busy workers do not overload it.
//!
//! Measured with two workers on two CPUs, and two clients that were placed on the same worker and
//! read 4 KiB from the cache, 32 at a time: 410 000 reads a second without rebalancing, 860 000
//! with it; and 126 000 and 181 000 where the clients are fio, which needs the CPUs itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use radix_ctx::Id;

use super::load::WorkerLoad;

/// When a connection is moved. All guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// How often a busy worker compares the loads. At most one connection moves each time.
    pub(super) period: Duration,
    /// A connection that is not quiescent by then stays, and no other is tried for ten periods.
    pub(super) patience: Duration,
    /// Parts of a period: a worker that is busy for longer sends, and one that is busy for less
    /// than `idle` receives.
    pub(super) busy: f64,
    pub(super) idle: f64,
    /// By so much the busier of the two must become less busy.
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

/// How often the worker checks whether the pending move is possible, or late.
const TICK: Duration = Duration::from_millis(5);

/// Connections that arrived from other workers, and departed to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MoveCounts {
    pub(crate) arrived: u64,
    pub(crate) departed: u64,
}

/// The loads of all workers as one of them last saw them, and its pending move.
pub(super) struct Rebalancer {
    /// Of all workers, this one among them.
    loads: Vec<Arc<WorkerLoad>>,
    /// The load of each at the last comparison.
    seen: Vec<Seen>,
    looked: Instant,
    pub(super) next_look: Instant,
    pub(super) pending: Option<PendingMove>,
    pub(super) rules: Rules,
}

/// The load of a worker at some time.
#[derive(Clone, Copy, Default)]
struct Seen {
    worked: u64,
    connections: usize,
}

/// The connection that is about to move.
#[derive(Clone, Copy)]
pub(super) struct PendingMove {
    pub(super) id: Id,
    pub(super) to: usize,
    /// Connections of the receiver when the move began.
    pub(super) beside: usize,
    pub(super) until: Instant,
}

impl Rebalancer {
    pub(super) fn new(loads: Vec<Arc<WorkerLoad>>) -> Self {
        let (seen, now) = (vec![Seen::default(); loads.len()], Instant::now());
        let (pending, rules) = (None, Rules::default());
        Self { loads, seen, looked: now, next_look: now, pending, rules }
    }

    /// How soon the worker must look at the pending move again.
    pub(super) fn tick(&self) -> Option<Duration> {
        self.pending.is_some().then_some(TICK)
    }

    /// Compares the loads of the workers. Returns the connection to move, of those with their costs,
    /// and the worker to move it to, if this worker is busy and another one is idle.
    pub(super) fn compare<T>(
        &mut self,
        own: usize,
        now: Instant,
        costs: impl Iterator<Item = (T, u64)> + Clone,
    ) -> Option<(T, usize)> {
        let Rules { period, busy, idle, gain, .. } = self.rules;
        self.next_look = now + period;
        let (to, here, there) = self.look(own, now)?;
        let moves = here > busy && there < idle;
        let chosen = moves.then(|| choose((here, there), costs, gain)).flatten();
        chosen.map(|chosen| (chosen, to))
    }

    /// Returns the least busy of the other workers, and how busy this worker and that one were
    /// since the last comparison, as parts of that time.
    fn look(&mut self, own: usize, now: Instant) -> Option<(usize, f64, f64)> {
        let time = now.duration_since(self.looked).as_nanos() as f64;
        self.looked = now;
        let (mut here, mut best) = (0.0, None);
        for (number, (load, seen)) in self.loads.iter().zip(&mut self.seen).enumerate() {
            let is = Seen { worked: load.busy_nanos(), connections: load.connections() };
            let was = std::mem::replace(seen, is);
            let part = is.worked.wrapping_sub(was.worked) as f64 / time;
            // The figure does not contain a connection that has just arrived, nor a round that goes
            // on.
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

/// Chooses the connection to move, from each connection's cost: the one whose move makes the busier
/// of the two workers the least busy, if that is a gain.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(here: f64, there: f64, costs: &[u64]) -> Option<usize> {
        choose((here, there), costs.iter().copied().enumerate(), Rules::default().gain)
    }

    #[test]
    fn the_connection_whose_move_helps_most_is_chosen() {
        assert_eq!(chosen(1.0, 0.0, &[50, 50]), Some(0));
        assert_eq!(chosen(1.0, 0.0, &[10, 20, 40, 30]), Some(2));
        assert_eq!(chosen(1.0, 0.2, &[10, 40, 20, 30]), Some(1));
        assert_eq!(chosen(1.0, 0.2, &[0, 70, 30]), Some(2), "of 70 the other would be as busy");
    }

    #[test]
    fn none_is_chosen_where_little_is_gained() {
        assert_eq!(chosen(1.0, 0.0, &[]), None);
        assert_eq!(chosen(1.0, 0.0, &[0, 0]), None, "none has sent a request");
        assert_eq!(chosen(1.0, 0.0, &[100, 0]), None, "it would be as busy there");
        assert_eq!(chosen(1.0, 0.0, &[100, 1, 1]), None, "the others cost too little to help");
        assert_eq!(chosen(0.8, 0.79, &[50, 50]), None);
    }
}
