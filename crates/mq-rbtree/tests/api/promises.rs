//! A task has a permit for room and does not poll: its effect on the thread behind it.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Levels, Queue, RbTree, SendFuture};

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

/// The thread's message needs a node, for which the receiver has no memory. The thread is woken to
/// try by itself before the receiver begins to wait.
#[test]
fn inv14_a_receiver_without_memory_wakes_the_sender_before_it_waits() {
    let queue: Queue<u32, RbTree<u32>> =
        Queue::builder_with_keys(1).spare_nodes(0).spin(false).build().unwrap();
    let idle = full(&queue);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let soon = Instant::now() + Duration::from_millis(1);
            assert!(queue.send_deadline(0, 0, soon).is_err()); // allocates what a thread needs once
            refuse_first(2, || queue.send(3, 20_000))
        });
        wait_until(|| {
            let stats = queue.stats();
            stats.waiting == (2, 0) && stats.timeouts == 1
        });
        assert_eq!(queue.try_receive(), Ok((1, 0)));
        let (received, refused) = refuse_first(1, || queue.receive_deadline(Instant::now() + LONG));
        assert_eq!((received, refused), (Ok((3, 20_000)), 1));
        assert_eq!(sender.join().unwrap(), (Ok(()), 2));
    });
    drop(idle);
    queue.validate();
}
