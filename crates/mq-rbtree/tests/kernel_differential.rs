//! The kernel's queue and this crate's give the same values, errors and order.
//!
//! The test runs in an IPC namespace of its own, where it can make deep queues.

#![cfg(all(feature = "kernel", not(any(offlock_loom, offlock_shuttle))))]

#[path = "common/asleep.rs"]
mod asleep;
#[path = "common/namespace.rs"]
mod namespace;
#[path = "kernel_differential/side.rs"]
mod side;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;

use mq_rbtree::{Attributes, KernelQueue, MessageQueue, Queue};
use namespace::{is_child, run_in_one, say_refused};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use side::{How, Op, Reply, Side};

/// The depth of the queues, if the test may raise the kernel's limit.
const DEPTH: usize = 256;
const MESSAGE_BYTES: usize = 16;
const CASES: u32 = 256;

fn priority() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 0..4_u32,
        4 => prop::sample::select(vec![31, 63, 64, 65, 4_095, 4_096, 32_766, 32_767]),
        4 => 0..32_768_u32,
        1 => prop::sample::select(vec![32_768, 65_536, u32::MAX]), // invalid priorities
    ]
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        20 => prop::collection::vec(any::<u8>(), 0..=MESSAGE_BYTES),
        1 => prop::collection::vec(any::<u8>(), MESSAGE_BYTES + 1..2 * MESSAGE_BYTES),
    ]
}

fn how() -> impl Strategy<Value = How> {
    /// A time that is not reached during a test.
    const FAR: i64 = i64::MAX;
    let second = 1_000_000_000_i64;
    prop_oneof![
        8 => Just(How::Now),
        2 => Just(How::Patient),
        1 => any::<bool>().prop_map(|realtime| How::Past { realtime }),
        1 => any::<bool>().prop_map(|realtime| How::Short { realtime }),
        1 => prop::sample::select(vec![
            (0, 0),
            (0, second - 1),
            (1, second - 1),
            (FAR, 0),
            (FAR, second - 1),
            (0, second),
            (FAR, second),
            (-1, 0),
            (i64::MIN, 0),
            (1, -1),
            (1, i64::MIN),
            (FAR, i64::MAX),
        ])
        .prop_map(|(seconds, nanoseconds)| How::Timespec { seconds, nanoseconds }),
    ]
}

fn valid() -> impl Strategy<Value = (Vec<u8>, u32)> {
    (prop::collection::vec(any::<u8>(), 0..=MESSAGE_BYTES), priority())
        .prop_map(|(message, priority)| (message, priority % 32_768))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (message(), priority(), how()).prop_map(|(m, p, h)| Op::Send(m, p, h)),
        6 => how().prop_map(Op::Receive),
        2 => Just(Op::Notify),
        1 => Just(Op::CancelNotify),
        1 => prop::collection::vec(valid(), 1..DEPTH + 8).prop_map(Op::Fill),
        1 => (1..DEPTH + 8).prop_map(Op::Drain),
        1 => prop::collection::vec(valid(), 1..4).prop_map(Op::WaitingReceivers),
        1 => prop::collection::vec(valid(), 1..4).prop_map(Op::WaitingSenders),
    ]
}

/// Generates a queue of at most `deepest` messages, and operations on it.
fn trace(deepest: usize) -> impl Strategy<Value = (usize, Vec<Op>)> {
    let depth =
        prop_oneof![1..4_usize, 1..=deepest, Just(deepest)].prop_map(move |n| n.min(deepest));
    (depth, prop::collection::vec(op(), 1..60))
}

#[test]
fn inv19_the_kernels_queue_gives_the_same_results() {
    if let Err(why) = run_in_one("child_compares", false) {
        say_refused(&why);
        compare(msg_max());
    }
}

#[test]
#[ignore = "a child of the test above"]
fn child_compares() {
    if !is_child("child_compares") {
        return;
    }
    if let Err(error) = fs::write(MSG_MAX, DEPTH.to_string()) {
        // Older kernels allow this only to the root of the system.
        say_refused(&format!("msg_max: {error}"));
    }
    compare(msg_max().min(DEPTH));
}

const MSG_MAX: &str = "/proc/sys/fs/mqueue/msg_max";

fn msg_max() -> usize {
    fs::read_to_string(MSG_MAX).unwrap().trim().parse().unwrap()
}

fn compare(deepest: usize) {
    println!("queues of up to {deepest} messages");
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        max_shrink_time: 60_000, // a missing callback takes seconds each time
        ..Config::default()
    };
    let seen = RefCell::new(BTreeMap::new());
    let outcome = TestRunner::new(config).run(&trace(deepest), |(max_messages, ops)| {
        let attributes = Attributes { max_messages, max_message_bytes: MESSAGE_BYTES };
        let kernel = KernelQueue::new(attributes).unwrap();
        let ours = ours(attributes);
        let (mut theirs, mut ours) = (Side::kernel(&kernel), Side::ours(&ours));
        // The end of a trace shows whether a callback is registered.
        let ends = [Op::Notify, Op::Drain(max_messages + 1)];
        for (number, op) in ops.iter().chain(&ends).enumerate() {
            let got = ours.run(op, false);
            let expected = theirs.run(op, got.0.contains(&Reply::Called));
            prop_assert_eq!(&got, &expected, "op {}: {:?}; ours, the kernel's", number, op);
            got.0.iter().for_each(|reply| *seen.borrow_mut().entry(kind(reply)).or_insert(0) += 1);
            let waited = match op {
                Op::WaitingReceivers(_) if !got.0.is_empty() => "waited to receive",
                Op::WaitingSenders(_) if !got.0.is_empty() => "waited to send",
                _ => continue,
            };
            *seen.borrow_mut().entry(waited.to_owned()).or_insert(0) += 1;
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let seen = seen.into_inner();
    println!("{seen:?}");
    for (what, errno) in [
        ("refused", libc::EAGAIN),
        ("refused", libc::ETIMEDOUT),
        ("refused", libc::EMSGSIZE),
        ("refused", libc::EINVAL),
        ("nothing", libc::EAGAIN),
        ("nothing", libc::ETIMEDOUT),
        ("nothing", libc::EINVAL),
        ("registered", libc::EBUSY),
    ] {
        assert!(seen.contains_key(&format!("{what} {errno}")), "no {what} {errno} was seen");
    }
    let all = ["sent", "received", "registered 0", "called", "waited to receive", "waited to send"];
    for what in all {
        assert!(seen.contains_key(what), "nothing was {what}");
    }
}

fn kind(reply: &Reply) -> String {
    match reply {
        Reply::Sent => "sent".to_owned(),
        Reply::Received(_) => "received".to_owned(),
        Reply::Called => "called".to_owned(),
        Reply::Refused(_, errno) => format!("refused {errno}"),
        Reply::Nothing(errno) => format!("nothing {errno}"),
        Reply::Registered(done) => format!("registered {}", done.err().unwrap_or(0)),
    }
}

fn ours(Attributes { max_messages, max_message_bytes }: Attributes) -> Queue<Vec<u8>> {
    let longest = max_message_bytes.try_into().unwrap();
    let builder = Queue::builder(max_messages).measure(Vec::len).max_message_bytes(longest);
    let queue = builder.build().unwrap();
    assert_eq!(MessageQueue::attributes(&queue), Attributes { max_messages, max_message_bytes });
    queue
}
