//! A worker's own connection to an upstream, its lane, for reads without the detour through the
//! device's thread.
//!
//! ```text
//!  read_async ─► lane up, in the device's period? ─yes─► queue ─► connection ═══ upstream
//!                               └─no─► the device's thread ◄── error, loss, no reply ──┘
//! ```
//!
//! A worker has a lane for each device whose server shares its cache among connections. A lane
//! carries reads only, which are not in the journal. The device's thread repeats a read that fails
//! on a lane.
//!
//! A device's period ends when a connection or a lane is lost, or the device is poisoned. A lane is
//! used only in the period in which it began to connect, so its server has every answered change. A
//! lane that is lost, or cannot connect, is not tried again before the next period, nor before a
//! pause if it has answered nothing. A period begins:
//!
//! - after the loss of a connection: once the journal was sent again, because the server may have
//!   lost its changes;
//! - after the loss of a lane: once each connection has answered a probe. The journal is not sent:
//!   the loss of reads makes no change uncertain. But the loss may be the first sign that the
//!   server has ended. Then the connections are lost as well, and the device recovers, whichever
//!   loss is noticed first. A connection that answers a request sent after the loss still has its
//!   server, which has every change that it answered.
//!
//! A server may also end after the probes, or while a lane connects. So a new lane is used only
//! once the device has read through its thread in the same period: a connection that is up then was
//! up when the lane connected.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Instant;

use nbd_protocol::Connected;
use percpu::sync::spawn;
use rustix::event::epoll::{self, EventData, EventFlags};
use tracing::debug;

use super::connection::{Attempts, Connection, Request};
use super::error::UpstreamError;
use super::link::Link;
use super::operation::Operation;
use super::shared::{DEPTH, Event, Export, Shared};

thread_local! {
    static LANES: RefCell<Option<Local>> = const { RefCell::new(None) };
}

/// The lanes of one thread.
struct Local {
    epoll: Rc<OwnedFd>,
    lanes: Vec<Lane>,
}

/// Gives the calling thread lanes until it is dropped. The thread polls the descriptor, and calls
/// [`turn`](Self::turn) when it is readable.
pub(crate) struct Lanes {
    epoll: Rc<OwnedFd>,
    /// Not `Send`: the lanes belong to the thread that made it.
    _thread: PhantomData<*const ()>,
}

impl Lanes {
    /// Enables lanes for reads of this thread.
    ///
    /// # Errors
    ///
    /// The error of `epoll_create`.
    pub(crate) fn start() -> io::Result<Self> {
        let epoll = Rc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        LANES.set(Some(Local { epoll: Rc::clone(&epoll), lanes: Vec::new() }));
        Ok(Self { epoll, _thread: PhantomData })
    }

    /// Sends the reads that began since the last call.
    pub(crate) fn send(&self) {
        self.each(Lane::send);
    }

    /// Receives a bounded amount from each lane. Returns whether more may be available: the
    /// descriptor does not report bytes that TLS has received.
    pub(crate) fn turn(&self) -> bool {
        let more = Cell::new(false);
        self.each(|lane, epoll| more.set(lane.receive(epoll) | more.get()));
        more.get()
    }

    /// Gives up lanes whose server has not replied in time.
    pub(crate) fn expire(&self, now: Instant) {
        self.each(|lane, _| lane.expire(now));
    }

    /// Requests without replies. While there are any, [`expire`](Self::expire) must be called
    /// periodically.
    pub(crate) fn in_flight(&self) -> usize {
        LANES.with_borrow(|own| own.iter().flat_map(|own| &own.lanes).map(Lane::in_flight).sum())
    }

    fn each(&self, act: impl Fn(&mut Lane, &OwnedFd)) {
        LANES.with_borrow_mut(|own| {
            own.iter_mut().flat_map(|own| &mut own.lanes).for_each(|lane| act(lane, &self.epoll));
        });
    }
}

