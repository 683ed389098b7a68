//! Linearizability: records the operations of threads on one small queue, and checks that some
//! sequential order of them gives the same results on a queue of one thread.
//!
//! Each operation lies between two tickets of one counter. The checker is that of Wing, Gong and
//! Lowe.
#![cfg(not(offlock_model))]

#[path = "common/wait.rs"]
mod wait;

use std::future::Future;
use std::hint::spin_loop;
use std::pin::pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Builder, Levels, Queue, RbTree, ReceiveError, SendRefused};
use todc_utils::linearizability::WGLChecker;
use todc_utils::linearizability::history::{Action, History};
use todc_utils::specifications::Specification;

use wait::Wait;

use testkit::block_on::{block_on, unparker};
use testkit::rng::{self, Rng};
use testkit::watchdog::watched;

/// The threads that send and receive. One more helps when all of them wait.
const THREADS: usize = 4;
/// From this priority on, the reserved place is available.
const URGENT: u32 = 2;

type Sent = Result<(), SendRefused>;
type Got = Result<(u64, u32), ReceiveError>;

/// An operation and its result: `None` before it has ended.
#[derive(Clone, Debug)]
enum Op {
    Send(u64, u32, Option<Sent>),
    Receive(Option<Got>),
    /// Takes all messages at once.
    Drain(Option<Vec<(u64, u32)>>),
    Len(Option<usize>),
    Close(Option<bool>),
}

/// The specification: a queue of `MAX` messages, of which `KEPT` places are reserved.
struct Spec<const MAX: usize, const KEPT: usize>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// The messages in the order in which they were sent.
    messages: Vec<(u64, u32)>,
    closed: bool,
}

impl State {
    /// Takes the oldest message of the highest priority.
    fn take(&mut self) -> Option<(u64, u32)> {
        let highest = self.messages.iter().map(|message| message.1).max()?;
        let at = self.messages.iter().position(|message| message.1 == highest)?;
        Some(self.messages.remove(at))
    }
}

impl<const MAX: usize, const KEPT: usize> Specification for Spec<MAX, KEPT> {
    type State = State;
    type Operation = Op;

    fn init() -> State {
        State { messages: Vec::new(), closed: false }
    }

    fn apply(op: &Op, state: &State) -> (bool, State) {
        let mut next = state.clone();
        let len = state.messages.len();
        let valid = match op {
            Op::Send(value, priority, Some(said)) => {
                let kept = if *priority < URGENT { KEPT } else { 0 };
                let room = len < MAX - kept;
                match said {
                    Ok(()) => {
                        next.messages.push((*value, *priority));
                        room && !state.closed
                    }
                    Err(SendRefused::Closed) => state.closed,
                    // A send that timed out has found the queue full when it began to wait.
                    Err(SendRefused::Full | SendRefused::Timeout) => !room && !state.closed,
                    Err(_) => false,
                }
            }
            Op::Receive(Some(said)) => match said {
                Ok(message) => next.take() == Some(*message),
                Err(ReceiveError::Closed) => len == 0 && state.closed,
                Err(ReceiveError::Empty | ReceiveError::Timeout) => len == 0 && !state.closed,
                Err(_) => false,
            },
            Op::Drain(Some(all)) => std::iter::from_fn(|| next.take()).collect::<Vec<_>>() == *all,
            Op::Len(Some(said)) => *said == len,
            Op::Close(Some(was_open)) => {
                next.closed = true;
                *was_open != state.closed
            }
            Op::Send(_, _, None)
            | Op::Receive(None)
            | Op::Drain(None)
            | Op::Len(None)
            | Op::Close(None) => false,
        };
        (valid, next)
    }
}

type Actions = Vec<(usize, Action<Op>)>;

fn is_linearizable<const MAX: usize, const KEPT: usize>(actions: &Actions) -> bool {
    WGLChecker::<Spec<MAX, KEPT>>::is_linearizable(History::from_actions(actions.clone()))
}

/// Levels with priorities that are made of numbers.
trait Keyed: Levels<Priority: Sync + Send> {
    fn key(n: u32) -> Self::Priority;
    fn number(key: Self::Priority) -> u32;
}

