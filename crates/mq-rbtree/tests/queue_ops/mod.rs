//! Steps on a queue, with futures that wait, and checks of their results.
//!
//! On one thread the results are those of a model: a map from priority to FIFO, with the documented rules of
//! wake-ups. A waiting future that was woken has a permit. Threads that share a queue run the same steps, and
//! check that no message is lost.

pub(crate) mod bytes;
mod model;
pub(crate) mod watch;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::hint::spin_loop;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{
    Bitmap, Builder, Interest, Levels, MessageGuard, Queue, RbTree, Readiness, ReceiveError,
    SendError, SendRefused,
};

use crate::block_on; // that of the models, or testkit's
use model::{Model, Waiter};
use testkit::WakeCount;
use testkit::alloc::{Calls, refuse_first, thread_bytes};
use testkit::canary::{Canary, Census};
use watch::{fallbacks, watched};

/// Levels whose priorities are made of numbers, in the same order.
pub(crate) trait Keyed: Levels<Priority: Ord + Debug + Send + Sync> + 'static {
    fn key(n: u32) -> Self::Priority;

    fn is_key(_priority: Self::Priority) -> bool {
        true
    }

    /// Returns the most nodes that a queue with such limits keeps. A reservation keeps one node more than it
    /// needs, so that none is allocated when all are in use.
    fn most_kept(limits: &Limits) -> usize {
        limits.spare.max(if limits.no_alloc { limits.messages + 1 } else { 0 })
    }
}

impl Keyed for Bitmap {
    fn key(n: u32) -> u32 {
        n
    }

    fn is_key(priority: u32) -> bool {
        priority < mq_rbtree::PRIORITIES
    }

    fn most_kept(_: &Limits) -> usize {
        0
    }
}

impl Keyed for RbTree<u32> {
    fn key(n: u32) -> u32 {
        n
    }
}

/// The least number comes first.
impl Keyed for RbTree<Reverse<u64>> {
    fn key(n: u32) -> Reverse<u64> {
        Reverse(n.into())
    }
}

/// Priorities at the ends of words and of the range.
pub(crate) const EDGES: [u32; 14] =
    [0, 1, 2, 62, 63, 64, 65, 4_095, 4_096, 4_097, 32_703, 32_766, 32_767, 32_768];

/// A step. Its numbers are taken modulo the number of choices. Its first `refused` allocations are refused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Send { priority: u8, late: bool, refused: u8 },
    // Pauses between the claim of a slot and its publication, if the send goes through the ring.
    SendPaused { priority: u8, pause: u8 },
    Receive { late: bool },
    SendBatch { count: u8, priority: u8 },
    ReceiveBatch { most: u8 },
    DrainFilter { modulus: u8 },
    Drain,
    WaitToReceive,
    WaitToSend { priority: u8 },
    PollReceive { which: u8, other_waker: bool },
    PollSend { which: u8, other_waker: bool, refused: u8 },
    DropReceive { which: u8 },
    DropSend { which: u8 },
    Guard,
    AcceptGuard { which: u8 },
    DropGuard { which: u8 },
    // Clears a descriptor, which the first such step makes.
    Clear { writable: bool },
    Len,
    Close,
}

/// The limits of a queue.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) messages: usize,
    /// Edges and numbers of messages; the last ones are left out until there is room.
    pub(crate) reserves: Vec<(u8, u8)>,
    pub(crate) ageing: Option<u32>,
    pub(crate) no_alloc: bool,
    pub(crate) spare: usize,
    /// Whether only the last step is followed by a look at the whole queue, which drains the ring.
    pub(crate) quiet: bool,
}

impl Limits {
    /// Returns limits of which only the number of messages is set.
    #[allow(dead_code, reason = "the fuzz target needs none")]
    pub(crate) fn plain(messages: usize) -> Self {
        Self { messages, reserves: vec![], ageing: None, no_alloc: false, spare: 2, quiet: false }
    }

    fn reserves<L: Keyed>(&self) -> Vec<(L::Priority, usize)> {
        let mut kept = 0;
        let reserves = self.reserves.iter().map_while(|&(edge, messages)| {
            kept += usize::from(messages);
            // The last edge is not valid for every kind of levels.
            let edge = usize::from(edge) % (EDGES.len() - 1);
            (kept < self.messages).then(|| (L::key(EDGES[edge]), usize::from(messages)))
        });
        reserves.collect()
    }

