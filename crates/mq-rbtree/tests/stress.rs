//! Threads that run random steps on one queue, with two kinds of record.
//!
//! Conservation: each accepted message is received, drained or dropped exactly once, and those of one sender and
//! priority come in order. No thread sleeps for ever: three senders and three receivers wait without a limit, some
//! of them at descriptors, and another thread takes wake-ups and gives up.
//!
//! Linearizability: some sequential order of the operations gives the same results on a queue of one thread. Each
//! operation lies between two tickets of one counter. The checker is that of Wing, Gong and Lowe.
#![cfg(not(offlock_model))]

#[path = "common/ledger.rs"]
mod ledger;
#[expect(dead_code, reason = "this program uses a part of it")]
mod queue_ops;

use std::ops::Deref;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Queue, RbTree, ReceiveError, Receiver, SendRefused, Sender};
use testkit::block_on;
use testkit::canary::Census;
use testkit::rng;
use testkit::stress::{keep_running, stress_time};
use testkit::watchdog::watched;
use todc_utils::linearizability::WGLChecker;
use todc_utils::linearizability::history::{Action, History};
use todc_utils::specifications::Specification;

use ledger::{Ledger, Sum};
use queue_ops::bytes::{self, Style};
use queue_ops::{Keyed, Limits, Message, Outcome, Patience, Runner, Sent, Step};

type Handle<L> = Box<dyn Deref<Target = Queue<Message, L>> + Send + Sync>;