impl AsFd for Lanes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        LANES.set(None);
    }
}

/// Begins a read on the calling thread's lane. Returns the operation if the lane is not up.
pub(super) fn begin(
    shared: &Arc<Shared>,
    export: Export,
    operation: Operation,
) -> Result<(), Operation> {
    let period = shared.period();
    if period == 0 {
        return Err(operation);
    }
    LANES.with_borrow_mut(|own| {
        let Some(Local { epoll, lanes }) = own else { return Err(operation) };
        let at = lanes.iter().position(|lane| Arc::ptr_eq(&lane.shared, shared));
        let at = at.unwrap_or_else(|| {
            lanes.push(Lane::new(Arc::clone(shared), export));
            lanes.len() - 1
        });
        lanes[at].begin(period, epoll, operation)
    })
}

enum State {
    Down,
    /// A thread connects, and sends the result.
    Connecting(Receiver<Result<(Link, Connected), UpstreamError>>),
    Up(Box<Connection>),
}

struct Lane {
    shared: Arc<Shared>,
    export: Export,
    state: State,
    /// The device's period when the lane began to connect; 0 if it never did.
    period: u64,
    attempts: Attempts,
    /// The lane does not connect before this time.
    pause: Instant,
    queue: VecDeque<Operation>,
    next_cookie: u64,
    /// The events registered with epoll.
    registered: EventFlags,
}

impl Lane {
    fn new(shared: Arc<Shared>, export: Export) -> Self {
        Self {
            shared,
            export,
            state: State::Down,
            period: 0,
            attempts: Attempts::default(),
            pause: Instant::now(),
            queue: VecDeque::new(),
            next_cookie: 1,
            registered: EventFlags::IN,
        }
    }

    fn in_flight(&self) -> usize {
        match &self.state {
            State::Up(connection) => connection.requests.len(),
            _ => 0,
        }
    }

    fn begin(
        &mut self,
        period: u64,
        epoll: &OwnedFd,
        operation: Operation,
    ) -> Result<(), Operation> {
        self.poll_connect(epoll);
        if self.period != period {
            self.give_up();
            if matches!(self.state, State::Down) && Instant::now() >= self.pause {
                self.connect(period);
            }
        }
        match self.state {
            State::Up(_) => self.queue.push_back(operation),
            _ => return Err(operation),
        }
        Ok(())
    }

    /// Starts a thread to connect, because that may block.
    fn connect(&mut self, period: u64) {
        self.period = period;
        let (sender, receiver) = mpsc::channel();
        let (shared, unit) = (Arc::clone(&self.shared), u64::from(self.export.min_block));
        let connect = move || {
            let made = Link::connect(&shared.address, false);
            // A lost server is noticed only when a connection is used. If a connection of the
            // device is up now, it was up when the lane connected, so both have the same server.
            let is_same = || shared.probe(0..unit).is_ok() && shared.period() == period;
            let made =
                made.and_then(|made| if is_same() { Ok(made) } else { Err(UpstreamError::Closed) });
            let _ = sender.send(made); // fails if the worker has ended
        };
        match spawn("upstream-connect".into(), connect) {
            Ok(_) => self.state = State::Connecting(receiver),
            Err(error) => debug!(%error, "no thread to connect to the upstream"),
        }
    }

    /// Takes the new connection if it is ready.
    fn poll_connect(&mut self, epoll: &OwnedFd) {
        let State::Connecting(connecting) = &self.state else { return };
        let result = match connecting.try_recv() {
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err(UpstreamError::Closed),
            Ok(result) => result,
        };
        let result = result.and_then(|(link, connected)| {
            self.export.check(&connected)?;
            epoll::add(epoll, &link, EventData::new_u64(0), EventFlags::IN)
                .map_err(|error| UpstreamError::Socket(error.into()))?;
            Ok(Connection::new(link, &connected))
        });
        self.registered = EventFlags::IN;
        self.state = match result {
            Ok(connection) => State::Up(Box::new(connection)),
            Err(error) => {
                debug!(upstream = %self.shared.address, %error, "a worker has no connection of its own");
                State::Down
            }
        };
    }

