//! The device's thread: it sends and receives, and decides which operations are sent again.
//!
//! ```text
//!  begin_*, read, write ─► inbox ─► queue ─► merged ─► connection 0..N ─► answered: journal, end
//!                                     ▲                     │ lost
//!                                     └─ unanswered requests ◄┘
//!  recovery: drain lost connections ─► connect ─► send the journal ─► send the queue
//! ```
//!
//! During recovery the thread sends only the journal. A read would see data without the journal's
//! changes, and an older change of the journal could overtake a new one. Recovery starts to send
//! once no change is in flight on any connection, and each lost connection has ended or its drain
//! timed out.
//! connection, and each lost connection has ended or was waited for.

mod recovery;

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nbd_protocol::{Connected, NbdError, TransmissionFlags as Flags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{error, warn};

use super::connection::{Attempts, Connection, Request};
use super::error::UpstreamError;
use super::journal::Journal;
use super::link::Link;
use super::operation::{Kind, Operation, Target};
use super::shared::{DEPTH, Event, Export, Shared, UpstreamOptions};

/// Unsent bytes of a connection above which it gets no more requests. A guess.
const BACKLOG: usize = 1 << 20;

/// One connection of the device.
enum Slot {
    Up(Box<Connection>),
    /// A thread drains the old connection, and makes the new one.
    Connecting,
    /// The thread connects again at this time.
    Pause(Instant),
}

/// The state of a recovery.
enum Recovery {
    /// A change is in flight, a lost connection drains, or no connection is up.
    Waiting,
    /// The changes of the journal that have not been sent again yet.
    Sending(VecDeque<Operation>),
}

/// See the [module](self).
pub(super) struct Driver {
    shared: Arc<Shared>,
    options: UpstreamOptions,
    export: Export,
    slots: Vec<Slot>,
    /// Failed attempts to connect since the last success, by slot.
    attempts: Vec<Attempts>,
    queue: VecDeque<Operation>,
    journal: Journal,
    recovery: Option<Recovery>,
    /// Lost connections that have not ended yet.
    draining: usize,
    /// When the outage began: the first loss since the last complete recovery.
    outage: Option<Instant>,
    /// The number of lost connections so far. A reply of a request from an earlier epoch proves
    /// nothing about the current server.
    epoch: u64,
    next_cookie: u64,
    flushes_itself: bool,
    poisoned: Option<i32>,
    /// The number of periods so far: see [`lane`](super::lane).
    periods: u64,
    /// Connections that have not answered their probe yet.
    probing: usize,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        options: UpstreamOptions,
        export: Export,
        first: (Link, &Connected),
        connections: usize,
    ) -> Self {
        let mut slots = vec![Slot::Up(Box::new(Connection::new(first.0, first.1)))];
        slots.resize_with(connections, || Slot::Pause(Instant::now()));
        Self {
            shared,
            export,
            attempts: vec![Attempts::default(); slots.len()],
            slots,
            queue: VecDeque::new(),
            journal: Journal::new(options.keep),
            options,
            recovery: None,
            draining: 0,
            outage: None,
            epoch: 0,
            next_cookie: 1,
            flushes_itself: false,
            poisoned: None,
            periods: 1, // begun with the device
            probing: 0,
        }
    }

    /// Runs until the device is dropped.
    pub(super) fn run(mut self) {
        let mut more = false;
        while !self.take_inbox() {
            let now = Instant::now();
            self.reconnect(now);
            self.expire(now);
            self.send();
            let wait = if more { Some(Duration::ZERO) } else { self.next_timer(now) };
            let ready = match self.wait(wait) {
                Ok(ready) => ready,
                Err(error) => {
                    error!(%error, "the upstream's thread cannot wait");
                    std::thread::sleep(Attempts::FIRST);
                    Vec::new()
                }
            };
            more = self.receive(&ready);
        }
        for slot in &mut self.slots {
            if let Slot::Up(connection) = slot {
                connection.disconnect();
            }
        }
    }

    /// Moves submitted operations to the queue, and handles events. Returns whether the device was
    /// dropped.
    fn take_inbox(&mut self) -> bool {
        let (operations, events, closing) = self.shared.take();
        for event in events {
            match event {
                Event::Drained => self.draining -= 1,
                Event::Connected(slot, result) => self.connected(slot, result),
                Event::LaneLost(period, why) => self.lane_lost(period, &why),
            }
        }
        for operation in operations {
            match self.refusal(&operation) {
                Some(errno) => operation.finish(Err(errno)),
                None => self.queue.push_back(operation),
            }
        }
        closing
    }

    /// Returns the error of an operation that must not be sent because the device is poisoned.
    fn refusal(&self, operation: &Operation) -> Option<i32> {
        let errno = self.poisoned?;
        match operation.kind {
            Kind::Status => None,
            Kind::Read => self.journal.overlaps(&operation.range()).then_some(libc::EIO),
            _ => Some(errno),
        }
    }

    fn up(&self) -> impl DoubleEndedIterator<Item = (usize, &Connection)> {
        self.slots.iter().enumerate().filter_map(|(slot, up)| match up {
            Slot::Up(connection) => Some((slot, &**connection)),
            _ => None,
        })
    }

    fn connection(&mut self, slot: usize) -> Option<&mut Connection> {
        match &mut self.slots[slot] {
            Slot::Up(connection) => Some(connection),
            _ => None,
        }
    }

    fn changes_in_flight(&self) -> bool {
        let mut requests = self.up().flat_map(|(_, connection)| connection.requests.values());
        requests.any(|request| request.kind.is_change())
    }

    /// Fails operations that have waited too long for a connection.
    fn expire(&mut self, now: Instant) {
        let Some(outage) = self.outage else { return };
        let end = outage + self.options.reconnect;
        let is_late = |operation: &Operation| now >= operation.deadline.unwrap_or(end).min(end);
        if !self.queue.iter().any(is_late) {
            return;
        }
        let (late, rest): (VecDeque<_>, _) = self.queue.drain(..).partition(is_late);
        self.queue = rest;
        warn!(upstream = %self.shared.address, operations = late.len(), "the upstream is gone: they fail");
        for operation in late {
            self.fail(operation, libc::ENOTCONN);
        }
    }

    /// Sends the journal during recovery, and the queue otherwise.
    fn send(&mut self) {
        self.recover();
        if self.recovery.is_none() {
            let mut queue = std::mem::take(&mut self.queue);
            self.fill(&mut queue);
            self.queue = queue;
        }
        for slot in 0..self.slots.len() {
            let sent = self.connection(slot).map_or(Ok(()), Connection::send);
            sent.unwrap_or_else(|error| self.lose(slot, &error));
        }
    }

    /// Assigns operations to connections until each has enough.
    fn fill(&mut self, queue: &mut VecDeque<Operation>) {
        let depth = if self.slots.len() > 1 { DEPTH.0 } else { DEPTH.1 };
        while !queue.is_empty() {
            let has_room = |connection: &Connection| {
                connection.requests.len() < depth && connection.backlog() < BACKLOG
            };
            // The first connection is chosen last: its replies are chunks, and it alone reports
            // extents.
            let found = match queue.front().map(|operation| operation.kind) {
                Some(Kind::Status) => self.up().next(),
                _ => self.up().rev().find(|(_, connection)| has_room(connection)),
            };
            let Some((slot, _)) = found else { return };
            let Some(operation) = queue.pop_front() else { return };
            let cookie = self.next_cookie;
            self.next_cookie += 1;
            let mut request = self.export.request(cookie, operation, queue);
            (request.epoch, request.covers) = (self.epoch, self.journal.next());
            let fua =
                request.kind == Kind::Write { durable: true } && self.export.has(Flags::SEND_FUA);
            let no_context = request.kind == Kind::Status;
            let Some(connection) = self.connection(slot) else { return };
            if no_context && connection.context.is_none() {
                for operation in request.operations {
                    operation.finish(Err(libc::EOPNOTSUPP));
                }
                continue;
            }
            connection.push(request, fua);
            // Ordering: Relaxed; a statistics counter.
            self.shared.stats.requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until a connection is ready, the inbox is not empty, or `most` has passed. Returns the
    /// slots that are readable.
    fn wait(&self, most: Option<Duration>) -> io::Result<Vec<usize>> {
        let mut polled = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let mut slots = Vec::with_capacity(self.slots.len());
        for (slot, connection) in self.up() {
            let sends =
                if connection.wants_to_send() { PollFlags::OUT } else { PollFlags::empty() };
            polled.push(PollFd::from_borrowed_fd(connection.link.as_fd(), PollFlags::IN | sends));
            slots.push(slot);
        }
        let most = most.map(|most| Timespec {
            tv_sec: most.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: most.subsec_nanos().into(),
        });
        match poll(&mut polled, most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let readable = |polled: &PollFd<'_>| {
            polled.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
        };
        if readable(&polled[0]) {
            // The count does not matter: `take` returns all entries.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
        let ready = slots.into_iter().zip(&polled[1..]).filter(|(_, polled)| readable(polled));
        Ok(ready.map(|(slot, _)| slot).collect())
    }

    /// Returns the time until the next deadline or attempt to connect.
    fn next_timer(&self, now: Instant) -> Option<Duration> {
        let pauses = self.slots.iter().filter_map(|slot| match slot {
            Slot::Pause(until) => Some(*until),
            _ => None,
        });
        let oldest = self.up().filter_map(|(_, connection)| connection.oldest());
        let replies = oldest.map(|sent| sent + self.options.reply);
        let outage = self.outage.filter(|_| !self.queue.is_empty());
        let outage = outage.into_iter().flat_map(|since| {
            let own = self.queue.iter().filter_map(|operation| operation.deadline).min();
            own.into_iter().chain([since + self.options.reconnect])
        });
        let next = pauses.chain(replies).chain(outage).min()?;
        // Some kernels round the timeout of poll down to milliseconds; a timeout of 0 would be a
        // busy loop.
        Some(next.saturating_duration_since(now).max(Duration::from_millis(1)))
    }

    /// Receives from the connections of `ready`, and drops connections whose replies are late.
    /// Returns whether more bytes may be available.
    fn receive(&mut self, ready: &[usize]) -> bool {
        let (mut more, mut ended) = (false, Vec::new());
        let now = Instant::now();
        for slot in 0..self.slots.len() {
            let limit = self.options.reply;
            let Some(connection) = self.connection(slot) else { continue };
            let received = match ready.contains(&slot) {
                true => connection.receive(&mut ended),
                false => Ok(false),
            };
            let late = || connection.oldest().is_some_and(|sent| now >= sent + limit);
            let received = match received {
                Ok(_) if late() => Err(UpstreamError::NoReply(limit.as_secs())),
                received => received,
            };
            let mut lost = received.map(|there| more |= there).err();
            for request in ended.drain(..) {
                // An operation whose reply arrived before the connection broke has ended.
                if let Err(request) = self.ended(request) {
                    lost.get_or_insert(UpstreamError::Shutdown);
                    if let Some(connection) = self.connection(slot) {
                        connection.requests.insert(request.cookie, *request);
                    }
                }
            }
            if let Some(error) = lost {
                self.lose(slot, &error);
            }
        }
        more
    }

    /// Ends a request that was answered. Returns the request if the server answers that it is
    /// shutting down: the connection is then lost, and the request is sent again.
    fn ended(&mut self, mut request: Request) -> Result<(), Box<Request>> {
        match request.error {
            Some(NbdError::Shutdown) => {
                request.error = None;
                return Err(Box::new(request));
            }
            // An error also proves that the connection is alive.
            _ if matches!(request.operations[..], [Operation { target: Target::Probe, .. }]) => {
                if request.epoch == self.epoch {
                    self.probe_answered();
                }
            }
            Some(_) if request.operations.len() > 1 && !request.is_flush_or_replay() => {
                // The error does not say which of the operations failed, so each is sent alone.
                for mut operation in request.operations.into_iter().rev() {
                    operation.alone = true;
                    self.queue.push_front(operation);
                }
            }
            Some(error) => {
                let errno = error.code() as i32;
                for operation in request.operations {
                    if let Target::Replay(_) = operation.target {
                        self.poison(errno);
                    }
                    self.fail(operation, errno);
                }
            }
            None if request.kind == Kind::Flush => {
                if request.epoch == self.epoch {
                    self.journal.flushed(request.covers);
                }
                for operation in request.operations.into_iter().rev() {
                    // A connection was lost since the request was sent, perhaps because the server
                    // has restarted. The reply does not say whether the flush covered the earlier
                    // changes.
                    if request.epoch != self.epoch {
                        self.resend(operation, Instant::now());
                        continue;
                    }
                    self.flushes_itself &= !matches!(operation.target, Target::Own);
                    operation.finish(self.poisoned.map_or(Ok(()), Err));
                }
            }
            None => {
                let end = request.range.end;
                for operation in request.operations {
                    self.answered(
                        Operation {
                            done: end.min(operation.range().end) - operation.offset,
                            ..operation
                        },
                        request.epoch,
                    );
                }
            }
        }
        Ok(())
    }

    /// Ends an operation, other than a flush, of which a request was answered. Queues what is left
    /// of the operation.
    fn answered(&mut self, mut operation: Operation, epoch: u64) {
        if operation.done < operation.len && operation.kind != Kind::Status {
            // The server may have lost a part that it answered before the loss of a connection.
            if epoch != self.epoch && operation.kind.is_change() {
                operation.done = 0;
            }
            match (&operation.target, &mut self.recovery) {
                (Target::Replay(_), Some(Recovery::Sending(all))) => all.push_front(operation),
                (Target::Replay(_), _) => {} // it is still in the journal
                _ => self.queue.push_front(operation),
            }
            return;
        }
        let flushes = self.export.has(Flags::SEND_FLUSH);
        if let (true, Some(content)) = (flushes, operation.content()) {
            let durable = operation.kind == Kind::Write { durable: true };
            if durable && self.export.has(Flags::SEND_FUA) && self.poisoned.is_none() {
                self.journal.remove(&operation.range());
            } else {
                self.journal.add(operation.range(), content);
                if durable && self.poisoned.is_none() {
                    operation.kind = Kind::Flush;
                    return self.queue.push_front(operation);
                }
            }
            if let Some(errno) = self.poisoned {
                return operation.finish(Err(errno));
            }
            if self.journal.wants_flush() && !self.flushes_itself {
                self.flushes_itself = true;
                self.queue.push_front(Operation::new(Kind::Flush, 0..0, Target::Own));
            }
        }
        operation.finish(Ok(()));
    }
}