impl Keyed for Bitmap {
    fn key(n: u32) -> u32 {
        n * 64
    }

    fn number(key: u32) -> u32 {
        key / 64
    }
}

impl Keyed for RbTree<i64> {
    fn key(n: u32) -> i64 {
        i64::from(n) - 2
    }

    fn number(key: i64) -> u32 {
        (key + 2) as u32
    }
}

/// The operations of one thread, with the tickets of their begin and end.
struct Recorder<'q, L: Keyed> {
    queue: &'q Queue<u64, L>,
    tickets: &'q AtomicUsize,
    me: usize,
    actions: Vec<(usize, (usize, Action<Op>))>,
}

impl<L: Keyed> Recorder<'_, L> {
    /// Runs one operation and records it, unless it did not take place.
    fn record(&mut self, op: Op, run: impl FnOnce(&Queue<u64, L>) -> Option<Op>) {
        let began = self.tickets.fetch_add(1, SeqCst);
        let said = run(self.queue);
        let ended = self.tickets.fetch_add(1, SeqCst);
        if let Some(said) = said {
            self.actions.push((began, (self.me, Action::Call(op))));
            self.actions.push((ended, (self.me, Action::Response(said))));
        }
    }

    fn send(
        &mut self,
        value: u64,
        priority: u32,
        how: impl FnOnce(&Queue<u64, L>) -> Option<Sent>,
    ) {
        self.record(Op::Send(value, priority, None), |queue| {
            how(queue).map(|said| Op::Send(value, priority, Some(said)))
        });
    }

    fn receive(
        &mut self,
        how: impl FnOnce(&Queue<u64, L>) -> Option<Result<(u64, L::Priority), ReceiveError>>,
    ) {
        self.record(Op::Receive(None), |queue| {
            let said = how(queue)?;
            Some(Op::Receive(Some(said.map(|(value, key)| (value, L::number(key))))))
        });
    }

    fn try_send(&mut self, value: u64, priority: u32) {
        self.send(value, priority, |queue| {
            Some(queue.try_send(value, L::key(priority)).map_err(|refused| refused.reason))
        });
    }

    fn try_receive(&mut self) {
        self.receive(|queue| Some(queue.try_receive()));
    }

    fn send_somehow(&mut self, rng: &mut Rng, value: u64) {
        let priority = rng.usize(..4) as u32;
        let key = L::key(priority);
        let wait = random_wait(rng);
        let polls = rng.usize(..3);
        match rng.usize(..5) {
            0 => self.try_send(value, priority),
            1 | 2 => self.send(value, priority, |queue| {
                Some(wait.send(queue, value, key).map_err(|refused| refused.reason))
            }),
            3 => self.send(value, priority, |queue| {
                Some(block_on(queue.send_async(value, key)).map_err(|refused| refused.reason))
            }),
            _ => self.send(value, priority, |queue| {
                let said = poll_some(queue.send_async(value, key), polls)?;
                Some(said.map_err(|refused| refused.reason))
            }),
        }
    }

    fn receive_somehow(&mut self, rng: &mut Rng) {
        let wait = random_wait(rng);
        let polls = rng.usize(..3);
        match rng.usize(..5) {
            0 => self.try_receive(),
            1 | 2 => self.receive(|queue| Some(wait.receive(queue))),
            3 => self.receive(|queue| Some(block_on(queue.receive_async()))),
            _ => self.receive(|queue| poll_some(queue.receive_async(), polls)),
        }
    }

    /// Sends without a wait. Often the thread pauses between its claim of a slot and its publication.
    fn send_at_once(&mut self, rng: &mut Rng, value: u64) {
        let priority = rng.usize(..4) as u32;
        let (pauses, pause) = (rng.usize(..4) > 0, rng.usize(..600));
        self.send(value, priority, |queue| {
            let claimed = if pauses { queue.claim(value, L::key(priority)) } else { None };
            let Some(publish) = claimed else {
                let sent = queue.try_send(value, L::key(priority));
                return Some(sent.map_err(|refused| refused.reason));
            };
            (0..pause).for_each(|_| spin_loop());
            if pause % 4 == 0 {
                thread::yield_now();
            }
            publish();
            Some(Ok(()))
        });
    }

    fn receive_at_once(&mut self, rng: &mut Rng) {
        match rng.usize(..8) {
            0 => self.receive(|queue| poll_some(queue.receive_async(), 0)),
            _ => self.try_receive(),
        }
    }
}