    fn send(&mut self, epoll: &OwnedFd) {
        let State::Up(connection) = &mut self.state else { return };
        if self.shared.period() != self.period {
            return self.give_up();
        }
        if self.queue.is_empty() && !connection.wants_to_send() {
            return;
        }
        while connection.requests.len() < DEPTH.1 {
            let Some(operation) = self.queue.pop_front() else { break };
            let request = self.export.request(self.next_cookie, operation, &mut self.queue);
            self.next_cookie += 1;
            connection.push(request, false);
            // Ordering: Relaxed, both; statistics counters.
            self.shared.stats.requests.fetch_add(1, Ordering::Relaxed);
            self.shared.stats.lane_requests.fetch_add(1, Ordering::Relaxed);
        }
        let mut sent = connection.send();
        let mut wanted = EventFlags::IN;
        wanted.set(EventFlags::OUT, connection.wants_to_send());
        if wanted != self.registered {
            self.registered = wanted;
            let modified = epoll::modify(epoll, &connection.link, EventData::new_u64(0), wanted);
            sent = sent.and(modified.map_err(|error| UpstreamError::Socket(error.into())));
        }
        if let Err(error) = sent {
            self.lose(error);
        }
    }

    /// Receives a bounded amount, so that the worker's clients get their turn. Returns whether more
    /// may be available.
    fn receive(&mut self, epoll: &OwnedFd) -> bool {
        let State::Up(connection) = &mut self.state else { return false };
        let mut ended = Vec::new();
        let received = connection.receive(&mut ended);
        let received_more = matches!(received, Ok(true));
        // A connection was lost in the meantime, so the server may have lost changes before it
        // read.
        let is_past = self.shared.period() != self.period;
        for request in ended {
            if is_past || request.error.is_some() {
                request.operations.into_iter().for_each(|operation| self.shared.submit(operation));
            } else {
                self.answered(request);
            }
        }
        match received {
            Err(error) => self.lose(error),
            Ok(_) => self.send(epoll), // the rest of long reads, and queued reads
        }
        received_more
    }

    fn answered(&mut self, request: Request) {
        for mut operation in request.operations.into_iter().rev() {
            operation.done = request.range.end.min(operation.range().end) - operation.offset;
            match operation.done < operation.len {
                true => self.queue.push_front(operation),
                false => operation.finish(Ok(())),
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        let State::Up(connection) = &self.state else { return };
        let limit = self.shared.options.reply;
        if connection.oldest().is_some_and(|sent| now >= sent + limit) {
            self.lose(UpstreamError::NoReply(limit.as_secs()));
        }
    }

    fn lose(&mut self, why: UpstreamError) {
        if let State::Up(connection) = &self.state {
            self.pause = Instant::now() + self.attempts.lost(connection);
        }
        self.shared.tell(Event::LaneLost(self.period, why));
        self.give_up();
    }

    /// Closes the connection. The device's thread repeats the unanswered reads.
    fn give_up(&mut self) {
        if !matches!(self.state, State::Up(_)) {
            return;
        }
        let State::Up(connection) = std::mem::replace(&mut self.state, State::Down) else { return };
        let sent = connection.requests.into_values().flat_map(|request| request.operations);
        let deadline = Instant::now() + self.shared.options.reconnect;
        for mut operation in sent {
            operation.deadline.get_or_insert(deadline);
            // Ordering: Relaxed; a statistics counter.
            self.shared.stats.resent.fetch_add(1, Ordering::Relaxed);
            self.shared.submit(operation);
        }
        self.queue.drain(..).for_each(|operation| self.shared.submit(operation));
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let State::Up(connection) = &mut self.state {
            connection.disconnect();
        }
    }
}
