//! Senders and receivers of every kind at once, and a close: the threads of `stress.rs`. This is too much for loom,
//! which runs the parts of it: [`threads`](super::threads), [`tasks`](super::tasks) and [`closing`](super::closing).
//!
//! The steps of each thread are fixed; the schedule decides which of them meet.
#![cfg(offlock_shuttle)]

use mq_rbtree::{Bitmap, RbTree};
use offlock_sync::{Arc, model, thread};
use testkit::canary::Census;
use testkit::rng;

use crate::ledger::{Ledger, Sum};
use crate::queue_ops::bytes::{self, Style};
use crate::queue_ops::{Keyed, Limits, Patience, Runner};

const PARTIES: [(Style, Patience); 6] = [
    (Style::Sends, Patience::Forever),
    (Style::Sends, Patience::Forever),
    (Style::Exchange, Patience::Brief),
    (Style::Exchange, Patience::Brief),
    (Style::Receives, Patience::Forever),
    (Style::Receives, Patience::Forever),
];
/// The steps of a thread that does not receive until the end.
const EACH: usize = 8;

/// Checks conservation: each message that was sent is received or in the queue; the others were returned, or
/// dropped with their future.
fn mixed<L: Keyed>(closes_early: bool) {
    model(move || {
        let census = Census::new();
        let queue = Arc::new(Limits::plain(2).builder::<L>().build().unwrap());
        let start = |thread: usize| {
            let (queue, census, (style, patience)) =
                (Arc::clone(&queue), census.clone(), PARTIES[thread]);
            thread::spawn(move || {
                let (mut rng, mut step) = (rng::seeded(thread as u64), [0; 4]);
                let mut ledger = Ledger::<L>::new();
                let mut runner = Runner::new(&queue, &census, thread as u64, patience);
                let mut steps = 0;
                while ledger.open && (steps < EACH || style == Style::Receives) {
                    rng.fill(&mut step);
                    step[3] %= 8; // the messages of a batch
                    if let Some(step) = bytes::step(style, &step) {
                        runner.step(step, &mut |outcome| ledger.check(outcome));
                    }
                    steps += 1;
                }
                ledger
            })
        };
        let mut threads: Vec<_> = (0..PARTIES.len()).map(start).collect();
        let receivers = threads.split_off(4);
        if closes_early {
            while queue.stats().sent < 6 {
                thread::yield_now();
            }
            queue.close();
        }
        let mut ledgers: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(closes_early || ledgers.iter().all(|ledger| ledger.open));
        queue.validate();
        queue.close();
        ledgers.extend(receivers.into_iter().map(|thread| thread.join().unwrap()));
        let accepted: Sum = ledgers.iter().map(|ledger| ledger.accepted).sum();
        let taken: Sum = ledgers.iter().map(|ledger| ledger.taken).sum();
        let stats = queue.stats();
        assert_eq!((taken, stats.sent, stats.depth), (accepted, accepted.count, 0));
        assert_eq!((stats.waiting, census.alive()), ((0, 0), 0));
    });
}

#[test]
fn inv09_mixed_operations_conserve_messages() {
    mixed::<RbTree<u32>>(false);
}

#[test]
fn inv09_mixed_operations_race_a_close() {
    mixed::<Bitmap>(true);
}
