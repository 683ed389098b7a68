//! The kernel's queue and this crate's give the same values, errors and order.
//!
//! The test runs in an IPC namespace of its own, where it can make deep queues.
#![cfg(not(offlock_model))]

#[path = "common/asleep.rs"]
mod asleep;
#[path = "common/kernel.rs"]
mod kernel;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::fs;
use std::process::Command;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use mq_rbtree::Queue;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::child::in_own_process_by;

use asleep::asleep;
use kernel::{KernelQueue, MESSAGE_BYTES, Patience};

/// The depth of the queues, if the test may raise the kernel's limit.
const DEPTH: usize = 256;
const CASES: u32 = 256;
/// Longer than any step here takes.
const LONG: Duration = Duration::from_secs(60);
/// A deadline that is reached.
const SHORT: Duration = Duration::from_micros(200);

/// The wait of an operation. Only `Patient` and `Short` really wait, for a moment.
#[derive(Clone, Copy, Debug)]
enum How {
    /// Does not wait.
    Now,
    /// Waits without a limit if the operation can complete at once, otherwise until a short
    /// deadline.
    Patient,
    /// Waits until a deadline that is over.
    Past,
    /// Waits until a deadline that is reached.
    Short,
}

impl How {
    fn patience(self, would_wait: bool) -> Patience {
        match self {
            Self::Now => Patience::None,
            Self::Patient if !would_wait => Patience::Forever,
            Self::Patient | Self::Short => Patience::For(SHORT),
            Self::Past => Patience::For(Duration::ZERO),
        }
    }
}

type Message = (Vec<u8>, u32);

#[derive(Clone, Debug)]
enum Op {
    Send(Vec<u8>, u32, How),
    Receive(How),
    /// Sends without waiting until a message is refused, or none is left.
    Fill(Vec<Message>),
    /// Receives so many times without waiting.
    Drain(usize),
    /// If the queue is empty: so many threads wait to receive, then these messages are sent.
    WaitingReceivers(Vec<Message>),
    /// If the queue is full: a waiting thread sends each of these, then as many messages are
    /// received.
    WaitingSenders(Vec<Message>),
}

/// One reply: nothing or a message, or an errno.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Sent(Result<(), i32>),
    Received(Result<Message, i32>),
}

/// One of the two queues.
trait Side: Sync {
    fn send_for(&self, message: &[u8], priority: u32, wait: Patience) -> Result<(), i32>;
    fn receive_for(&self, wait: Patience) -> Result<Message, i32>;
    fn depth(&self) -> usize;
    /// Returns whether so many threads wait. The kernel's queue does not tell: a thread that sleeps waits.
    fn has_waiting(&self, _threads: usize) -> bool {
        true
    }
}

impl Side for KernelQueue {
    fn send_for(&self, message: &[u8], priority: u32, wait: Patience) -> Result<(), i32> {
        self.send(message, priority, wait)
    }

    fn receive_for(&self, wait: Patience) -> Result<Message, i32> {
        let mut message = [0; MESSAGE_BYTES];
        let (len, priority) = self.receive(&mut message, wait)?;
        Ok((message[..len].to_vec(), priority))
    }

    fn depth(&self) -> usize {
        self.len()
    }
}

impl Side for Queue<Vec<u8>> {
    fn send_for(&self, message: &[u8], priority: u32, wait: Patience) -> Result<(), i32> {
        let owned = message.to_vec();
        let sent = match wait {
            Patience::None => self.try_send(owned, priority),
            Patience::Forever => self.send(owned, priority),
            Patience::For(time) => self.send_deadline(owned, priority, Instant::now() + time),
        };
        sent.map_err(|refused| {
            assert_eq!(refused.value, message);
            refused.reason.errno()
        })
    }

    fn receive_for(&self, wait: Patience) -> Result<Message, i32> {
        let received = match wait {
            Patience::None => self.try_receive(),
            Patience::Forever => self.receive(),
            Patience::For(time) => self.receive_deadline(Instant::now() + time),
        };
        received.map_err(|error| error.errno())
    }

    fn depth(&self) -> usize {
        self.len()
    }

    fn has_waiting(&self, threads: usize) -> bool {
        let (send, receive) = self.stats().waiting;
        send + receive == threads
    }
}

/// Starts threads that wait, each once the one before it waits.
fn start_all<'scope, 'env, W: FnOnce() -> Reply + Send + 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    queue: &dyn Side,
    waits: impl Iterator<Item = W>,
) -> VecDeque<ScopedJoinHandle<'scope, Reply>> {
    let start = |(before, wait)| asleep(scope, wait, || queue.has_waiting(before + 1));
    waits.enumerate().map(start).collect()
}

