//! Steps of one thread on a queue, with futures that wait, each checked against a model.
//!
//! The model is a map from priority to FIFO, with the documented rules of wake-ups. A waiting
//! future that was woken has a permit.

mod model;

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mq_rbtree::{
    Bitmap, Builder, Interest, Levels, MessageGuard, Queue, RbTree, Readiness, ReceiveError,
    SendError, SendRefused,
};

use model::{Model, Waiter};
use testkit::WakeCount;
use testkit::alloc::refuse_first;

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

/// A message. The count of the model's `Rc` shows that it is dropped exactly once.
pub(crate) struct Payload {
    id: u64,
    _live: Rc<()>,
}

/// Priorities at the ends of words and of the range.
const EDGES: [u32; 14] =
    [0, 1, 2, 62, 63, 64, 65, 4_095, 4_096, 4_097, 32_703, 32_766, 32_767, 32_768];

/// A step. Its numbers are taken modulo the number of choices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Send {
        priority: u8,
        late: bool,
    },
    /// The first allocations of the step are refused.
    SendShort {
        priority: u8,
        refused: u8,
    },
    Receive {
        late: bool,
    },
    SendBatch {
        count: u8,
        priority: u8,
    },
    ReceiveBatch {
        most: u8,
    },
    DrainFilter {
        modulus: u8,
    },
    Drain,
    WaitToReceive,
    WaitToSend {
        priority: u8,
    },
    PollReceive {
        which: u8,
        other_waker: bool,
    },
    PollSend {
        which: u8,
        other_waker: bool,
    },
    PollSendShort {
        which: u8,
        refused: u8,
    },
    DropReceive {
        which: u8,
    },
    DropSend {
        which: u8,
    },
    Guard,
    AcceptGuard {
        which: u8,
    },
    DropGuard {
        which: u8,
    },
    /// Clears a descriptor, which the first such step makes.
    Clear {
        writable: bool,
    },
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

struct Waiting<'q, R> {
    future: Pin<Box<dyn Future<Output = R> + 'q>>,
    flag: Arc<WakeCount>,
    seen: usize,
    old: Vec<(Arc<WakeCount>, usize)>,
    id: u64,
}

impl<'q, R> Waiting<'q, R> {
    fn new(future: Pin<Box<dyn Future<Output = R> + 'q>>, id: u64) -> Self {
        Self { future, flag: WakeCount::new(), seen: 0, old: Vec::new(), id }
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

type Received<L> = Result<mq_rbtree::Received<Payload, L>, ReceiveError>;

/// Returns one of the futures that receive a message. All of them wait in the same way.
fn receive<'q, L: Keyed>(
    queue: &'q Queue<Payload, L>,
    id: u64,
) -> Pin<Box<dyn Future<Output = Received<L>> + 'q>> {
    match id % 3 {
        0 => Box::pin(queue.receive_async()),
        1 => Box::pin(async { Ok(queue.receive_guard_async().await?.accept()) }),
        _ => Box::pin(async {
            let mut out = Vec::with_capacity(1);
            queue.receive_batch_async(&mut out, 1).await?;
            Ok(out.remove(0))
        }),
    }
}

