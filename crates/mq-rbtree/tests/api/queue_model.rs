//! Queues with all kinds of limits against a model, on one thread: messages, levels, and wake-ups. By random
//! steps, by the fuzz target's corpus, and by written steps.
#![cfg(not(offlock_model))]

use crate::queue_ops::bytes::{self, Style};
use crate::queue_ops::{self, Limits, Step};

use std::cmp::Reverse;

use mq_rbtree::{Bitmap, RbTree};
use proptest::prelude::*;

/// The number of cases: `PROPTEST_CASES`, or a few.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(25, |cases| cases.parse().expect("a number")))
}

/// Generates limits and steps, as bytes.
fn input() -> impl Strategy<Value = ([u8; 6], Vec<u8>)> {
    (any::<[u8; 6]>(), prop::collection::vec(any::<u8>(), 0..800))
}

/// Runs steps of a style. The kinds: a bitmap, a tree, and a tree whose least key comes first.
fn random(kind: u8, style: Style, (head, steps): &([u8; 6], Vec<u8>)) {
    let mut head = *head;
    head[0] = kind;
    head[2] = 2 * style as u8 + head[2] % 2;
    bytes::run(&[&head[..], steps].concat());
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv03_a_queue_follows_the_order_of_its_keys(input in input()) {
        (0..3).for_each(|kind| random(kind, Style::Plain, &input));
    }

    /// The model compares lengths, bytes, levels and waiters, and the order of the wake-ups.
    #[test]
    fn inv02_a_queue_with_waiting_tasks_matches_the_model(input in input()) {
        (0..2).for_each(|kind| random(kind, Style::Mixed, &input));
    }

    /// Few places and many senders: each is woken once, in the order of arrival. A sender
    /// that only a reserve keeps out does not block the others.
    #[test]
    fn inv10_tasks_are_woken_in_the_order_of_arrival((mut head, steps) in input()) {
        head[1] %= 128; // at most eight messages
        random(0, Style::Crowded, &(head, steps));
    }

    #[test]
    fn inv23_random_bytes_allocate_nothing_under_the_lock((head, steps) in input()) {
        bytes::run(&[&head[..], &steps].concat());
    }
}

#[test]
fn inv17_every_input_of_the_corpus_loses_no_message() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/mq_ops");
    testkit::corpus::replay(corpus, 12, 400, bytes::run);
}

// Written steps, for defects that random ones find late.

const RECEIVE: Step = Step::Receive { late: false };
const WAIT: Step = Step::WaitToReceive;
const WRITABLE: Step = Step::Clear { writable: true };

fn send(priority: u8) -> Step {
    Step::Send { priority, late: false, refused: 0 }
}

fn wait(priority: u8) -> Step {
    Step::WaitToSend { priority }
}

fn poll(which: u8) -> Step {
    Step::PollReceive { which, other_waker: false }
}

fn poll_send(which: u8) -> Step {
    Step::PollSend { which, other_waker: false, refused: 0 }
}

/// Runs the steps on each kind of queue, with and without a look at the whole queue after each step.
fn run(limits: &Limits, steps: &[Step]) {
    for quiet in [false, true] {
        let limits = Limits { quiet, ..limits.clone() };
        queue_ops::run::<Bitmap>(&limits, steps);
        queue_ops::run::<RbTree<u32>>(&limits, steps);
        queue_ops::run::<RbTree<Reverse<u64>>>(&limits, steps);
    }
}

/// A future is dropped while it is listed, when it was woken, and when its message is gone. Each time the next
/// one proceeds in its place.
#[test]
fn inv09_a_receive_dropped_at_any_stage_loses_no_message() {
    let gone = Step::DropReceive { which: 0 };
    run(&Limits::plain(4), &[WAIT, WAIT, gone, send(1), poll(0)]);
    run(&Limits::plain(4), &[WAIT, WAIT, send(1), gone, poll(0)]);
    run(&Limits::plain(4), &[WAIT, WAIT, send(1), RECEIVE, gone, poll(0), send(1), poll(0)]);
}

#[test]
fn inv08_a_batch_wakes_a_receiver_for_each_message() {
    let batch = Step::SendBatch { count: 2, priority: 1 };
    run(&Limits::plain(2), &[WAIT, WAIT, WAIT, batch, poll(0), poll(1), send(1), poll(0)]);
}

/// A receive beside blocked senders wakes the first one, which sends its message by itself.
#[test]
fn inv11_a_receive_wakes_one_blocked_sender() {
    let full = [send(5), send(5), send(5), wait(9), wait(1)];
    let rest = [RECEIVE, poll_send(0), RECEIVE, poll_send(0), Step::Drain];
    run(&Limits::plain(3), &[&full[..], &rest].concat());
}