fn random_wait(rng: &mut Rng) -> Wait {
    match rng.usize(..4) {
        0 | 1 => Wait::Forever,
        2 => Wait::Until(Instant::now()),
        _ => Wait::Until(Instant::now() + Duration::from_micros(rng.usize(..200) as u64)),
    }
}

/// Polls a few times, and drops the future if that was not enough.
fn poll_some<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let waker = unparker();
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    for _ in 0..=polls {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return Some(output),
            Poll::Pending => thread::park_timeout(Duration::from_micros(50)),
        }
    }
    None
}

/// Records the operations of several threads.
fn record<L: Keyed, const MAX: usize, const KEPT: usize>(seed: u64, each: usize) -> Actions {
    let mut rng = rng::seeded(seed * 8);
    let mut builder = Builder::<u64, L>::new(MAX).spin(rng.usize(..2) == 0);
    if KEPT > 0 {
        builder = builder.reserve(L::key(URGENT), KEPT);
    }
    let queue = builder.build().unwrap();
    // The memory is there: messages come through the ring, unless a thread waits.
    (0..MAX as u64).for_each(|value| queue.try_send(value, L::key(URGENT)).unwrap());
    queue.drain();
    let waits = rng.usize(..2) == 0;
    let threads = 3 + rng.usize(..THREADS - 2);
    let closes = rng.usize(..3) == 0;
    let (tickets, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (running, start) = (AtomicUsize::new(threads), Barrier::new(threads));
    let recorder = |me| Recorder { queue: &queue, tickets: &tickets, me, actions: Vec::new() };
    let act = |me: usize| {
        let mut rng = rng::seeded(seed * 8 + 1 + me as u64);
        let mut recorder = recorder(me);
        start.wait();
        for serial in 0..each {
            let value = (me * each + serial) as u64;
            match rng.usize(..32) {
                0..15 if waits => recorder.send_somehow(&mut rng, value),
                0..15 => recorder.send_at_once(&mut rng, value),
                15..30 if waits => recorder.receive_somehow(&mut rng),
                15..30 => recorder.receive_at_once(&mut rng),
                30 => recorder.record(Op::Len(None), |queue| Some(Op::Len(Some(queue.len())))),
                _ => recorder.record(Op::Drain(None), |queue| {
                    let all = queue.drain().into_iter();
                    Some(Op::Drain(Some(all.map(|(value, key)| (value, L::number(key))).collect())))
                }),
            }
            done.fetch_add(1, Relaxed);
        }
        if closes && me == 0 {
            recorder.record(Op::Close(None), |queue| Some(Op::Close(Some(queue.close()))));
        }
        running.fetch_sub(1, SeqCst);
        recorder.actions
    };
    // Helps while all remaining threads wait for the same event.
    let help = || {
        let mut recorder = recorder(threads);
        let mut value = 1_000_000;
        while running.load(SeqCst) > 0 {
            let seen = tickets.load(SeqCst);
            thread::sleep(Duration::from_micros(300));
            if tickets.load(SeqCst) != seen {
                continue;
            }
            let (senders, receivers) = queue.stats().waiting;
            if senders > 0 {
                recorder.try_receive();
            }
            if receivers > 0 {
                value += 1;
                recorder.try_send(value, value as u32 % 4);
            }
        }
        recorder.actions
    };
    let mut actions: Vec<(usize, (usize, Action<Op>))> = watched(
        || done.load(Relaxed) as u64, // does not count the helper: a thread that sleeps for ever must not be hidden
        || queue.stats().to_string(),
        || {
            thread::scope(|scope| {
                let act = &act;
                let mut all: Vec<_> = (0..threads).map(|me| scope.spawn(move || act(me))).collect();
                all.push(scope.spawn(help));
                all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            })
        },
    );
    queue.validate();
    actions.sort_by_key(|(ticket, _)| *ticket);
    actions.into_iter().map(|(_, action)| action).collect()
}

/// Records a history and checks it; returns it.
fn checked<L: Keyed, const MAX: usize, const KEPT: usize>(seed: u64, each: usize) -> Actions {
    let actions = record::<L, MAX, KEPT>(seed, each);
    assert!(is_linearizable::<MAX, KEPT>(&actions), "seed {seed}: {actions:#?}");
    actions
}

fn histories<L: Keyed>(seed: u64, each: usize) -> usize {
    let actions = match seed % 5 {
        0 => checked::<L, 1, 0>(seed, each),
        1 => checked::<L, 2, 0>(seed, each),
        2 => checked::<L, 3, 0>(seed, each),
        3 => checked::<L, 8, 0>(seed, each),
        _ => checked::<L, 3, 1>(seed, each),
    };
    actions.len() / 2
}

#[test]
fn inv18_histories_are_linearizable() {
    for seed in 0..24 {
        histories::<Bitmap>(seed, 20);
        histories::<RbTree<i64>>(seed, 20);
    }
}

#[test]
#[ignore = "stress: seconds of histories"]
fn stress_inv18_what_threads_see_is_as_if_one_after_the_other() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let (mut seed, mut operations) = (1_000, 0);
    while Instant::now() < until {
        operations += histories::<Bitmap>(seed, 40);
        operations += histories::<RbTree<i64>>(seed, 40);
        seed += 1;
    }
    println!("{} histories, {operations} operations", 2 * (seed - 1_000));
}