/// Runs an operation on a queue of at most `max` messages. Returns its replies, and the number of
/// messages after it.
fn run(queue: &dyn Side, max: usize, op: &Op) -> (Vec<Reply>, usize) {
    let send = |(message, priority): &Message, how: How| {
        Reply::Sent(queue.send_for(message, *priority, how.patience(queue.depth() == max)))
    };
    let receive = |how: How| Reply::Received(queue.receive_for(how.patience(queue.depth() == 0)));
    let mut replies = Vec::new();
    match op {
        Op::Send(message, priority, how) => replies.push(send(&(message.clone(), *priority), *how)),
        Op::Receive(how) => replies.push(receive(*how)),
        Op::Fill(messages) => {
            for message in messages {
                replies.push(send(message, How::Now));
                if replies.last() != Some(&Reply::Sent(Ok(()))) {
                    break;
                }
            }
        }
        Op::Drain(count) => replies.extend((0..*count).map(|_| receive(How::Now))),
        // Each waiting receiver gets one message, in the order of arrival.
        Op::WaitingReceivers(messages) if queue.depth() == 0 => thread::scope(|scope| {
            let wait = || Reply::Received(queue.receive_for(Patience::For(LONG)));
            let waits = messages.iter().map(|_| wait);
            let mut waiting = start_all(scope, queue, waits);
            for message in messages {
                replies.push(send(message, How::Now));
                replies.push(waiting.pop_front().unwrap().join().unwrap());
            }
        }),
        // Each waiting sender sends in its turn, as messages are received.
        Op::WaitingSenders(messages) if queue.depth() == max => thread::scope(|scope| {
            let waits = messages.iter().map(|(message, priority)| {
                || Reply::Sent(queue.send_for(message, *priority, Patience::For(LONG)))
            });
            let mut waiting = start_all(scope, queue, waits);
            for _ in messages {
                replies.push(receive(How::Now));
                replies.push(waiting.pop_front().unwrap().join().unwrap());
            }
        }),
        Op::WaitingReceivers(_) | Op::WaitingSenders(_) => {}
    }
    (replies, queue.depth())
}

fn priority() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 0..4_u32,
        4 => prop::sample::select(vec![31, 63, 64, 65, 4_095, 4_096, 32_766, 32_767]),
        4 => 0..32_768_u32,
        1 => prop::sample::select(vec![32_768, 65_536, u32::MAX]), // invalid priorities
    ]
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..=MESSAGE_BYTES)
}

fn how() -> impl Strategy<Value = How> {
    prop_oneof![
        8 => Just(How::Now),
        2 => Just(How::Patient),
        1 => Just(How::Past),
        1 => Just(How::Short),
    ]
}

fn valid() -> impl Strategy<Value = Message> {
    (message(), priority()).prop_map(|(message, priority)| (message, priority % 32_768))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (message(), priority(), how()).prop_map(|(m, p, h)| Op::Send(m, p, h)),
        6 => how().prop_map(Op::Receive),
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

/// Returns the command that runs another one in an IPC namespace of its own: there a test sees only its own
/// queues, and may set their limits. Returns the reason if the system provides none.
fn namespace() -> Result<Vec<&'static str>, String> {
    // SAFETY: has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut words = vec!["unshare", "--ipc"];
    if !is_root {
        words.extend(["--user", "--map-root-user"]); // root of a new user namespace
    }
    let probe = Command::new(words[0]).args(&words[1..]).arg("true").output();
    let probe = probe.map_err(|error| format!("unshare: {error}"))?;
    let why = String::from_utf8_lossy(&probe.stderr).trim().to_owned();
    if probe.status.success() { Ok(words) } else { Err(why) }
}

/// Prints why there is no namespace. Panics if no test may be skipped: `OFFLOCK_REQUIRE_ALL=1`.
fn say_refused(why: &str) {
    let required = env::var_os("OFFLOCK_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "no IPC namespace here: {why}");
    eprintln!("no IPC namespace here: {why}");
}

#[test]
fn inv19_the_kernels_queue_gives_the_same_results() {
    match namespace() {
        Ok(unshare) => {
            let name = "inv19_the_kernels_queue_gives_the_same_results";
            in_own_process_by(&unshare, name, || {
                if let Err(error) = fs::write(MSG_MAX, DEPTH.to_string()) {
                    // Older kernels allow this only to the root of the system.
                    say_refused(&format!("msg_max: {error}"));
                }
                compare(msg_max().min(DEPTH));
            });
        }
        Err(why) => {
            say_refused(&why);
            compare(msg_max());
        }
    }
}

const MSG_MAX: &str = "/proc/sys/fs/mqueue/msg_max";

fn msg_max() -> usize {
    fs::read_to_string(MSG_MAX).unwrap().trim().parse().unwrap()
}

fn compare(deepest: usize) {
    println!("queues of up to {deepest} messages");
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let seen = RefCell::new(BTreeMap::new());
    let count = |what: String| *seen.borrow_mut().entry(what).or_insert(0) += 1;
    let outcome = TestRunner::new(config).run(&trace(deepest), |(max, ops)| {
        let (theirs, ours) = (KernelQueue::new(max), Queue::new(max).unwrap());
        for (number, op) in ops.iter().chain(&[Op::Drain(max + 1)]).enumerate() {
            let (got, expected) = (run(&ours, max, op), run(&theirs, max, op));
            prop_assert_eq!(&got, &expected, "op {}: {:?}; ours, the kernel's", number, op);
            got.0.iter().for_each(|reply| count(kind(reply)));
            match op {
                Op::WaitingReceivers(_) if !got.0.is_empty() => count("waited to receive".into()),
                Op::WaitingSenders(_) if !got.0.is_empty() => count("waited to send".into()),
                _ => {}
            }
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
        ("refused", libc::EINVAL),
        ("nothing", libc::EAGAIN),
        ("nothing", libc::ETIMEDOUT),
    ] {
        assert!(seen.contains_key(&format!("{what} {errno}")), "no {what} {errno} was seen");
    }
    for what in ["sent", "received", "waited to receive", "waited to send"] {
        assert!(seen.contains_key(what), "nothing was {what}");
    }
}

fn kind(reply: &Reply) -> String {
    match reply {
        Reply::Sent(Ok(())) => "sent".to_owned(),
        Reply::Received(Ok(_)) => "received".to_owned(),
        Reply::Sent(Err(errno)) => format!("refused {errno}"),
        Reply::Received(Err(errno)) => format!("nothing {errno}"),
    }
}