pub(crate) fn run<L: Keyed>(limits: &Limits, steps: &[Step]) {
    let mut model = Model::<L>::new(limits);
    let mut builder = Builder::<Payload, L>::new(limits.messages).spare_nodes(limits.spare);
    for &(from, messages) in &model.reserves {
        builder = builder.reserve(from, messages);
    }
    if let Some(every) = limits.ageing {
        builder = builder.ageing(NonZeroU32::new(every).unwrap());
    }
    if limits.no_alloc {
        builder = builder.no_alloc();
    }
    let queue = builder.build().unwrap();
    let live = Rc::new(());
    {
        let mut runner = Runner {
            queue: &queue,
            live: &live,
            receives: Vec::new(),
            sends: Vec::new(),
            guards: Vec::new(),
            ready: [None, None],
        };
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
    assert_eq!(Rc::strong_count(&live), 1, "every message was dropped");
}

struct Runner<'q, L: Keyed> {
    queue: &'q Queue<Payload, L>,
    live: &'q Rc<()>,
    receives: Vec<Waiting<'q, Received<L>>>,
    sends: Vec<Waiting<'q, Result<(), SendError<Payload>>>>,
    guards: Vec<MessageGuard<'q, Payload, L>>,
    /// The descriptors for the directions.
    ready: [Option<Readiness<&'q Queue<Payload, L>>>; 2],
}

/// Returns whether memory was missing: both the preload and the allocation under the lock were
/// refused.
fn lacks_memory(error: Option<&SendError<Payload>>, refused: usize) -> bool {
    let short = error.is_some_and(|error| error.reason == SendRefused::NoMemory);
    assert!(!short || refused >= 2, "one refusal before the lock is made up for under it");
    short
}

/// Returns whether an event loop would wake.
pub(crate) fn is_readable(ready: &impl AsRawFd) -> bool {
    let mut poll = libc::pollfd { fd: ready.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one `pollfd` of this frame, and the timeout is 0.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

fn pick(which: u8, of: usize) -> Option<usize> {
    (of > 0).then(|| usize::from(which) % of)
}

impl<L: Keyed> Runner<'_, L> {
    fn key(n: u8) -> L::Priority {
        L::key(EDGES[usize::from(n) % EDGES.len()])
    }

    fn payload(&self, model: &mut Model<L>) -> Payload {
        model.ids += 1;
        Payload { id: model.ids, _live: Rc::clone(self.live) }
    }

    fn step(&mut self, model: &mut Model<L>, step: Step) {
        let queue = self.queue;
        let second_ago = Instant::now() - Duration::from_secs(1);
        match step {
            Step::Send { priority, late } => {
                let (payload, key) = (self.payload(model), Self::key(priority));
                let stored = payload.id;
                let expected = match model.send(key, stored) {
                    Err(SendRefused::Full) if late => Err(SendRefused::Timeout),
                    other => other,
                };
                let sent = match late {
                    true => queue.send_deadline(payload, key, second_ago),
                    false => queue.try_send(payload, key),
                };
                Self::sent(sent, expected, stored);
            }
            Step::SendShort { priority, refused: count } => {
                let (payload, key) = (self.payload(model), Self::key(priority));
                let stored = payload.id;
                let most = usize::from(count % 6);
                let (result, refused) = refuse_first(most, || queue.try_send(payload, key));
                let expected = if lacks_memory(result.as_ref().err(), refused) {
                    assert_eq!(model.accepts(key), Ok(()));
                    Err(SendRefused::NoMemory)
                } else {
                    model.send(key, stored)
                };
                Self::sent(result, expected, stored);
            }
            Step::Receive { late } => {
                let expected = model.take();
                let received = match late {
                    true => queue.receive_deadline(second_ago),
                    false => queue.try_receive(),
                };
                match received {
                    Ok((payload, key)) => assert_eq!(Some((key, payload.id)), expected),
                    Err(error) => {
                        assert_eq!(expected, None);
                        let refused =
                            if late { ReceiveError::Timeout } else { ReceiveError::Empty };
                        let why = if model.ended() { ReceiveError::Closed } else { refused };
                        assert_eq!(error, why);
                    }
                }
            }
            Step::SendBatch { count, priority } => {
                let mut batch = VecDeque::new();
                for n in 0..count % 80 {
                    let key = Self::key(priority.wrapping_add(n / 3));
                    batch.push_back((self.payload(model), key));
                }
                let mut expected = Ok(());
                let (mut sent, all) = (0, batch.len());
                for (payload, key) in &batch {
                    expected = model.send(*key, payload.id);
                    if expected.is_err() {
                        break;
                    }
                    sent += 1;
                }
                let next = batch.get(sent).map_or(0, |(payload, _)| payload.id);
                match queue.try_send_batch(&mut batch) {
                    Ok(count) => assert_eq!((count, sent, expected), (all, all, Ok(()))),
                    Err(error) => {
                        assert_eq!((error.sent, batch.len()), (sent, all - sent), "the rest stays");
                        let (value, _) = batch.pop_front().expect("the one that was refused");
                        assert!(batch.front().is_none_or(|(payload, _)| payload.id == next + 1));
                        let reason = error.reason;
                        Self::sent(Err(mq_rbtree::SendError { value, reason }), expected, next);
                    }
                }
            }
            Step::ReceiveBatch { most } => {
                let most = usize::from(most % 100);
                let mut expected = Vec::new();
                for n in 0..most.min(queue.max_messages()) {
                    if n > 0 && n % 64 == 0 {
                        model.wake_waiters(); // a lock section has taken 64
                    }
                    let Some(next) = model.take() else { break };
                    expected.push(next);
                }
                let mut out = Vec::new();
                match queue.try_receive_batch(&mut out, most) {
                    Ok(count) => assert_eq!(count, out.len()),
                    Err(error) => {
                        assert!(out.is_empty() && most > 0);
                        let closed = model.ended();
                        let why = if closed { ReceiveError::Closed } else { ReceiveError::Empty };
                        assert_eq!(error, why);
                    }
                }
                let out: Vec<_> = out.iter().map(|(payload, key)| (*key, payload.id)).collect();
                assert_eq!(out, expected);
            }
            Step::DrainFilter { modulus } => {
                let wanted = |id: u64| id.is_multiple_of(u64::from(modulus % 5) + 1);
                let expected = model.drain(wanted);
                let mut seen = Vec::new();
                let out = queue.drain_filter(|payload, key| {
                    seen.push((key, payload.id));
                    wanted(payload.id)
                });
                let out: Vec<_> = out.iter().map(|(payload, key)| (*key, payload.id)).collect();
                assert_eq!(out, expected);
                assert!(seen.is_sorted_by(|a, b| a.0 >= b.0), "the highest first");
            }
            Step::Drain => {
                let expected = model.drain(|_| true);
                let out = queue.drain();
                let out: Vec<_> = out.iter().map(|(payload, key)| (*key, payload.id)).collect();
                assert_eq!(out, expected);
            }
            Step::WaitToReceive => {
                let id = model.new_receive();
                self.receives.push(Waiting::new(receive(queue, id), id));
                self.poll_receive(model, self.receives.len() - 1, false);
            }
            Step::WaitToSend { priority } => {
                let (payload, key) = (self.payload(model), Self::key(priority));
                let id = payload.id;

                model.new_send(key, id);
                let future = Box::pin(queue.send_async(payload, key));
                self.sends.push(Waiting::new(future, id));
                self.poll_send(model, self.sends.len() - 1, false);
            }
            Step::PollReceive { which, other_waker } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    self.poll_receive(model, which, other_waker);
                }
            }
            Step::PollSend { which, other_waker } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    self.poll_send(model, which, other_waker);
                }
            }
            Step::PollSendShort { which, refused } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    self.poll_send_short(model, which, usize::from(refused % 6));
                }
            }
            Step::DropReceive { which } => {
                if let Some(which) = pick(which, self.receives.len()) {
                    let gone = self.receives.swap_remove(which);
                    model.drop_receive(gone.id);
                }
            }
            Step::DropSend { which } => {
                if let Some(which) = pick(which, self.sends.len()) {
                    let gone = self.sends.swap_remove(which);
                    model.drop_send(gone.id);
                }
            }
            Step::Guard => match queue.try_receive_guard() {
                Ok(guard) => {
                    let expected = model.guard();
                    assert_eq!(Some((guard.priority(), guard.id)), expected);
                    self.guards.push(guard);
                }
                Err(error) => {
                    assert_eq!(model.guard(), None);
                    let ended = model.ended();
                    let why = if ended { ReceiveError::Closed } else { ReceiveError::Empty };
                    assert_eq!(error, why);
                }
            },
            Step::AcceptGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let (payload, key) = self.guards.swap_remove(which).accept();
                    assert_eq!((key, payload.id), model.accept(which));
                }
            }
            Step::DropGuard { which } => {
                if let Some(which) = pick(which, self.guards.len()) {
                    let guard = self.guards.swap_remove(which);
                    // The way back needs no memory.
                    let (_, refused) = refuse_first(usize::MAX, || drop(guard));
                    assert_eq!(refused, 0);
                    model.put_back(which);
                }
            }
            Step::Clear { writable } => {
                let interest = if writable { Interest::Writable } else { Interest::Readable };
                let ready = &mut self.ready[interest as usize];
                match ready {
                    Some(ready) => ready.clear(),
                    None => *ready = Some(Readiness::new(queue, interest).unwrap()),
                }
                model.signalled[interest as usize] = false;
            }
            Step::Close => {
                let closed = std::mem::replace(&mut model.closed, true);
                assert_eq!(queue.close(), !closed);
            }
        }
    }

    #[track_caller]
    fn sent(result: Result<(), SendError<Payload>>, expected: Result<(), SendRefused>, id: u64) {
        let result = result.map_err(|SendError { value, reason, .. }| {
            assert_eq!(value.id, id, "the message comes back");
            reason
        });
        assert_eq!(result, expected);
    }

    fn poll_receive(&mut self, model: &mut Model<L>, which: usize, other_waker: bool) {
        let waiting = &mut self.receives[which];
        let expected = model.poll_receive(waiting.id);
        match (waiting.poll(other_waker), expected) {
            (Poll::Pending, None) => assert!(!model.ended()),
            (Poll::Ready(Ok((payload, key))), Some(next)) => {
                assert_eq!((key, payload.id), next);
                self.receives.swap_remove(which);
            }
            (Poll::Ready(Err(error)), None) => {
                assert!(error == ReceiveError::Closed && model.ended());
                self.receives.swap_remove(which);
            }
            (result, expected) => panic!("{}, {expected:?}", result.is_ready()),
        }
    }

    fn poll_send(&mut self, model: &mut Model<L>, which: usize, other_waker: bool) {
        let polled = self.sends[which].poll(other_waker);
        self.polled_send(model, which, polled);
    }

    fn poll_send_short(&mut self, model: &mut Model<L>, which: usize, most: usize) {
        let (polled, refused) = refuse_first(most, || self.sends[which].poll(false));
        match polled {
            Poll::Ready(Err(error)) if lacks_memory(Some(&error), refused) => {
                let waiting = self.sends.swap_remove(which);
                assert_eq!(error.value.id, waiting.id, "the message comes back");
                model.poll_send_short(waiting.id);
            }
            polled => self.polled_send(model, which, polled),
        }
    }

    fn polled_send(
        &mut self,
        model: &mut Model<L>,
        which: usize,
        polled: Poll<Result<(), SendError<Payload>>>,
    ) {
        let id = self.sends[which].id;
        let expected = model.poll_send(id);
        match polled {
            Poll::Pending => assert_eq!(expected, Err(SendRefused::Full)),
            Poll::Ready(result) => {
                Self::sent(result, expected, id);
                self.sends.swap_remove(which);
            }
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
