//! Threads that run random steps on one queue: each accepted message is received, drained or dropped exactly
//! once, and those of one sender and priority come in order. No thread sleeps for ever: three senders and three
//! receivers wait without a limit, some of them at descriptors, and another thread takes wake-ups and gives up.
#![cfg(not(offlock_model))]

#[path = "mq_ops/mod.rs"]
#[expect(dead_code, reason = "this program uses a part of it")]
mod mq_ops;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Queue, RbTree, ReceiveError, Receiver, SendRefused, Sender};
use testkit::canary::{Canary, Census};
use testkit::rng;
use testkit::stress::keep_running;
use testkit::watchdog::watched;

use mq_ops::Style;
use mq_ops::queue_ops::{Checker, EDGES, Got, Keyed, Numbered, Patience, Runner, Sent};

/// A set of distinct numbers, represented by a count and a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    count: u64,
    hash: u64,
}

impl Sum {
    fn add(&mut self, value: u64) {
        self.count += 1;
        let mixed = (value ^ value >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.hash = self.hash.wrapping_add(mixed ^ mixed >> 29);
    }

    fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, hash: self.hash.wrapping_add(other.hash) }
    }
}

/// A thread's record of messages. A message's number is its lane, its priority, and its serial in the lane.
/// Each thread has a lane, and so has each of its futures, because their order is open.
struct Ledger<L: Keyed> {
    /// Messages whose send succeeded.
    accepted: Sum,
    /// Messages received or drained.
    taken: Sum,
    thread: u64,
    numbers: u64,
    lanes: u64,
    /// The last serial received from each lane and priority.
    last: BTreeMap<(u64, L::Priority), u64>,
    open: bool,
}

impl<L: Keyed> Ledger<L> {
    fn new(thread: u64) -> Self {
        let (accepted, taken) = (Sum::default(), Sum::default());
        Self { accepted, taken, thread, numbers: 0, lanes: 0, last: BTreeMap::new(), open: true }
    }

    /// Records a received message; `in_order` if it was the oldest of its priority.
    fn take(&mut self, (key, number): Numbered<L>, in_order: bool) {
        self.taken.add(number);
        let (lane, level, serial) = (number >> 40, number >> 32 & 0xff, number & 0xffff_ffff);
        assert!(L::key(EDGES[level as usize]) == key);
        if in_order {
            let last = self.last.insert((lane, key), serial).unwrap_or(0);
            assert!(last < serial, "{serial} of lane {lane} came after {last}");
        }
    }
}

impl<L: Keyed> Checker<L> for Ledger<L> {
    fn number(&mut self, key: L::Priority, waits: bool) -> u64 {
        self.numbers += 1;
        self.lanes += u64::from(waits);
        let lane = self.thread + if waits { self.lanes * 8 } else { 0 };
        let level = EDGES.iter().position(|edge| L::key(*edge) == key).unwrap();
        lane << 40 | (level as u64) << 32 | self.numbers
    }

