//! Messages in guards: they keep their places, and come back unless they are accepted.

use std::cmp::Ordering;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Interest, Levels, Queue, RbTree, Readiness, ReceiveError, SendRefused};
use testkit::alloc::refuse_first;
use testkit::wait_until;

use crate::panicking::{panics, poll};

fn order<L: Levels<Priority = u32>>(queue: &Queue<&str, L>) -> String {
    queue.drain().into_iter().map(|(message, _)| message).collect()
}

fn is_readable(ready: &impl AsRawFd) -> bool {
    let mut poll = libc::pollfd { fd: ready.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one `pollfd` of this frame.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

fn goes_in_front<L: Levels<Priority = u32>>(queue: &Queue<&str, L>) {
    for (message, priority) in [("a", 5), ("b", 5), ("c", 1)] {
        queue.send(message, priority).unwrap();
    }
    let first = queue.receive_guard().unwrap();
    let second = queue.receive_guard().unwrap();
    assert_eq!((*first, *second, first.priority()), ("a", "b", 5));
    queue.send("d", 5).unwrap(); // newer, and of the same priority
    queue.send("e", 9).unwrap();
    drop(second);
    drop(first);
    queue.validate();
    assert_eq!(order(queue), "eabdc");
    queue.validate();
}

#[test]
fn inv25_a_message_goes_back_in_front_of_newer_ones() {
    goes_in_front(&Queue::new(8).unwrap()); // through the ring
    goes_in_front(&Queue::with_keys(8).unwrap());
}

fn counts_the_peak<L: Levels<Priority = u32>>(queue: &Queue<&str, L>) {
    let counts = || (queue.stats().peak, queue.stats().depth, queue.stats().guarded);
    queue.send("a", 5).unwrap();
    let guard = queue.try_receive_guard().unwrap();
    queue.send("b", 5).unwrap();
    queue.send("c", 5).unwrap();
    // No operation has looked at the queue since the sends.
    assert_eq!(guard.accept(), ("a", 5));
    assert_eq!(counts(), (3, 2, 0));
    let guard = queue.try_receive_guard().unwrap();
    queue.send("d", 5).unwrap();
    drop(guard); // the message comes back, and is counted once
    assert_eq!(counts(), (3, 3, 0));
    let _guard = queue.try_receive_guard().unwrap();
    queue.send("e", 5).unwrap();
    assert_eq!(counts(), (4, 3, 1));
}

#[test]
fn the_peak_is_of_the_messages_in_the_queue_and_in_guards_together() {
    counts_the_peak(&Queue::new(8).unwrap()); // through the ring
    counts_the_peak(&Queue::with_keys(8).unwrap());
}

#[test]
fn inv25_a_message_keeps_its_place() {
    let queue = Queue::<String>::builder(3).reserve(7, 1).build().unwrap();
    queue.send("12345".into(), 1).unwrap();
    let mut guard = queue.try_receive_guard().unwrap();
    guard.push('6');
    assert_eq!((queue.len(), queue.stats().guarded), (0, 1));
    let refused = |text: &str, priority| queue.try_send(text.into(), priority).unwrap_err().reason;
    queue.send("1".into(), 1).unwrap();
    assert_eq!(refused("1", 1), SendRefused::Full); // the last place is reserved
    queue.send("1".into(), 7).unwrap();
    assert!(queue.is_full());
    assert_eq!(queue.drain().len(), 2);
    assert_eq!(guard.accept(), ("123456".into(), 1));
    assert_eq!((queue.stats().received, queue.stats().guarded), (3, 0));
    queue.validate();
}

#[test]
fn inv25_a_closed_queue_ends_with_its_last_guard() {
    let (sender, receiver) = Queue::builder(1).channel().unwrap();
    sender.send("message", 7).unwrap();
    let guard = receiver.receive_guard().unwrap();
    let ready = Readiness::new(&receiver, Interest::Readable).unwrap();
    drop(sender);
    assert_eq!(receiver.try_receive(), Err(ReceiveError::Empty), "it may come back");
    assert!(!is_readable(&ready));
    thread::scope(|scope| {
        let waits = scope.spawn(|| receiver.receive_guard().map(|guard| guard.accept()));
        let waits_too = scope.spawn(|| receiver.receive());
        wait_until(|| receiver.stats().waiting.1 == 2);
        drop(guard);
        let mut ends = [waits.join().unwrap(), waits_too.join().unwrap()];
        ends.sort_by_key(Result::is_err);
        assert_eq!(ends, [Ok(("message", 7)), Err(ReceiveError::Closed)]);
    });
}

/// The queue is closed and full of guards; each of many waiters ends with the last one.
#[test]
fn inv25_the_last_accept_ends_every_wait() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    queue.send(1, 1).unwrap();
    let guard = queue.receive_guard().unwrap();
    queue.close();
    let mut tasks: Vec<_> = (0..9).map(|_| Box::pin(queue.receive_guard_async())).collect();
    let noop = || Waker::noop().clone();
    assert!(tasks.iter_mut().all(|task| poll(task, noop()).is_pending()));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| queue.receive())).collect();
        wait_until(|| queue.stats().waiting.1 == 15);
        assert_eq!(guard.accept(), (1, 1));
        queue.validate();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Err(ReceiveError::Closed));
        }
    });
    for mut task in tasks {
        assert!(matches!(poll(&mut task, noop()), std::task::Poll::Ready(Err(_))));
    }
}

