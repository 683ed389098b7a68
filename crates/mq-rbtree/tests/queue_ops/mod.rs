//! Steps on a queue, with futures that wait, and checks of their results.
//!
//! On one thread the results are those of a model: a map from priority to FIFO, with the documented rules of
//! wake-ups. A waiting future that was woken has a permit. Threads that share a queue run the same steps, and
//! check that no message is lost.

mod model;

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mq_rbtree::{
    Bitmap, Builder, Interest, Levels, MessageGuard, Queue, RbTree, Readiness, ReceiveError,
    SendError, SendRefused,
};

use model::{Model, Waiter};
use testkit::WakeCount;
use testkit::alloc::{refuse_first, thread_bytes};
use testkit::block_on::block_on;
use testkit::canary::{Canary, Census};

/// Levels whose priorities are made of numbers, in the same order.
pub(crate) trait Keyed: Levels<Priority: Ord + Debug> {
    fn key(n: u32) -> Self::Priority;
    fn is_key(priority: Self::Priority) -> bool;
    /// Returns the most nodes that a queue with such limits keeps.
    fn most_kept(limits: &Limits) -> usize;
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

/// A reservation keeps one node more than it needs, so that none is allocated when all are in use.
fn nodes_kept(limits: &Limits) -> usize {
    limits.spare.max(if limits.no_alloc { limits.messages + 1 } else { 0 })
}

impl Keyed for RbTree<u32> {
    fn key(n: u32) -> u32 {
        n
    }

    fn is_key(_: u32) -> bool {
        true
    }

    fn most_kept(limits: &Limits) -> usize {
        nodes_kept(limits)
    }
}

/// The least number comes first.
impl Keyed for RbTree<Reverse<u64>> {
    fn key(n: u32) -> Reverse<u64> {
        Reverse(n.into())
    }

    fn is_key(_: Reverse<u64>) -> bool {
        true
    }

    fn most_kept(limits: &Limits) -> usize {
        nodes_kept(limits)
    }
}

/// Priorities at the ends of words and of the range.
pub(crate) const EDGES: [u32; 14] =
    [0, 1, 2, 62, 63, 64, 65, 4_095, 4_096, 4_097, 32_703, 32_766, 32_767, 32_768];

/// A step. Its numbers are taken modulo the number of choices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Send { priority: u8, late: bool },
    // The first allocations of the step are refused.
    SendShort { priority: u8, refused: u8 },
    Receive { late: bool },
    SendBatch { count: u8, priority: u8 },
    ReceiveBatch { most: u8 },
    DrainFilter { modulus: u8 },
    Drain,
    WaitToReceive,
    WaitToSend { priority: u8 },
    PollReceive { which: u8, other_waker: bool },
    PollSend { which: u8, other_waker: bool },
    PollSendShort { which: u8, refused: u8 },
    DropReceive { which: u8 },
    DropSend { which: u8 },
    Guard,
    AcceptGuard { which: u8 },
    DropGuard { which: u8 },
    // Clears a descriptor, which the first such step makes.
    Clear { writable: bool },
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

