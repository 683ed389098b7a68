//! Messages in guards: they keep their places, and come back unless they are accepted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Interest, Queue, Readiness, ReceiveError};
use testkit::alloc::refuse_first;
use testkit::wait_until;

use crate::mq_ops::queue_ops::is_readable;
use crate::panicking::poll;

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

/// It needs a node for the way back.
#[test]
fn a_guard_without_memory_is_refused() {
    let queue = Queue::builder_with_keys(1).spare_nodes(0).build().unwrap();
    queue.send(1, 1).unwrap();
    let (found, refused) = refuse_first(2, || queue.try_receive_guard().map(drop));
    assert_eq!((found, refused), (Err(ReceiveError::NoMemory), 2));
    assert_eq!(queue.receive(), Ok((1, 1)));
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