#[test]
fn inv25_a_consumer_that_panics_or_is_cancelled_loses_nothing() {
    let queue: Queue<Box<u32>> = Queue::new(1).unwrap();
    queue.send(Box::new(1), 7).unwrap();
    let consumer = || {
        let mut message = queue.receive_guard().unwrap();
        **message += 1;
        panic!("in the consumer");
    };
    assert!(catch_unwind(AssertUnwindSafe(consumer)).is_err());
    let mut task = Box::pin(async {
        let mut message = queue.receive_guard_async().await.unwrap();
        **message += 1;
        std::future::pending::<()>().await;
        message.accept()
    });
    assert!(poll(&mut task, Waker::noop().clone()).is_pending());
    assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
    drop(task);
    assert_eq!(queue.receive(), Ok((Box::new(3), 7)));
}

/// Whatever became of the nodes meanwhile, each guard has the one for its way back.
#[test]
fn inv25_a_way_back_allocates_nothing() {
    let queue = Queue::builder_with_keys(64).spare_nodes(2).build().unwrap();
    for n in 0..64 {
        queue.send(n, n / 3).unwrap();
    }
    let guards: Vec<_> = (0..64).map(|_| queue.try_receive_guard().unwrap()).collect();
    queue.validate();
    let (_, refused) = refuse_first(usize::MAX, || guards.into_iter().for_each(drop));
    assert_eq!((refused, queue.len()), (0, 64));
    queue.validate();
    let all = queue.drain().into_iter().map(|(_, priority)| priority);
    assert!(all.eq((0..64).map(|n| n / 3).rev()));

    let queue = Queue::builder_with_keys(1).spare_nodes(0).build().unwrap();
    queue.send(1, 1).unwrap();
    let (found, refused) = refuse_first(2, || queue.try_receive_guard().map(drop));
    assert_eq!((found, refused), (Err(ReceiveError::NoMemory), 2));
    assert_eq!(queue.receive(), Ok((1, 1)));
}

#[test]
fn inv25_a_message_put_back_is_a_message_that_comes() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    queue.send(1, 1).unwrap();
    let guard = queue.receive_guard().unwrap();
    let ready = Readiness::new(&queue, Interest::Readable).unwrap();
    drop(guard);
    assert!(is_readable(&ready));
    drop(ready);

    // It goes to a thread that waits, before a sender that waits for its place.
    let guard = queue.receive_guard().unwrap();
    queue.send(2, 9).unwrap();
    let other = queue.receive_guard().unwrap();
    thread::scope(|scope| {
        let receiver = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().waiting == (0, 1));
        let sender = scope.spawn(|| queue.send(3, 3));
        wait_until(|| queue.stats().waiting == (1, 1));
        drop(guard);
        assert_eq!(receiver.join().unwrap(), Ok((1, 1)));
        sender.join().unwrap().unwrap();
    });
    drop(other);
    assert_eq!((queue.receive(), queue.receive()), (Ok((2, 9)), Ok((3, 3))));
}

#[test]
fn a_wait_for_a_guard_ends_in_time() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(queue.receive_guard_deadline(soon).err(), Some(ReceiveError::Timeout));
    assert_eq!((queue.stats().timeouts, queue.stats().waiting), (1, (0, 0)));
    queue.close();
    assert_eq!(queue.receive_guard_deadline(soon).err(), Some(ReceiveError::Closed));
    assert_eq!(queue.try_receive_guard().err(), Some(ReceiveError::Closed));
}

static COMPARES: AtomicBool = AtomicBool::new(true);

/// A key whose comparisons panic while it is told to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key(u32);

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        assert!(COMPARES.load(Relaxed), "a comparison");
        self.0.cmp(&other.0)
    }
}

/// The place of a message that cannot be put back is free.
#[test]
fn a_comparison_that_panics_in_a_drop_drops_the_message() {
    let queue: Queue<Box<u32>, RbTree<Key>> = Queue::with_keys(3).unwrap();
    for n in 1..=3 {
        queue.send(Box::new(n), Key(n)).unwrap();
    }
    let guard = queue.receive_guard().unwrap();
    COMPARES.store(false, Relaxed);
    assert!(panics(|| drop(guard)));
    // In a thread that panics already, the second panic is dropped.
    let unwinds = || {
        let _guard = queue.receive_guard().unwrap();
        panic!("in the consumer");
    };
    assert!(panics(unwinds));
    COMPARES.store(true, Relaxed);
    queue.validate();
    assert_eq!((queue.len(), queue.stats().guarded, queue.stats().received), (1, 0, 2));
}
