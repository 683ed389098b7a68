//! How the device's thread connects, and recovers from lost connections.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nbd_protocol::Connected;
use percpu::sync::spawn;
use tracing::{error, info, warn};

use super::super::connection::{Attempts, Connection};
use super::super::error::UpstreamError;
use super::super::journal::Content;
use super::super::link::Link;
use super::super::operation::{Kind, Operation, Target};
use super::super::shared::Event;
use super::{Driver, Recovery, Slot};

impl Driver {
    /// Starts threads to connect the slots whose pause is over.
    pub(super) fn reconnect(&mut self, now: Instant) {
        for slot in 0..self.slots.len() {
            if matches!(self.slots[slot], Slot::Pause(until) if until <= now) {
                self.connect(slot, None, Duration::ZERO);
            }
        }
    }

    /// Starts a thread that drains the old connection of a slot, pauses, and makes a new
    /// connection.
    fn connect(&mut self, slot: usize, old: Option<Link>, pause: Duration) {
        let (shared, address) = (Arc::clone(&self.shared), self.shared.address.clone());
        let drains = old.is_some();
        let started = spawn("upstream-connect".into(), move || {
            if let Some(old) = old {
                old.drain();
                shared.tell(Event::Drained);
            }
            std::thread::sleep(pause);
            shared.tell(Event::Connected(slot, Link::connect(&address, slot == 0)));
        });
        self.slots[slot] = match started {
            Ok(_) => Slot::Connecting,
            Err(error) => {
                warn!(%error, "no thread to connect to the upstream");
                self.draining -= usize::from(drains); // the failed spawn closed it
                Slot::Pause(Instant::now() + Attempts::LONGEST)
            }
        };
        if drains {
            self.draining += usize::from(matches!(self.slots[slot], Slot::Connecting));
        }
    }

    pub(super) fn connected(
        &mut self,
        slot: usize,
        result: Result<(Link, Connected), UpstreamError>,
    ) {
        let result = result.and_then(|(link, connected)| {
            self.export.check(&connected)?;
            Ok(Box::new(Connection::new(link, &connected)))
        });
        self.slots[slot] = match result {
            Ok(connection) => {
                // Ordering: Relaxed; a statistics counter.
                self.shared.stats.connects.fetch_add(1, Ordering::Relaxed);
                Slot::Up(connection)
            }
            Err(error) => {
                let (attempt, pause) = self.attempts[slot].failed();
                if attempt.is_power_of_two() {
                    warn!(upstream = %self.shared.address, slot, attempt, %error, "no connection");
                }
                Slot::Pause(Instant::now() + pause)
            }
        };
    }

    /// Fails an operation. A flush that fails poisons the device, because the changes that it
    /// covers may be lost.
    pub(super) fn fail(&mut self, operation: Operation, errno: i32) {
        if operation.kind == Kind::Flush {
            self.flushes_itself &= !matches!(operation.target, Target::Own);
            self.poison(errno);
        }
        operation.finish(Err(errno));
    }

    /// Poisons the device: changes, flushes, and reads of unflushed bytes fail from now on.
    pub(super) fn poison(&mut self, errno: i32) {
        if self.poisoned.is_some() {
            return;
        }
        error!(upstream = %self.shared.address, errno, "changes since the last flush may be lost");
        self.poisoned = Some(errno);
        self.shared.set_period(0);
        // Ordering: Relaxed; a statistics flag.
        self.shared.stats.poisoned.store(true, Ordering::Relaxed);
        for operation in std::mem::take(&mut self.queue) {
            match self.refusal(&operation) {
                Some(errno) => operation.finish(Err(errno)),
                None => self.queue.push_back(operation),
            }
        }
    }

    /// Drops a connection. The requests that it had in flight are sent again, after the journal.
    pub(super) fn lose(&mut self, slot: usize, why: &UpstreamError) {
        let now = Instant::now();
        let Slot::Up(connection) = std::mem::replace(&mut self.slots[slot], Slot::Pause(now))
        else {
            return;
        };
        let pause = self.attempts[slot].lost(&connection);
        let Connection { link, requests, .. } = *connection;
        let mut requests: Vec<_> = requests.into_values().collect();
        requests.sort_unstable_by_key(|request| std::cmp::Reverse(request.cookie));
        for operation in
            requests.into_iter().flat_map(|request| request.operations.into_iter().rev())
        {
            self.resend(operation, now);
        }
        self.connect(slot, Some(link), pause);
        self.recover_from_loss();
        self.count_loss(slot, why);
    }

