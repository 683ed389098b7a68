//! A task has a permit for room and does not poll: its effect on the thread behind it, and on
//! notifications.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use mq_rbtree::{Bitmap, Levels, Queue, RbTree, SendFuture, Wait};

use testkit::WakeCount;
use testkit::alloc::refuse_first;
use testkit::wait_until;

/// Longer than any step here takes.
const LONG: Duration = Duration::from_secs(20);

type WithPermit<'q, L = Bitmap> = Pin<Box<SendFuture<'q, u32, L>>>;

fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Creates a full queue of one message, and a task that waits for room in it.
fn full<L: Levels<Priority = u32>>(queue: &Queue<u32, L>) -> WithPermit<'_, L> {
    queue.try_send(1, 0).unwrap();
    let mut task = Box::pin(queue.send_async(2, 0));
    assert!(poll(&mut task).is_pending());
    task
}

fn one() -> Queue<u32> {
    Queue::builder(1).spin(false).build().unwrap()
}

/// The thread's message needs a node, for which the receiver has no memory. The thread is woken to
/// try by itself before the receiver begins to wait.
#[test]
fn inv14_a_receiver_without_memory_wakes_the_sender_before_it_waits() {
    let queue: Queue<u32, RbTree<u32>> =
        Queue::builder_with_keys(1).spare_nodes(0).spin(false).build().unwrap();
    let idle = full(&queue);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let soon = Wait::at_most(Duration::from_millis(1));
            assert!(queue.send_with(0, 0, soon).is_err()); // allocates what a thread needs once
            refuse_first(2, || queue.send(3, 20_000))
        });
        wait_until(|| {
            let stats = queue.stats();
            stats.waiting == (2, 0) && stats.timeouts == 1
        });
        assert_eq!(queue.try_receive(), Ok((1, 0)));
        let (received, refused) = refuse_first(1, || queue.receive_with(Wait::at_most(LONG)));
        assert_eq!((received, refused), (Ok((3, 20_000)), 1));
        assert_eq!(sender.join().unwrap(), (Ok(()), 2));
    });
    drop(idle);
    queue.validate();
}

/// The permit is released unused, so the thread's message enters the empty queue: that triggers a
/// notification.
#[test]
fn inv12_a_message_sent_as_a_permit_ends_is_notified() {
    let queue = one();
    let mut task = full(&queue);
    let flag = WakeCount::new();
    let waker = flag.waker();
    queue.notify(move || waker.wake()).unwrap();
    thread::scope(|scope| {
        let sender = scope.spawn(|| queue.send(3, 7));
        wait_until(|| queue.stats().waiting == (2, 0));
        assert_eq!(queue.try_receive(), Ok((1, 0)));
        assert_eq!((queue.len(), flag.count()), (0, 0));
        task.set(queue.send_async(9, 9)); // drops the future with the permit
        assert_eq!(sender.join().unwrap(), Ok(()));
    });
    assert_eq!((queue.len(), flag.count()), (1, 1));
    assert!(!queue.cancel_notify());
    drop(task);
    queue.validate();
}

/// A task has a permit whose message another receiver took. It still waits to receive, so the next
/// message is not notified, whether it is sent or enters when a send permit ends.
#[test]
fn inv12_no_notification_while_a_task_with_an_unused_permit_waits() {
    let queue = one();
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive).is_pending());
    queue.send(1, 0).unwrap();
    assert_eq!(queue.try_receive(), Ok((1, 0)), "not by the task");
    let flag = WakeCount::new();
    let waker = flag.waker();
    queue.notify(move || waker.wake()).unwrap();
    queue.send(2, 0).unwrap();
    assert_eq!(flag.count(), 0, "the task waits for this message");

    assert_eq!(queue.try_receive(), Ok((2, 0)), "nor this one");
    let mut task = full(&queue);
    assert_eq!(flag.count(), 0);
    thread::scope(|scope| {
        let sender = scope.spawn(|| queue.send(3, 7));
        wait_until(|| queue.stats().waiting == (2, 0));
        assert_eq!(queue.try_receive(), Ok((1, 0)));
        task.set(queue.send_async(9, 9)); // drops the future with the permit
        assert_eq!(sender.join().unwrap(), Ok(()));
    });
    assert_eq!((queue.len(), flag.count()), (1, 0), "nor did the end of the promise tell");
    drop(task);

    assert_eq!(poll(&mut receive), Poll::Ready(Ok((3, 7))));
    queue.send(4, 0).unwrap();
    assert_eq!(flag.count(), 1, "no receiver waits any more");
    queue.validate();
}

/// A drain empties the queue before the messages of the waiting senders enter.
#[test]
fn inv12_a_message_that_comes_after_a_drain_is_notified() {
    let queue = one();
    queue.try_send(1, 0).unwrap();
    let flag = WakeCount::new();
    let waker = flag.waker();
    queue.notify(move || waker.wake()).unwrap();
    thread::scope(|scope| {
        let sender = scope.spawn(|| queue.send(3, 7));
        wait_until(|| queue.stats().waiting == (1, 0));
        assert_eq!(queue.drain(), [(1, 0)]);
        assert_eq!(sender.join().unwrap(), Ok(()));
    });
    assert_eq!((queue.len(), flag.count()), (1, 1));
    // A receive that serves a sender leaves no moment at which the queue is empty.
    let silent: Arc<WakeCount> = WakeCount::new();
    let waker = silent.waker();
    queue.notify(move || waker.wake()).unwrap();
    thread::scope(|scope| {
        let sender = scope.spawn(|| queue.send(4, 8));
        wait_until(|| queue.stats().waiting == (1, 0));
        assert_eq!(queue.try_receive(), Ok((3, 7)));
        assert_eq!(sender.join().unwrap(), Ok(()));
    });
    assert_eq!((queue.len(), silent.count()), (1, 0));
    queue.validate();
}