#[test]
fn a_close_ends_every_wait() {
    let (receives, sends) = ([WAIT; 20], [wait(1); 20]);
    let polls = [poll(0); 20];
    run(&Limits::plain(1), &[&receives[..], &[send(1), Step::Close], &polls].concat());
    let polls = [poll_send(0); 20];
    run(
        &Limits::plain(1),
        &[&[send(1)], &sends[..], &[Step::Close], &polls, &[RECEIVE; 2]].concat(),
    );
}

#[test]
fn a_sender_blocked_by_a_reserve_does_not_block_later_senders() {
    let limits = Limits { reserves: vec![(8, 2)], ..Limits::plain(4) };
    let full = [send(9), send(9), send(10), send(10), wait(1), wait(8), wait(9)];
    let rest = [RECEIVE, poll_send(1), RECEIVE, poll_send(1), RECEIVE, RECEIVE, RECEIVE];
    run(&limits, &[&full[..], &rest, &[poll_send(0); 2]].concat());
}

/// A message that is received alone from the ring takes the slot of the next one: the order is that of a
/// queue without a ring. Nothing else drains the ring in between.
#[test]
fn inv01_a_message_that_is_alone_in_the_ring_keeps_the_order() {
    for (depth, levels) in [(1, 2), (2, 2), (3, 3), (8, 3), (100, 1), (100, 8), (300, 13)] {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |n: u64| {
            seed = seed.rotate_left(17).wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(n);
            send((seed >> 32) as u8 % levels)
        };
        let mut steps: Vec<_> = (0..depth).map(&mut next).collect();
        steps.extend((depth..2_000).flat_map(|n| [next(n), RECEIVE]));
        for ageing in [None, Some(3)] {
            let limits = Limits { ageing, quiet: true, ..Limits::plain(depth as usize + 1) };
            queue_ops::run::<Bitmap>(&limits, &steps);
        }
    }
}

#[test]
fn inv14_a_descriptor_tells_of_room() {
    let full = [send(1), send(1), WRITABLE, RECEIVE, WRITABLE, send(1), WRITABLE];
    // A wait that ends by a drop makes no room, and a close ends all.
    let rest = [wait(1), Step::DropSend { which: 0 }, WRITABLE, Step::Close, WRITABLE];
    run(&Limits::plain(2), &[&[WRITABLE][..], &full, &rest].concat());
}

#[test]
fn inv25_a_message_goes_back_in_front_of_newer_ones() {
    let lent = [send(5), send(5), send(1), Step::Guard, Step::Guard, send(5), send(9)];
    let back = [1, 0].map(|which| Step::DropGuard { which });
    run(&Limits::plain(8), &[&lent[..], &back, &[Step::Drain]].concat());
}

#[test]
fn the_peak_is_of_the_messages_in_the_queue_and_in_guards_together() {
    let (accept, back) = (Step::AcceptGuard { which: 0 }, Step::DropGuard { which: 0 });
    let lent = [send(5), Step::Guard, send(5), send(5), accept];
    // Without a look at the queue since the sends. The message that comes back is counted once.
    run(&Limits::plain(8), &lent);
    run(
        &Limits::plain(8),
        &[&lent[..], &[Step::Guard, send(5), back, Step::Guard, send(5)]].concat(),
    );
}

/// One allocation that is refused fails no send. Without memory a send changes nothing and gives the message
/// back.
#[test]
fn inv06_without_memory_a_send_changes_nothing_and_gives_the_message_back() {
    for refused in 0..6 {
        let short = |n| Step::Send { priority: n, late: false, refused };
        let sends: Vec<_> = (0..200).map(|n| short(n / 15)).collect();
        run(
            &Limits { spare: 0, ..Limits::plain(300) },
            &[&sends[..], &[send(13), Step::Drain]].concat(),
        );
    }
}

/// A sender that is woken for room and has no memory for its level leaves the room to the next one.
#[test]
fn inv06_a_blocked_sender_without_memory_gets_its_message_back() {
    for spare in [0, 1] {
        let full = [send(5), send(5), send(4), wait(9), wait(5)];
        let short = Step::PollSend { which: 0, other_waker: false, refused: 5 };
        let limits = Limits { spare, ..Limits::plain(3) };
        run(&limits, &[&full[..], &[RECEIVE, short, poll_send(0), Step::Drain]].concat());
    }
}