/// The checker rejects histories that no queue can produce.
#[test]
fn a_wrong_history_is_rejected() {
    let sent = |value, priority| Op::Send(value, priority, Some(Ok(())));
    let full = |priority| Op::Send(9, priority, Some(Err(SendRefused::Full)));
    let got = |value, priority| Op::Receive(Some(Ok((value, priority))));
    let none = |why| Op::Receive(Some(Err(why)));
    let closed = Op::Close(Some(true));
    let one_by_one = |ops: &[Op]| -> Actions {
        let both = |(at, op): (usize, &Op)| {
            [(at % 2, Action::Call(op.clone())), (at % 2, Action::Response(op.clone()))]
        };
        ops.iter().enumerate().flat_map(both).collect()
    };
    let right = [
        sent(1, 0),
        sent(2, 3),
        full(1),
        sent(3, 3),
        full(3),
        Op::Len(Some(3)),
        got(2, 3),
        got(3, 3),
        closed.clone(),
        Op::Send(4, 3, Some(Err(SendRefused::Closed))),
        got(1, 0),
        none(ReceiveError::Closed),
    ];
    assert!(is_linearizable::<3, 1>(&one_by_one(&right)));
    for wrong in [
        &[sent(1, 0), sent(2, 3), got(1, 0)][..],
        &[sent(1, 3), sent(2, 3), got(2, 3)],
        &[sent(1, 0), got(1, 0), got(1, 0)],
        &[sent(1, 0), got(1, 1)],
        &[sent(1, 0), got(2, 0)],
        &[got(1, 0), sent(1, 0)],
        &[sent(1, 3), sent(2, 3), sent(3, 3), sent(4, 3)],
        &[sent(1, 0), sent(2, 0), sent(3, 0)],
        &[sent(1, 0), full(0)],
        &[sent(1, 0), sent(2, 0), full(3)],
        &[sent(1, 0), none(ReceiveError::Empty)],
        &[sent(1, 0), none(ReceiveError::Timeout)],
        &[sent(1, 0), closed.clone(), none(ReceiveError::Closed)],
        &[closed.clone(), sent(1, 0)],
        &[closed.clone(), closed.clone()],
        &[none(ReceiveError::Closed)],
        &[sent(1, 0), sent(2, 3), Op::Drain(Some(vec![(1, 0), (2, 3)]))],
        &[sent(1, 0), Op::Len(Some(0))],
    ] {
        assert!(!is_linearizable::<3, 1>(&one_by_one(wrong)), "{wrong:?}");
    }
}
