//! Threads that send and receive with all operations: each accepted message is received, drained or
//! dropped exactly once, and the messages of one sender and priority come in order.
#![cfg(not(offlock_model))]

mod ledger;
mod parties;
#[path = "../common/wait.rs"]
mod wait;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Builder, Levels, QueueStats, RbTree, Receiver, Sender};

use ledger::Ledger;
use parties::Party;
use testkit::canary::{Canary, Census};
use testkit::rng::{self, Rng};
use testkit::stress::keep_running;
use testkit::watchdog::watched;

/// The number of distinct priorities.
const PRIORITIES: usize = 5;

/// Levels with some of their priorities, in order.
trait Keyed: Levels<Priority: Send + Sync + PartialEq> {
    fn key(n: usize) -> Self::Priority;
}

impl Keyed for Bitmap {
    fn key(n: usize) -> u32 {
        [0, 1, 63, 64, 32_767][n]
    }
}

impl Keyed for RbTree<i64> {
    fn key(n: usize) -> i64 {
        n as i64 - 2
    }
}

/// Returns a builder with random options.
fn builder<L: Keyed>(rng: &mut Rng) -> Builder<Canary, L> {
    let small = rng.usize(..3) + 1;
    match rng.usize(..7) {
        0 => Builder::new(1),
        1 => Builder::new(small).spin(false),
        2 => Builder::new(8),
        3 => Builder::new(16).reserve(L::key(3), 8).reserve(L::key(4), 4),
        4 => Builder::new(64).no_alloc().ageing(NonZeroU32::new(3).unwrap()),
        5 => Builder::new(1_000).spare_nodes(rng.usize(..3)),
        _ => Builder::new(small).reserve(L::key(2), small - 1),
    }
}

/// The way in which a round ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Closed,
    NoSenders,
    NoReceivers,
}

/// A handle that keeps one side open.
enum KeptHandle<L: Keyed> {
    Sender(Sender<Canary, L>),
    Receiver(Receiver<Canary, L>),
}

macro_rules! of_either {
    ($($name:ident -> $gives:ty;)*) => {
        impl<L: Keyed> KeptHandle<L> {$(
            fn $name(&self) -> $gives {
                match self {
                    Self::Sender(sender) => sender.$name(),
                    Self::Receiver(receiver) => receiver.$name(),
                }
            }
        )*}
    };
}

of_either! {
    stats -> QueueStats;
    close -> bool;
    is_closed -> bool;
    validate -> ();
}

/// Runs threads on one queue for some milliseconds. Returns the number of messages accepted.
fn round<L: Keyed>(seed: u64) -> u64 {
    let mut rng = rng::seeded(seed * 16);
    let (sender, receiver) = builder::<L>(&mut rng).channel().unwrap();
    let end = [End::Closed, End::NoSenders, End::NoReceivers][rng.usize(..3)];
    let length = Duration::from_millis(5 + rng.usize(..60) as u64);
    let (census, steps) = (Census::default(), AtomicU64::new(0));
    let (no_more_sends, no_more_receives) = (AtomicBool::new(false), AtomicBool::new(false));
    let party = |number: usize| Party::<L> {
        number,
        rng: rng::seeded(seed * 16 + 1 + number as u64),
        ledger: Ledger::default(),
        census: &census,
        steps: &steps,
        levels: std::marker::PhantomData,
    };
    // One side ends with its threads.
    let kept = match end {
        End::NoSenders => KeptHandle::Receiver(receiver.clone()),
        End::Closed | End::NoReceivers => KeptHandle::Sender(sender.clone()),
    };
    let ledgers: Vec<Ledger> = watched(
        || steps.load(Relaxed),
        || format!("seed {seed}, {end:?}\n{}", kept.stats()),
        || {
            thread::scope(|scope| {
                let (senders, receivers) = (&no_more_sends, &no_more_receives);
                let mut threads = Vec::new();
                for number in 0..2 {
                    let (mut each, sender) = (party(number), sender.clone());
                    threads.push(scope.spawn(move || {
                        each.send_until(&sender, senders);
                        each.ledger
                    }));
                    let (mut each, receiver) = (party(number + 2), receiver.clone());
                    threads.push(scope.spawn(move || {
                        each.receive_until(&receiver, receivers);
                        each.ledger
                    }));
                }
                let mut each = party(4);
                threads.push(scope.spawn(move || {
                    each.exchange_until(&sender, &receiver, senders, receivers);
                    each.ledger
                }));
                thread::sleep(length);
                match end {
                    End::Closed => assert!(kept.close()),
                    End::NoSenders => senders.store(true, Relaxed),
                    End::NoReceivers => receivers.store(true, Relaxed),
                }
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            })
        },
    );
    let all = ledgers.into_iter().fold(Ledger::default(), Ledger::and);
    kept.validate();
    let stats = kept.stats();
    assert_eq!((stats.waiting, stats.depth, kept.is_closed()), ((0, 0), 0, true));
    assert_eq!((stats.sent, stats.received), (all.accepted.count, all.accepted.count));
    // The last receiver drops the messages that it does not receive.
    assert!(all.taken == all.accepted || end == End::NoReceivers, "seed {seed}, {end:?}");
    assert!(all.taken.count <= all.accepted.count);
    assert_eq!(census.alive(), 0, "what was refused or given up is dropped, too");
    stats.sent
}

fn rounds<L: Keyed>() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let (mut seed, mut accepted) = (0, 0);
    while keep_running(until, || accepted > 100) {
        accepted += round::<L>(seed);
        seed += 1;
    }
    println!("{seed} rounds, {accepted} messages");
    assert!(accepted > 100);
}

#[test]
fn inv17_threads_conserve_messages() {
    for seed in 0..4 {
        round::<Bitmap>(seed);
        round::<RbTree<i64>>(seed);
    }
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv17_threads_on_a_bitmap_lose_and_double_no_message() {
    rounds::<Bitmap>();
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv17_threads_on_a_tree_lose_and_double_no_message() {
    rounds::<RbTree<i64>>();
}