/// Runs `act` in a thread for each style, which has a handle of its side until then, and `main` beside them. The
/// threads count their steps.
fn run_threads<L: Keyed, R: Send>(
    styles: impl Iterator<Item = Style>,
    (sender, receiver): (Sender<Message, L>, Receiver<Message, L>),
    act: impl Fn(usize, &Queue<Message, L>, &AtomicU64) -> R + Sync,
    report: impl Fn() -> String + Sync,
    main: impl FnOnce(),
) -> Vec<R> {
    let (act, steps) = (&act, &AtomicU64::new(0));
    let run = || {
        thread::scope(|scope| {
            let start = |(thread, style)| {
                let handle: Handle<L> = match style {
                    Style::Receives | Style::SingleReceives => Box::new(receiver.clone()),
                    _ => Box::new(sender.clone()),
                };
                scope.spawn(move || act(thread, &handle, steps))
            };
            let threads: Vec<_> = styles.enumerate().map(start).collect();
            drop((sender, receiver));
            main();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    watched(|| steps.load(Relaxed), report, run)
}

// Conservation.

/// The way in which a round ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Closed,
    NoSenders,
    NoReceivers,
}

/// The threads of a round, by the sides that they hold and their steps.
const PARTIES: [(Style, Patience); 7] = [
    (Style::Sends, Patience::Forever),
    (Style::Receives, Patience::Forever),
    (Style::Sends, Patience::Forever),
    (Style::Receives, Patience::Forever),
    (Style::Sends, Patience::Ready),
    (Style::Receives, Patience::Ready),
    // Never waits without a limit: one of its futures may have been woken for what it would wait for.
    (Style::Exchange, Patience::Brief),
];

/// Runs threads on one queue for some milliseconds. Returns the numbers of messages accepted and of timeouts.
fn round<L: Keyed>(seed: u64) -> [u64; 2] {
    let mut rng = rng::seeded(seed * 16);
    let mut head = [0; 6];
    rng.fill(&mut head);
    head[1] %= if seed.is_multiple_of(4) { 255 } else { 128 }; // mostly at most eight messages
    let builder = bytes::limits(&head).builder::<L>().spin(!seed.is_multiple_of(3));
    let (sender, receiver) = builder.channel().unwrap();
    let end = [End::Closed, End::NoSenders, End::NoReceivers][rng.usize(..3)];
    let length = Duration::from_millis(5 + rng.u64(..60));
    let census = Census::new();
    let (no_more_sends, no_more_receives) = (AtomicBool::new(false), AtomicBool::new(false));
    let act = |thread: usize, queue: &Queue<Message, L>, steps: &AtomicU64| {
        let (style, patience) = PARTIES[thread];
        let mut rng = rng::seeded(seed * 16 + 1 + thread as u64);
        let (mut ledger, mut step) = (Ledger::<L>::new(), [0; 4]);
        let mut runner = Runner::new(queue, &census, thread as u64, patience);
        let is_over = || match style {
            Style::Sends => no_more_sends.load(Relaxed),
            Style::Receives => no_more_receives.load(Relaxed),
            _ => no_more_sends.load(Relaxed) || no_more_receives.load(Relaxed),
        };
        while ledger.open && !is_over() {
            rng.fill(&mut step);
            if let Some(step) = bytes::step(style, &step) {
                runner.step(step, &mut |outcome| ledger.check(outcome));
            }
            if patience == Patience::Brief && rng.usize(..8) == 0 {
                thread::sleep(Duration::from_micros(50));
            }
            steps.fetch_add(1, Relaxed);
        }
        (ledger.accepted, ledger.taken)
    };
    // One side ends with its threads. The other handle keeps its side open.
    let kept: Handle<L> = match end {
        End::NoSenders => Box::new(receiver.clone()),
        End::Closed | End::NoReceivers => Box::new(sender.clone()),
    };
    let report = || format!("seed {seed}, {end:?}\n{}", kept.stats());
    let main = || {
        let until = Instant::now() + length;
        while Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
            kept.validate(); // no more messages than there may be
        }
        match end {
            End::Closed => assert!(kept.close()),
            End::NoSenders => no_more_sends.store(true, Relaxed),
            End::NoReceivers => no_more_receives.store(true, Relaxed),
        }
    };
    let styles = PARTIES.iter().map(|party| party.0);
    let ledgers = run_threads(styles, (sender, receiver), act, report, main);
    let accepted: Sum = ledgers.iter().map(|ledger| ledger.0).sum();
    let taken: Sum = ledgers.iter().map(|ledger| ledger.1).sum();
    kept.validate();
    let stats = kept.stats();
    assert_eq!((stats.waiting, stats.depth, kept.is_closed()), ((0, 0), 0, true));
    assert_eq!((stats.sent, stats.received), (accepted.count, accepted.count));
    // The last receiver drops the messages that it does not receive.
    assert!(taken == accepted || end == End::NoReceivers, "seed {seed}, {end:?}");
    assert!(taken.count <= accepted.count && stats.peak <= kept.max_messages());
    assert_eq!(census.alive(), 0, "what was refused or given up is dropped, too");
    [stats.sent, stats.timeouts]
}

fn rounds<L: Keyed>() {
    let until = Instant::now() + stress_time(5);
    let (mut seed, mut accepted, mut timeouts) = (0, 0, 0);
    while keep_running(until, || accepted > 100 && timeouts > 0) {
        let more = round::<L>(seed);
        (accepted, timeouts, seed) = (accepted + more[0], timeouts + more[1], seed + 1);
    }
    println!("{seed} rounds, {accepted} messages, {timeouts} timeouts");
    assert!(accepted > 100 && timeouts > 0);
}

#[test]
fn inv17_threads_on_a_bitmap_conserve_messages() {
    (0..4).for_each(|seed| _ = round::<Bitmap>(seed));
}

#[test]
fn inv14_threads_on_a_tree_lose_no_wake_up() {
    (0..4).for_each(|seed| _ = round::<RbTree<u32>>(seed));
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv24_threads_on_a_bitmap_exceed_no_limit_and_lose_no_message() {
    rounds::<Bitmap>();
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv09_threads_that_give_up_on_a_tree_lose_no_message() {
    rounds::<RbTree<u32>>();
}

// Linearizability.

/// From this place in `EDGES` on, the reserved place is available.
const URGENT: u8 = 6;

/// An operation with its result. A message is represented by its number, which has the priority.
#[derive(Clone, Debug)]
enum Op {
    Send(u64, Sent),
    Receive(Result<u64, ReceiveError>),
    /// Takes all messages at once.
    Drain(Vec<u64>),
    Len(usize),
    Close(bool),
}

fn level(id: u64) -> u8 {
    (id >> 32) as u8
}

/// The specification: a queue of `MAX` messages, of which `KEPT` places are reserved.
struct Spec<const MAX: usize, const KEPT: usize>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// The messages in the order in which they were sent.
    messages: Vec<u64>,
    closed: bool,
}

impl State {
    /// Takes the oldest message of the highest priority.
    fn take(&mut self) -> Option<u64> {
        let highest = self.messages.iter().map(|id| level(*id)).max()?;
        let at = self.messages.iter().position(|id| level(*id) == highest)?;
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
            Op::Send(id, said) => {
                let room = len < MAX - if level(*id) < URGENT { KEPT } else { 0 };
                match said {
                    Ok(()) => {
                        next.messages.push(*id);
                        room && !state.closed
                    }
                    Err(SendRefused::Closed) => state.closed,
                    // A send that timed out has found the queue full when it began to wait.
                    Err(SendRefused::Full | SendRefused::Timeout) => !room && !state.closed,
                    Err(_) => false,
                }
            }
            Op::Receive(Ok(id)) => next.take() == Some(*id),
            Op::Receive(Err(ReceiveError::Closed)) => len == 0 && state.closed,
            Op::Receive(Err(ReceiveError::Empty | ReceiveError::Timeout)) => {
                len == 0 && !state.closed
            }
            Op::Receive(Err(_)) => false,
            Op::Drain(all) => std::iter::from_fn(|| next.take()).collect::<Vec<_>>() == *all,
            Op::Len(said) => *said == len,
            Op::Close(was_open) => {
                next.closed = true;
                *was_open != state.closed
            }
        };
        (valid, next)
    }
}

type Actions = Vec<(usize, Action<Op>)>;

fn is_linearizable<const MAX: usize, const KEPT: usize>(actions: &Actions) -> bool {
    WGLChecker::<Spec<MAX, KEPT>>::is_linearizable(History::from_actions(actions.clone()))
}

/// The operations of one thread, with the tickets of their begin and end.
struct Recorder<'t> {
    tickets: &'t AtomicUsize,
    me: usize,
    began: usize,
    actions: Vec<(usize, (usize, Action<Op>))>,
}