    pub(crate) fn builder<L: Keyed>(&self) -> Builder<Message, L> {
        let mut builder = Builder::new(self.messages).spare_nodes(self.spare);
        for (from, messages) in self.reserves::<L>() {
            builder = builder.reserve(from, messages);
        }
        if let Some(every) = self.ageing {
            builder = builder.ageing(NonZeroU32::new(every).unwrap());
        }
        if self.no_alloc { builder.no_alloc() } else { builder }
    }
}

/// A message, which owns memory.
pub(crate) struct Message(Canary, #[expect(dead_code, reason = "it is freed")] Box<u8>);

impl Message {
    pub(crate) fn new(id: u64, census: &Census) -> Self {
        Self(Canary::new(id, census), Box::new(0))
    }

    fn read(&self) -> u64 {
        self.0.read()
    }
}

/// A message's priority and number.
pub(crate) type Numbered<L> = (<L as Levels>::Priority, u64);
pub(crate) type Sent = Result<(), SendRefused>;
pub(crate) type Got<L> = Result<Numbered<L>, ReceiveError>;

/// The result of a step, which a model, or the record of a thread, checks. A send, or receive, that is `late`
/// had a deadline. A future has a number, which is that of its message if it sends.
pub(crate) enum Outcome<'a, L: Keyed> {
    Sent {
        message: Numbered<L>,
        late: bool,
        result: Sent,
    },
    /// The first messages of a batch were sent, and the next one was refused, if there is one.
    SentBatch {
        batch: &'a [Numbered<L>],
        sent: usize,
        result: Sent,
    },
    Received {
        late: bool,
        got: Got<L>,
    },
    ReceivedBatch {
        most: usize,
        got: Result<Vec<Numbered<L>>, ReceiveError>,
    },
    Drained {
        wanted: &'a dyn Fn(u64) -> bool,
        out: Vec<Numbered<L>>,
    },
    PolledReceive(u64, Poll<Got<L>>),
    PolledSend(Numbered<L>, Poll<Sent>),
    DroppedReceive(u64),
    DroppedSend(u64),
    Guarded(Got<L>),
    Accepted(usize, Numbered<L>),
    PutBack(usize),
    Cleared(Interest),
    Len(usize),
    Closed(bool),
}

/// How a step waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "threads use some of them")]
pub(crate) enum Patience {
    /// Not at all: a deadline is over.
    No,
    /// Deadlines are some microseconds away.
    Brief,
    /// As `Forever`, but for single messages at a descriptor.
    Ready,
    /// Without a limit, unless the step has a deadline, which is some microseconds away.
    Forever,
}

struct Waiting<'q, I, R> {
    id: I,
    future: Pin<Box<dyn Future<Output = R> + 'q>>,
    flag: Arc<WakeCount>,
    seen: usize,
    old: Vec<(Arc<WakeCount>, usize)>,
}

impl<'q, I, R> Waiting<'q, I, R> {
    fn new(id: I, future: impl Future<Output = R> + 'q) -> Self {
        Self { id, future: Box::pin(future), flag: WakeCount::new(), seen: 0, old: Vec::new() }
    }