    fn sent(&mut self, (_, number): Numbered<L>, late: bool, result: Sent) {
        match result {
            Ok(()) => self.accepted.add(number),
            Err(SendRefused::Closed) => self.open = false,
            Err(SendRefused::Timeout) => assert!(late),
            Err(SendRefused::Full | SendRefused::BadPriority { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    fn sent_batch(&mut self, batch: &[Numbered<L>], sent: usize, result: Sent) {
        batch[..sent].iter().for_each(|(_, number)| self.accepted.add(*number));
        batch.get(sent).into_iter().for_each(|next| self.sent(*next, false, result));
    }

    fn received(&mut self, late: bool, got: Got<L>) {
        match got {
            Ok(message) => self.take(message, true),
            Err(ReceiveError::Closed) => self.open = false,
            Err(error) => assert!(error == ReceiveError::Empty || late, "{error}"),
        }
    }

    fn received_batch(&mut self, _most: usize, got: Result<Vec<Numbered<L>>, ReceiveError>) {
        match got {
            Ok(all) => all.into_iter().for_each(|message| self.take(message, true)),
            Err(error) => self.received(false, Err(error)),
        }
    }

    fn drained(&mut self, _: &dyn Fn(u64) -> bool, out: Vec<Numbered<L>>) {
        out.into_iter().for_each(|message| self.take(message, false));
    }

    fn began_receive(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn polled_receive(&mut self, _id: u64, polled: Poll<Got<L>>) {
        if let Poll::Ready(got) = polled {
            self.received(false, got);
        }
    }

    fn polled_send(&mut self, number: u64, polled: Poll<Sent>) {
        if let Poll::Ready(result) = polled {
            self.sent((L::key(0), number), false, result);
        }
    }
}

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
fn round<L: Keyed<Priority: Send + Sync>>(seed: u64) -> [u64; 2] {
    let mut rng = rng::seeded(seed * 16);
    let mut head = [0; 6];
    rng.fill(&mut head);
    head[1] %= if seed.is_multiple_of(4) { 255 } else { 128 }; // mostly at most eight messages
    let builder = mq_ops::limits(&head).builder::<L>().spin(!seed.is_multiple_of(3));
    let (sender, receiver) = builder.channel().unwrap();
    let end = [End::Closed, End::NoSenders, End::NoReceivers][rng.usize(..3)];
    let length = Duration::from_millis(5 + rng.u64(..60));
    let (census, steps) = (Census::new(), AtomicU64::new(0));
    let (no_more_sends, no_more_receives) = (AtomicBool::new(false), AtomicBool::new(false));
    let act = |thread: usize, queue: &Queue<Canary, L>| {
        let (style, patience) = PARTIES[thread];
        let mut rng = rng::seeded(seed * 16 + 1 + thread as u64);
        let (mut ledger, mut step) = (Ledger::<L>::new(thread as u64), [0; 4]);
        let mut runner = Runner::new(queue, &census, patience);
        let is_over = || match style {
            Style::Sends => no_more_sends.load(Relaxed),
            Style::Receives => no_more_receives.load(Relaxed),
            _ => no_more_sends.load(Relaxed) || no_more_receives.load(Relaxed),
        };
        while ledger.open && !is_over() {
            rng.fill(&mut step);
            mq_ops::step(style, &step).into_iter().for_each(|step| runner.step(&mut ledger, step));
            if patience == Patience::Brief && rng.usize(..8) == 0 {
                thread::sleep(Duration::from_micros(50));
            }
            steps.fetch_add(1, Relaxed);
        }
        (ledger.accepted, ledger.taken)
    };
    // One side ends with its threads. The other handle keeps its side open.
    let (kept_sender, kept_receiver): (Option<Sender<_, L>>, Option<Receiver<_, L>>) = match end {
        End::NoSenders => (None, Some(receiver.clone())),
        End::Closed | End::NoReceivers => (Some(sender.clone()), None),
    };
    let kept: &Queue<Canary, L> = match (&kept_sender, &kept_receiver) {
        (Some(sender), _) => sender,
        (_, receiver) => receiver.as_ref().unwrap(),
    };
    let (accepted, taken) = watched(
        || steps.load(Relaxed),
        || format!("seed {seed}, {end:?}\n{}", kept.stats()),
        || {
            thread::scope(|scope| {
                let threads: Vec<_> = (0..PARTIES.len())
                    .map(|thread| {
                        let style = PARTIES[thread].0;
                        let sender = (!matches!(style, Style::Receives)).then(|| sender.clone());
                        let receiver = (!matches!(style, Style::Sends)).then(|| receiver.clone());
                        let act = &act;
                        scope.spawn(move || match (&sender, &receiver) {
                            (Some(queue), _) => act(thread, queue),
                            (_, queue) => act(thread, queue.as_ref().unwrap()),
                        })
                    })
                    .collect();
                drop((sender, receiver));
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
                let ledgers = threads.into_iter().map(|thread| thread.join().unwrap());
                ledgers.fold((Sum::default(), Sum::default()), |all, more| {
                    (all.0.and(more.0), all.1.and(more.1))
                })
            })
        },
    );
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

fn rounds<L: Keyed<Priority: Send + Sync>>() {
    let until = Instant::now() + testkit::stress::stress_time(5);
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