impl Recorder<'_> {
    fn begin(&mut self) {
        self.began = self.tickets.fetch_add(1, SeqCst);
    }

    fn check<L: Keyed>(&mut self, outcome: Outcome<'_, L>) {
        let ended = self.tickets.fetch_add(1, SeqCst);
        let op = match outcome {
            Outcome::Sent { message, result, .. }
            | Outcome::PolledSend(message, Poll::Ready(result)) => Op::Send(message.1, result),
            Outcome::Received { got, .. } | Outcome::PolledReceive(_, Poll::Ready(got)) => {
                Op::Receive(got.map(|(_, id)| id))
            }
            Outcome::Drained { out, .. } => Op::Drain(out.iter().map(|(_, id)| *id).collect()),
            Outcome::Len(len) => Op::Len(len),
            Outcome::Closed(was_open) => Op::Close(was_open),
            // What a future that is dropped was to do has not taken place.
            _ => return,
        };
        self.actions.push((self.began, (self.me, Action::Call(op.clone()))));
        self.actions.push((ended, (self.me, Action::Response(op))));
    }
}

/// Records the operations of several threads.
fn record<L: Keyed, const MAX: usize, const KEPT: usize>(seed: u64, each: usize) -> Actions {
    let mut rng = rng::seeded(seed * 8);
    let limits = Limits { reserves: vec![(URGENT, 1); KEPT], ..Limits::plain(MAX) };
    let channel = limits.builder::<L>().spin(rng.usize(..2) == 0).channel().unwrap();
    let (sender, _receiver) = channel.clone();
    let census = Census::new();
    // The memory is there: messages come through the ring, unless a thread waits.
    let send = |_| sender.try_send(Message::new(0, &census), L::key(0));
    (0..MAX - KEPT).map(send).for_each(Result::unwrap);
    sender.drain();
    let sides = [Style::SingleSends, Style::SingleReceives];
    let mut styles = vec![Style::SingleExchange; 3];
    // Beside a sender that pauses an operation with a deadline may time out: there is one or the other.
    let waits = rng.usize(..2) == 0;
    if waits {
        styles[..2].copy_from_slice(&sides);
    }
    if rng.usize(..2) == 0 {
        styles.push(styles[rng.usize(..3)]);
    }
    let closes = rng.usize(..3) == 0;
    let (tickets, start) = (AtomicUsize::new(0), Barrier::new(styles.len()));
    // The threads that run, of each side.
    let running = sides.map(|side| AtomicUsize::new(styles.iter().filter(|s| **s == side).count()));
    let act = |me: usize, queue: &Queue<Message, L>, steps: &AtomicU64| {
        let mut rng = rng::seeded(seed * 8 + 1 + me as u64);
        let mut recorder = Recorder { tickets: &tickets, me, began: 0, actions: Vec::new() };
        let side = sides.iter().position(|side| *side == styles[me]);
        let patience = if side.is_some() { Patience::Forever } else { Patience::Brief };
        let mut runner = Runner::new(queue, &census, me as u64, patience);
        runner.has_guards = false;
        let mut step = [0; 4];
        start.wait();
        for _ in 0..each {
            rng.fill(&mut step);
            step[1] = step[1] % 4 * 3; // few priorities
            step[3] &= if waits { !0 } else { !1 }; // not late
            let step = match bytes::step(styles[me], &step) {
                Some(Step::SendPaused { priority, .. }) if waits => Step::WaitToSend { priority },
                Some(step) => step,
                None => continue,
            };
            recorder.begin();
            let mut run = |step| runner.step(step, &mut |outcome| recorder.check(outcome));
            run(step);
            // A future that waits is polled again, and dropped.
            if matches!(step, Step::WaitToReceive | Step::WaitToSend { .. }) && side.is_none() {
                for _ in 0..rng.usize(..3) {
                    thread::sleep(Duration::from_micros(50));
                    run(Step::PollReceive { which: 0, other_waker: false });
                    run(Step::PollSend { which: 0, other_waker: false, refused: 0 });
                }
                run(Step::DropReceive { which: 0 });
                run(Step::DropSend { which: 0 });
            }
            steps.fetch_add(1, Relaxed);
        }
        // The other side does not wait for threads that have ended.
        let is_last = side.is_some_and(|side| running[side].fetch_sub(1, SeqCst) == 1);
        if is_last || (closes && me == 0) {
            recorder.begin();
            runner.step(Step::Close, &mut |outcome| recorder.check(outcome));
        }
        recorder.actions
    };
    let report = || sender.stats().to_string();
    let actions = run_threads(styles.iter().copied(), channel, act, report, || ());
    let mut actions = actions.concat();
    sender.validate();
    actions.sort_by_key(|(ticket, _)| *ticket);
    actions.into_iter().map(|(_, action)| action).collect()
}