    fn poll(&mut self, other_waker: bool) -> Poll<R> {
        if other_waker {
            let old = std::mem::replace(&mut self.flag, WakeCount::new());
            let count = old.count();
            self.old.push((old, count));
        }
        self.seen = self.flag.count();
        let waker = self.flag.waker();
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    /// Returns whether the task was woken since its last poll; at most once. Its former wakers are dropped.
    fn was_woken(&self) -> bool {
        assert!(self.old.iter().all(|(flag, count)| flag.count() == *count), "another's waker");
        assert!(self.old.iter().all(|(flag, _)| Arc::strong_count(flag) == 1));
        let times = self.flag.count() - self.seen;
        assert!(times <= 1, "woken {times} times");
        times == 1
    }
}

type SendResult = Result<(), SendError<Message>>;
type Received<L> = Result<mq_rbtree::Received<Message, L>, ReceiveError>;

/// Receives a message in one of four ways, which wait alike.
async fn receive<L: Keyed>(queue: &Queue<Message, L>, way: u64) -> Received<L> {
    match way % 4 {
        0 => queue.receive_async().await,
        1 => Ok(queue.receive_guard_async().await?.accept()),
        2 => {
            let mut out = Vec::with_capacity(1);
            queue.receive_batch_async(&mut out, 1).await?;
            Ok(out.remove(0))
        }
        _ => receive_from_stream(queue).await,
    }
}

#[cfg(test)]
async fn receive_from_stream<L: Keyed>(queue: &Queue<Message, L>) -> Received<L> {
    let mut stream = std::pin::pin!(queue.stream());
    let next =
        std::future::poll_fn(|cx| futures_core::Stream::poll_next(stream.as_mut(), cx)).await;
    next.ok_or(ReceiveError::Closed)
}

/// The fuzz target has no streams.
#[cfg(not(test))]
async fn receive_from_stream<L: Keyed>(queue: &Queue<Message, L>) -> Received<L> {
    queue.receive_async().await
}

/// Runs steps on one thread, and compares the queue with the model after each.
pub(crate) fn run<L: Keyed>(limits: &Limits, steps: &[Step]) {
    let before = thread_bytes();
    let mut model = Model::<L>::new(limits);
    let queue = limits.builder::<L>().build().unwrap();
    let census = Census::new();
    {
        let mut runner = Runner::new(&queue, &census, 0, Patience::No);
        for &step in steps {
            if limits.quiet {
                runner.checked_step(step, &mut model);
            } else {
                runner.watched_step(step, &mut model);
            }
        }
        runner.check(&model);
    }
    queue.validate();
    drop(queue);
    assert_eq!(census.alive(), 0, "every message was dropped");
    drop((model, census));
    assert_eq!(thread_bytes(), before, "a leak");
}

/// One thread of a queue, with its futures and guards.
pub(crate) struct Runner<'q, L: Keyed> {
    queue: &'q Queue<Message, L>,
    census: &'q Census,
    thread: u64,
    patience: Patience,
    /// Whether a task may receive by a guard: the message leaves its place in a second step, the accept.
    pub(crate) has_guards: bool,
    /// The numbers so far of deadlines, of messages and futures together, and of lanes.
    deadlines: Cell<u64>,
    numbers: u64,
    lanes: u64,
    receives: Vec<Waiting<'q, u64, Received<L>>>,
    sends: Vec<Waiting<'q, Numbered<L>, SendResult>>,
    guards: Vec<MessageGuard<'q, Message, L>>,
    /// The descriptors for the directions.
    ready: [Option<Readiness<&'q Queue<Message, L>>>; 2],
}

/// Returns whether an event loop would wake.
pub(crate) fn is_readable(ready: &impl AsRawFd) -> bool {
    poll_readable(ready, 0)
}

fn poll_readable(ready: &impl AsRawFd, milliseconds: i32) -> bool {
    let mut poll = libc::pollfd { fd: ready.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one `pollfd` of this frame.
    unsafe { libc::poll(&mut poll, 1, milliseconds) == 1 }
}

fn pick(which: u8, of: usize) -> Option<usize> {
    (of > 0).then(|| usize::from(which) % of)
}

fn numbered<L: Keyed>((message, key): mq_rbtree::Received<Message, L>) -> Numbered<L> {
    (key, message.read())
}

/// Returns the reason why the message `id` comes back, if it does. `refused` of its allocations were refused.
#[track_caller]
fn reason(result: SendResult, id: u64, refused: usize) -> Sent {
    result.map_err(|SendError { value, reason }| {
        assert_eq!(value.read(), id, "the message comes back");
        let has_memory = refused < 2; // one refusal before the lock is made up for under it
        assert!(!has_memory || reason != SendRefused::NoMemory);
        reason
    })
}

impl<'q, L: Keyed> Runner<'q, L> {
    pub(crate) fn new(
        queue: &'q Queue<Message, L>,
        census: &'q Census,
        thread: u64,
        patience: Patience,
    ) -> Self {
        let (receives, sends, guards) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            queue,
            census,
            thread,
            patience,
            has_guards: true,
            deadlines: Cell::new(0),
            numbers: 0,
            lanes: 0,
            receives,
            sends,
            guards,
            ready: [None, None],
        }
    }

    /// Returns the next message's priority and number: its lane, the place of its priority in `EDGES`, and its
    /// serial. Each thread has a lane, and so has each of its futures, because their order is open.
    fn number(&mut self, priority: u8, waits: bool) -> Numbered<L> {
        self.numbers += 1;
        self.lanes += u64::from(waits);
        let lane = self.thread + if waits { self.lanes * 8 } else { 0 };
        let level = usize::from(priority) % EDGES.len();
        (L::key(EDGES[level]), lane << 40 | (level as u64) << 32 | self.numbers)
    }

    fn deadline(&self) -> Instant {
        let nth = self.deadlines.replace(self.deadlines.get() + 1);
        match self.patience {
            Patience::No => Instant::now() - Duration::from_secs(1),
            _ => Instant::now() + Duration::from_micros(nth * 37 % 300),
        }
    }

    pub(crate) fn step(&mut self, step: Step, check: &mut dyn FnMut(Outcome<'_, L>)) {
        let (queue, census) = (self.queue, self.census);
        let forever = matches!(self.patience, Patience::Forever | Patience::Ready);
        match step {
            Step::Send { priority, late, refused } => {
                let (key, id) = self.number(priority, false);
                let message = Message::new(id, census);
                let send = || match late {
                    true => queue.send_deadline(message, key, self.deadline()),
                    false if self.patience == Patience::Ready => self.send_at_events(message, key),
                    false if forever => queue.send(message, key),
                    false => queue.try_send(message, key),
                };
                let (sent, refused) = refuse_first(usize::from(refused % 6), send);
                let result = reason(sent, id, refused);
                check(Outcome::Sent { message: (key, id), late, result });
            }
            Step::SendPaused { priority, pause } => {
                let (key, id) = self.number(priority, false);
                let sent = match queue.claim(Message::new(id, census), key) {
                    Some(publish) => {
                        (0..2 * u32::from(pause)).for_each(|_| spin_loop());
                        if pause % 4 == 2 {
                            thread::yield_now();
                        }
                        publish();
                        Ok(())
                    }
                    None => queue.try_send(Message::new(id, census), key),
                };
                let result = reason(sent, id, 0);
                check(Outcome::Sent { message: (key, id), late: false, result });
            }
            Step::Receive { late } => {
                let received = match late {
                    true => queue.receive_deadline(self.deadline()),
                    false if self.patience == Patience::Ready => {
                        self.at_events(Interest::Readable, || match queue.try_receive() {
                            Err(ReceiveError::Empty) => None,
                            done => Some(done),
                        })
                    }
                    false if forever => queue.receive(),
                    false => queue.try_receive(),
                };
                check(Outcome::Received { late, got: received.map(numbered::<L>) });
            }
            Step::SendBatch { count, priority } => {
                let all: Vec<_> = (0..count % 80)
                    .map(|n| self.number(priority.wrapping_add(n / 3), false))
                    .collect();
                let message = |&(key, id): &Numbered<L>| (Message::new(id, census), key);
                let mut batch: VecDeque<_> = all.iter().map(message).collect();
                let result = match forever {
                    true => queue.send_batch(&mut batch),
                    false => queue.try_send_batch(&mut batch),
                };
                let sent = *result.as_ref().unwrap_or_else(|error| &error.sent);
                let rest = batch.iter().map(|(message, key)| (*key, message.read()));
                assert!(rest.eq(all[sent..].iter().copied()), "the rest stays");
                let result = result.map(drop).map_err(|error| error.reason);
                assert_eq!(result.is_ok(), batch.is_empty());
                check(Outcome::SentBatch { batch: &all, sent, result });
            }
            Step::ReceiveBatch { most } => {
                let (most, mut out) = (usize::from(most % 100), Vec::new());
                let got = match forever {
                    true => queue.receive_batch(&mut out, most),
                    false => queue.try_receive_batch(&mut out, most),
                };
                assert_eq!(*got.as_ref().unwrap_or(&0), out.len());
                let out = out.into_iter().map(numbered::<L>).collect();
                check(Outcome::ReceivedBatch { most, got: got.map(|_| out) });
            }
            Step::DrainFilter { modulus } => {
                let wanted = |id: u64| (id as u32).is_multiple_of(u32::from(modulus % 5) + 1);
                let mut seen = Vec::with_capacity(queue.max_messages());
                let out = queue.drain_filter(|message, key| {
                    seen.push(key);
                    wanted(message.read())
                });
                assert!(seen.is_sorted_by(|a, b| a >= b), "the highest first");
                let out = out.into_iter().map(numbered::<L>).collect();
                check(Outcome::Drained { wanted: &wanted, out });
            }
            Step::Drain => {
                let out = queue.drain().into_iter().map(numbered::<L>).collect();
                check(Outcome::Drained { wanted: &|_| true, out });
            }
            Step::WaitToReceive => {
                self.numbers += 1;
                let id = self.numbers;
                let received = receive(queue, if self.has_guards || id % 4 != 1 { id } else { 0 });
                if forever {
                    let got = block_on(received).map(numbered::<L>);
                    return check(Outcome::Received { late: false, got });
                }
                self.receives.push(Waiting::new(id, received));
                self.poll_receive(check, self.receives.len() - 1, false);
            }
            Step::WaitToSend { priority } => {
                let message @ (key, id) = self.number(priority, true);
                let future = queue.send_async(Message::new(id, census), key);
                if forever {
                    let result = reason(block_on(future), id, 0);
                    return check(Outcome::Sent { message, late: false, result });
                }
                self.sends.push(Waiting::new(message, future));
                self.poll_send(check, self.sends.len() - 1, false, 0);
            }
            Step::PollReceive { which, other_waker } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    self.poll_receive(check, which, other_waker);
                }
            }
            Step::PollSend { which, other_waker, refused } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    self.poll_send(check, which, other_waker, usize::from(refused % 6));
                }
            }
            Step::DropReceive { which } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    let Waiting { id, .. } = self.receives.swap_remove(which);
                    check(Outcome::DroppedReceive(id));
                }
            }
            Step::DropSend { which } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    let Waiting { id, .. } = self.sends.swap_remove(which);
                    check(Outcome::DroppedSend(id.1));
                }
            }
            Step::Guard => {
                let got = queue.try_receive_guard().map(|guard| {
                    self.guards.push(guard);
                    let guard = &self.guards[self.guards.len() - 1];
                    (guard.priority(), guard.read())
                });
                check(Outcome::Guarded(got));
            }
            Step::AcceptGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let message = self.guards.swap_remove(which).accept();
                    check(Outcome::Accepted(which, numbered::<L>(message)));
                }
            }
            Step::DropGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let guard = self.guards.swap_remove(which);
                    // The way back needs no memory.
                    let (_, refused) = refuse_first(usize::MAX, || drop(guard));
                    assert_eq!(refused, 0);
                    check(Outcome::PutBack(which));
                }
            }
            Step::Clear { writable } => {
                let interest = if writable { Interest::Writable } else { Interest::Readable };
                let ready = &mut self.ready[interest as usize];
                match ready {
                    Some(ready) => ready.clear(),
                    None => *ready = Some(Readiness::new(queue, interest).unwrap()),
                }
                check(Outcome::Cleared(interest));
            }
            Step::Len => check(Outcome::Len(queue.len())),
            Step::Close => check(Outcome::Closed(queue.close())),
        }
    }

    fn send_at_events(&mut self, message: Message, key: L::Priority) -> SendResult {
        let (queue, mut message) = (self.queue, Some(message));
        self.at_events(Interest::Writable, || match queue.try_send(message.take()?, key) {
            Err(SendError { value, reason: SendRefused::Full }) => {
                message = Some(value);
                None
            }
            done => Some(done),
        })
    }

    /// Repeats an operation at each event of the descriptor, until it is done.
    fn at_events<R>(&mut self, interest: Interest, mut operation: impl FnMut() -> Option<R>) -> R {
        let queue = self.queue;
        let ready = &mut self.ready[interest as usize];
        let ready = ready.get_or_insert_with(|| Readiness::new(queue, interest).unwrap());
        loop {
            if let Some(done) = operation() {
                return done;
            }
            while !poll_readable(ready, 1_000) {}
            ready.clear();
        }
    }

    fn poll_receive(
        &mut self,
        check: &mut dyn FnMut(Outcome<'_, L>),
        which: usize,
        other_waker: bool,
    ) {
        let waiting = &mut self.receives[which];
        let (id, polled) = (waiting.id, waiting.poll(other_waker));
        if polled.is_ready() {
            self.receives.swap_remove(which);
        }
        check(Outcome::PolledReceive(id, polled.map_ok(numbered::<L>)));
    }

    fn poll_send(
        &mut self,
        check: &mut dyn FnMut(Outcome<'_, L>),
        which: usize,
        other_waker: bool,
        most_refused: usize,
    ) {
        let waiting = &mut self.sends[which];
        let message = waiting.id;
        let (polled, refused) = refuse_first(most_refused, || waiting.poll(other_waker));
        if polled.is_ready() {
            self.sends.swap_remove(which);
        }
        let polled = polled.map(|result| reason(result, message.1, refused));
        check(Outcome::PolledSend(message, polled));
    }

    /// Runs a step, and compares its result and the wake-ups with the model.
    fn checked_step(&mut self, step: Step, model: &mut Model<L>) {
        self.step(step, &mut |outcome| model.check(outcome));
        self.check_wakes(model);
        self.check_ready(model);
    }

    /// Runs a step, and looks at the whole queue. Nothing is allocated or freed under the lock, unless an
    /// allocation before the lock was refused; the queue counts that.
    fn watched_step(&mut self, step: Step, model: &mut Model<L>) {
        let queue = self.queue;
        let before = fallbacks(&queue.stats());
        let held = watched(queue, || {
            self.checked_step(step, model);
            self.check(model);
        });
        let allocated = fallbacks(&queue.stats()) - before;
        let refused = match step {
            Step::Send { refused, .. } | Step::PollSend { refused, .. } => refused % 6,
            _ => 0,
        };
        match refused {
            0 => assert_eq!((held, allocated), (Calls::NONE, 0)),
            1 => assert_eq!(held, Calls { allocated, freed: 0 }),
            _ => assert_eq!(held.freed, 0), // the allocation under the lock may be refused as well
        }
    }

    /// Checks that the queue has woken the same tasks as the model.
    fn check_wakes(&self, model: &mut Model<L>) {
        model.wake_waiters();
        for waiting in &self.receives {
            let permit = model.receiver(waiting.id).permit;
            assert_eq!(waiting.was_woken(), permit, "receiver {}", waiting.id);
        }
        for waiting in &self.sends {
            let permit = model.sender(waiting.id.1).permit;
            assert_eq!(waiting.was_woken(), permit, "sender {}", waiting.id.1);
        }
    }

    /// Checks that a descriptor is readable since its step, if what it is for is there, or was in between.
    fn check_ready(&self, model: &mut Model<L>) {
        model.signal();
        for (ready, signalled) in self.ready.iter().zip(model.signalled) {
            assert!(ready.as_ref().is_none_or(|ready| is_readable(ready) == signalled));
        }
    }

    /// Checks that the queue agrees with the model.
    fn check(&self, model: &Model<L>) {
        let queue = self.queue;
        queue.validate();
        let stats = queue.stats();
        assert_eq!(stats.depth, model.len());
        assert_eq!(queue.len(), model.len());
        assert_eq!(queue.is_empty(), model.len() == 0);
        assert_eq!(queue.is_full(), model.taken() == model.limits.messages);
        assert_eq!((stats.sent, stats.received, stats.peak), model.counted());
        assert_eq!(stats.guarded, model.guarded.len());
        assert_eq!(stats.levels.live, model.levels());
        let kept = L::most_kept(&model.limits);
        assert!(stats.levels.kept <= kept, "{} kept", stats.levels.kept);
        let listed = (Waiter::listed(&model.senders), Waiter::listed(&model.receivers));
        assert_eq!(stats.waiting, listed);
    }
}