    pub(super) fn count_loss(&self, connection: impl Display, why: &UpstreamError) {
        warn!(upstream = %self.shared.address, %connection, error = %why, "a connection is lost");
        let stats = &self.shared.stats;
        // Ordering: Release, pairs with the Acquire in `stats`: a thread that sees the loss counted
        // also sees that the period has ended.
        stats.losses.fetch_add(1, Ordering::Release);
        // Ordering: Relaxed; a statistics counter.
        stats.protocol_errors.fetch_add(u64::from(why.is_protocol_error()), Ordering::Relaxed);
    }

    /// Ends the period, and starts probes: the next period begins once each connection has answered
    /// a request sent after the loss. See [`lane`](super::super::lane). The journal is not sent
    /// again, because a lane sends no changes.
    pub(super) fn lane_lost(&mut self, period: u64, why: &UpstreamError) {
        // In a later period an earlier loss has been handled, and covers this one.
        if period == self.shared.period() {
            self.shared.set_period(0);
            self.probe();
        }
        self.count_loss("lane", why);
    }

    fn probe(&mut self) {
        self.probing = 0;
        for slot in 0..self.slots.len() {
            let Slot::Up(connection) = &mut self.slots[slot] else { continue };
            let range = 0..u64::from(self.export.min_block);
            let probe = Operation::new(Kind::Read, range, Target::Probe);
            let mut request = self.export.request(self.next_cookie, probe, &mut VecDeque::new());
            request.epoch = self.epoch;
            connection.push(request, false);
            self.next_cookie += 1;
            self.probing += 1;
            // Ordering: Relaxed; a statistics counter.
            self.shared.stats.requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a connection that has answered its probe. No connection was lost since the probe was
    /// sent.
    pub(super) fn probe_answered(&mut self) {
        self.probing -= 1;
        if self.probing == 0 {
            self.begin_period();
        }
    }

    /// Begins a period, in which workers may use lanes, if the server shares its cache among
    /// connections.
    fn begin_period(&mut self) {
        if self.slots.len() > 1 && self.poisoned.is_none() {
            self.periods += 1;
            self.shared.set_period(self.periods);
        }
    }

    /// Begins a recovery: the journal is sent before anything else.
    pub(super) fn recover_from_loss(&mut self) {
        self.epoch += 1;
        self.shared.set_period(0);
        self.outage.get_or_insert_with(Instant::now);
        self.recovery = Some(Recovery::Waiting);
        // The server may have lost parts that it answered.
        self.queue.iter_mut().for_each(|operation| operation.done = 0);
        if self.journal.has_dropped_bytes() {
            self.poison(libc::EIO);
        }
    }

    pub(super) fn resend(&mut self, mut operation: Operation, now: Instant) {
        // A replayed change is still in the journal. A probe asked about the lost connection only.
        if let Target::Replay(_) | Target::Probe = operation.target {
            return;
        }
        // Ordering: Relaxed; a statistics counter.
        self.shared.stats.resent.fetch_add(1, Ordering::Relaxed);
        let deadline = *operation.deadline.get_or_insert(now + self.options.reconnect);
        match self.refusal(&operation) {
            Some(errno) => operation.finish(Err(errno)),
            None if deadline <= now => self.fail(operation, libc::ENOTCONN),
            None => self.queue.push_front(operation),
        }
    }

    /// Sends the journal once no change is in flight, no connection drains, and one is up. Ends the
    /// recovery once every change of the journal was answered.
    pub(super) fn recover(&mut self) {
        match self.recovery.take() {
            None => {}
            Some(Recovery::Waiting) => {
                if self.draining > 0 || self.changes_in_flight() || self.up().next().is_none() {
                    self.recovery = Some(Recovery::Waiting);
                    return;
                }
                let again = |(range, content)| {
                    let kind = match content {
                        Content::Zeros { no_hole } => Kind::Zeros { no_hole },
                        _ => Kind::Write { durable: false },
                    };
                    Operation::new(kind, range, Target::Replay(content))
                };
                let all: VecDeque<_> = match self.poisoned {
                    None => self.journal.all().map(again).collect(),
                    Some(_) => VecDeque::new(),
                };
                let count = all.len() as u64;
                // Ordering: Relaxed; a statistics counter.
                self.shared.stats.replayed.fetch_add(count, Ordering::Relaxed);
                info!(upstream = %self.shared.address, changes = count, "connected, sent again");
                self.recovery = Some(Recovery::Sending(all));
                self.recover();
            }
            Some(Recovery::Sending(mut all)) => {
                self.fill(&mut all);
                if all.is_empty() && !self.changes_in_flight() {
                    self.outage = None;
                    self.begin_period();
                } else {
                    self.recovery = Some(Recovery::Sending(all));
                }
            }
        }
    }
}