/// Records a history and checks it. Returns the number of its operations.
fn checked<L: Keyed, const MAX: usize, const KEPT: usize>(seed: u64, each: usize) -> usize {
    let actions = record::<L, MAX, KEPT>(seed, each);
    assert!(is_linearizable::<MAX, KEPT>(&actions), "seed {seed}: {actions:#?}");
    actions.len() / 2
}

fn histories<L: Keyed>(seed: u64, each: usize) -> usize {
    match seed % 5 {
        0 => checked::<L, 1, 0>(seed, each),
        1 => checked::<L, 2, 0>(seed, each),
        2 => checked::<L, 3, 0>(seed, each),
        3 => checked::<L, 8, 0>(seed, each),
        _ => checked::<L, 3, 1>(seed, each),
    }
}

#[test]
fn inv18_histories_are_linearizable() {
    for seed in 0..24 {
        histories::<Bitmap>(seed, 20);
        histories::<RbTree<u32>>(seed, 20);
    }
}

#[test]
#[ignore = "stress: seconds of histories"]
fn stress_inv18_what_threads_see_is_as_if_one_after_the_other() {
    let until = Instant::now() + stress_time(5);
    let (mut seed, mut operations) = (1_000, 0);
    while Instant::now() < until {
        operations += histories::<Bitmap>(seed, 40);
        operations += histories::<RbTree<u32>>(seed, 40);
        seed += 1;
    }
    println!("{} histories, {operations} operations", 2 * (seed - 1_000));
}

/// The checker rejects histories that no queue can produce.
#[test]
fn a_wrong_history_is_rejected() {
    let id = |value: u64, priority: u64| (3 * priority) << 32 | value;
    let sent = |value, priority| Op::Send(id(value, priority), Ok(()));
    let full = |priority| Op::Send(id(9, priority), Err(SendRefused::Full));
    let got = |value, priority| Op::Receive(Ok(id(value, priority)));
    let none = |why| Op::Receive(Err(why));
    let closed = Op::Close(true);
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
        Op::Len(3),
        got(2, 3),
        got(3, 3),
        closed.clone(),
        Op::Send(id(4, 3), Err(SendRefused::Closed)),
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
        &[sent(1, 0), sent(2, 3), Op::Drain(vec![id(1, 0), id(2, 3)])],
        &[sent(1, 0), Op::Len(0)],
    ] {
        assert!(!is_linearizable::<3, 1>(&one_by_one(wrong)), "{wrong:?}");
    }
}