    pub(crate) fn builder<L: Keyed>(&self) -> Builder<Canary, L> {
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

/// A message's priority and number.
pub(crate) type Numbered<L> = (<L as Levels>::Priority, u64);
pub(crate) type Sent = Result<(), SendRefused>;
pub(crate) type Got<L> = Result<Numbered<L>, ReceiveError>;

/// Checks the results of steps. A receive, or send, that is `late` has a deadline.
pub(crate) trait Checker<L: Keyed> {
    /// Returns the number of the next message. If it `waits` in a future, later messages may be sent before.
    fn number(&mut self, key: L::Priority, waits: bool) -> u64;
    fn sent(&mut self, message: Numbered<L>, late: bool, result: Sent);
    /// The first messages of a batch were sent, and the next one was refused, if there is one.
    fn sent_batch(&mut self, batch: &[Numbered<L>], sent: usize, result: Sent);
    fn received(&mut self, late: bool, got: Got<L>);
    fn received_batch(&mut self, most: usize, got: Result<Vec<Numbered<L>>, ReceiveError>);
    fn drained(&mut self, wanted: &dyn Fn(u64) -> bool, out: Vec<Numbered<L>>);
    /// Returns the number of a future that receives.
    fn began_receive(&mut self) -> u64;
    fn polled_receive(&mut self, id: u64, polled: Poll<Got<L>>);
    fn polled_send(&mut self, id: u64, polled: Poll<Sent>);

    // The steps of one thread.

    fn began_send(&mut self, _message: Numbered<L>) {}
    fn dropped_receive(&mut self, _id: u64) {}
    fn dropped_send(&mut self, _id: u64) {}
    /// A message that had room was refused for lack of memory.
    fn lacked_memory(&mut self, _message: Numbered<L>) {}
    fn guarded(&mut self, _got: Got<L>) {}
    fn accepted(&mut self, _which: usize, _message: Numbered<L>) {}
    fn put_back(&mut self, _which: usize) {}
    fn cleared(&mut self, _direction: Interest) {}
    fn closed(&mut self, _was_open: bool) {}
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

struct Waiting<'q, L: Keyed, R> {
    future: Pin<Box<dyn Future<Output = R> + 'q>>,
    flag: Arc<WakeCount>,
    seen: usize,
    old: Vec<(Arc<WakeCount>, usize)>,
    id: u64,
    /// Of a sender's message.
    key: Option<L::Priority>,
}

impl<'q, L: Keyed, R> Waiting<'q, L, R> {
    fn new(future: impl Future<Output = R> + 'q, id: u64, key: Option<L::Priority>) -> Self {
        let future = Box::pin(future);
        Self { future, flag: WakeCount::new(), seen: 0, old: Vec::new(), id, key }
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

type Received<L> = Result<mq_rbtree::Received<Canary, L>, ReceiveError>;

/// Receives a message in one of four ways, which wait alike.
async fn receive<L: Keyed>(queue: &Queue<Canary, L>, id: u64) -> Received<L> {
    match id % 4 {
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
async fn receive_from_stream<L: Keyed>(queue: &Queue<Canary, L>) -> Received<L> {
    let mut stream = std::pin::pin!(queue.stream());
    let next =
        std::future::poll_fn(|cx| futures_core::Stream::poll_next(stream.as_mut(), cx)).await;
    next.ok_or(ReceiveError::Closed)
}

/// The fuzz target has no streams.
#[cfg(not(test))]
async fn receive_from_stream<L: Keyed>(queue: &Queue<Canary, L>) -> Received<L> {
    queue.receive_async().await
}

/// Runs steps on one thread, and compares the queue with the model after each.
pub(crate) fn run<L: Keyed>(limits: &Limits, steps: &[Step]) {
    let before = thread_bytes();
    let mut model = Model::<L>::new(limits);
    let queue = limits.builder::<L>().build().unwrap();
    let census = Census::new();
    {
        let mut runner = Runner::new(&queue, &census, Patience::No);
        for &step in steps {
            runner.step(&mut model, step);
            runner.check_wakes(&mut model);
            runner.check_ready(&mut model);
            if !limits.quiet {
                runner.check(&model);
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
    queue: &'q Queue<Canary, L>,
    census: &'q Census,
    patience: Patience,
    /// The number of deadlines so far.
    deadlines: u64,
    receives: Vec<Waiting<'q, L, Received<L>>>,
    sends: Vec<Waiting<'q, L, Result<(), SendError<Canary>>>>,
    guards: Vec<MessageGuard<'q, Canary, L>>,
    /// The descriptors for the directions.
    ready: [Option<Readiness<&'q Queue<Canary, L>>>; 2],
}

/// Returns whether memory was missing: both the preload and the allocation under the lock were
/// refused.
fn lacks_memory(error: Option<&SendError<Canary>>, refused: usize) -> bool {
    let short = error.is_some_and(|error| error.reason == SendRefused::NoMemory);
    assert!(!short || refused >= 2, "one refusal before the lock is made up for under it");
    short
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

fn numbered<L: Keyed>((message, key): mq_rbtree::Received<Canary, L>) -> Numbered<L> {
    (key, message.read())
}

/// Returns the reason of a refused message, which must be this one.
#[track_caller]
fn reason(result: Result<(), SendError<Canary>>, id: u64) -> Sent {
    result.map_err(|SendError { value, reason }| {
        assert_eq!(value.read(), id, "the message comes back");
        reason
    })
}

impl<'q, L: Keyed> Runner<'q, L> {
    pub(crate) fn new(queue: &'q Queue<Canary, L>, census: &'q Census, patience: Patience) -> Self {
        let (receives, sends, guards) = (Vec::new(), Vec::new(), Vec::new());
        Self { queue, census, patience, deadlines: 0, receives, sends, guards, ready: [None, None] }
    }

    fn key(n: u8) -> L::Priority {
        L::key(EDGES[usize::from(n) % EDGES.len()])
    }

    fn deadline(&mut self) -> Instant {
        self.deadlines += 1;
        match self.patience {
            Patience::No => Instant::now() - Duration::from_secs(1),
            _ => Instant::now() + Duration::from_micros(self.deadlines * 37 % 300),
        }
    }

    pub(crate) fn step(&mut self, checker: &mut impl Checker<L>, step: Step) {
        let (queue, census) = (self.queue, self.census);
        let forever = matches!(self.patience, Patience::Forever | Patience::Ready);
        match step {
            Step::Send { priority, late } => {
                let key = Self::key(priority);
                let id = checker.number(key, false);
                let message = Canary::new(id, census);
                let sent = match late {
                    true => queue.send_deadline(message, key, self.deadline()),
                    false if self.patience == Patience::Ready => self.send_at_events(message, key),
                    false if forever => queue.send(message, key),
                    false => queue.try_send(message, key),
                };
                checker.sent((key, id), late, reason(sent, id));
            }
            Step::SendShort { priority, refused: count } => {
                let key = Self::key(priority);
                let id = checker.number(key, false);
                let message = Canary::new(id, census);
                let most = usize::from(count % 6);
                let (result, refused) = refuse_first(most, || queue.try_send(message, key));
                let short = lacks_memory(result.as_ref().err(), refused);
                let result = reason(result, id);
                match short {
                    true => checker.lacked_memory((key, id)),
                    false => checker.sent((key, id), false, result),
                }
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
                checker.received(late, received.map(numbered::<L>));
            }
            Step::SendBatch { count, priority } => {
                let keys = (0..count % 80).map(|n| Self::key(priority.wrapping_add(n / 3)));
                let all: Vec<_> = keys.map(|key| (key, checker.number(key, false))).collect();
                let message = |&(key, id): &Numbered<L>| (Canary::new(id, census), key);
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
                checker.sent_batch(&all, sent, result);
            }
            Step::ReceiveBatch { most } => {
                let (most, mut out) = (usize::from(most % 100), Vec::new());
                let got = match forever {
                    true => queue.receive_batch(&mut out, most),
                    false => queue.try_receive_batch(&mut out, most),
                };
                assert_eq!(*got.as_ref().unwrap_or(&0), out.len());
                let out = out.into_iter().map(numbered::<L>).collect();
                checker.received_batch(most, got.map(|_| out));
            }
            Step::DrainFilter { modulus } => {
                let wanted = |id: u64| id.is_multiple_of(u64::from(modulus % 5) + 1);
                let mut seen = Vec::new();
                let out = queue.drain_filter(|message, key| {
                    seen.push(key);
                    wanted(message.read())
                });
                assert!(seen.is_sorted_by(|a, b| a >= b), "the highest first");
                checker.drained(&wanted, out.into_iter().map(numbered::<L>).collect());
            }
            Step::Drain => {
                let out = queue.drain().into_iter().map(numbered::<L>);
                checker.drained(&|_| true, out.collect());
            }
            Step::WaitToReceive => {
                let id = checker.began_receive();
                if forever {
                    let got = block_on(receive(queue, id)).map(numbered::<L>);
                    return checker.polled_receive(id, Poll::Ready(got));
                }
                self.receives.push(Waiting::new(receive(queue, id), id, None));
                self.poll_receive(checker, self.receives.len() - 1, false);
            }
            Step::WaitToSend { priority } => {
                let key = Self::key(priority);
                let id = checker.number(key, true);
                checker.began_send((key, id));
                let future = queue.send_async(Canary::new(id, census), key);
                if forever {
                    return checker.polled_send(id, Poll::Ready(reason(block_on(future), id)));
                }
                self.sends.push(Waiting::new(future, id, Some(key)));
                self.poll_send(checker, self.sends.len() - 1, false);
            }
            Step::PollReceive { which, other_waker } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    self.poll_receive(checker, which, other_waker);
                }
            }
            Step::PollSend { which, other_waker } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    self.poll_send(checker, which, other_waker);
                }
            }
            Step::PollSendShort { which, refused } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    self.poll_send_short(checker, which, usize::from(refused % 6));
                }
            }
            Step::DropReceive { which } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    let gone = self.receives.swap_remove(which);
                    checker.dropped_receive(gone.id);
                }
            }
            Step::DropSend { which } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    let gone = self.sends.swap_remove(which);
                    checker.dropped_send(gone.id);
                }
            }
            Step::Guard => {
                let got = queue.try_receive_guard().map(|guard| {
                    self.guards.push(guard);
                    let guard = &self.guards[self.guards.len() - 1];
                    (guard.priority(), guard.read())
                });
                checker.guarded(got);
            }
            Step::AcceptGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let message = self.guards.swap_remove(which).accept();
                    checker.accepted(which, numbered::<L>(message));
                }
            }
            Step::DropGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let guard = self.guards.swap_remove(which);
                    // The way back needs no memory.
                    let (_, refused) = refuse_first(usize::MAX, || drop(guard));
                    assert_eq!(refused, 0);
                    checker.put_back(which);
                }
            }
            Step::Clear { writable } => {
                let interest = if writable { Interest::Writable } else { Interest::Readable };
                let ready = &mut self.ready[interest as usize];
                match ready {
                    Some(ready) => ready.clear(),
                    None => *ready = Some(Readiness::new(queue, interest).unwrap()),
                }
                checker.cleared(interest);
            }
            Step::Close => checker.closed(queue.close()),
        }
    }

    fn send_at_events(
        &mut self,
        message: Canary,
        key: L::Priority,
    ) -> Result<(), SendError<Canary>> {
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

    fn poll_receive(&mut self, checker: &mut impl Checker<L>, which: usize, other_waker: bool) {
        let waiting = &mut self.receives[which];
        let (id, polled) = (waiting.id, waiting.poll(other_waker));
        if polled.is_ready() {
            self.receives.swap_remove(which);
        }
        checker.polled_receive(id, polled.map_ok(numbered::<L>));
    }

    fn poll_send(&mut self, checker: &mut impl Checker<L>, which: usize, other_waker: bool) {
        let polled = self.sends[which].poll(other_waker);
        self.polled_send(checker, which, polled);
    }

    fn poll_send_short(&mut self, checker: &mut impl Checker<L>, which: usize, most: usize) {
        let (polled, refused) = refuse_first(most, || self.sends[which].poll(false));
        match polled {
            Poll::Ready(Err(error)) if lacks_memory(Some(&error), refused) => {
                let Waiting { id, key, .. } = self.sends.swap_remove(which);
                assert_eq!(error.value.read(), id, "the message comes back");
                checker.lacked_memory((key.unwrap(), id));
            }
            polled => self.polled_send(checker, which, polled),
        }
    }

    fn polled_send(
        &mut self,
        checker: &mut impl Checker<L>,
        which: usize,
        polled: Poll<Result<(), SendError<Canary>>>,
    ) {
        let id = self.sends[which].id;
        if polled.is_ready() {
            self.sends.swap_remove(which);
        }
        checker.polled_send(id, polled.map(|result| reason(result, id)));
    }

    /// Checks that the queue has woken the same tasks as the model.
    fn check_wakes(&self, model: &mut Model<L>) {
        model.wake_waiters();
        for waiting in &self.receives {
            let permit = model.receiver(waiting.id).permit;
            assert_eq!(waiting.was_woken(), permit, "receiver {}", waiting.id);
        }
        for waiting in &self.sends {
            let permit = model.sender(waiting.id).permit;
            assert_eq!(waiting.was_woken(), permit, "sender {}", waiting.id);
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
