//! Edge cases: wake-ups that are never used, and futures that are dropped.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::panic::RefUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Levels, Queue, RbTree, ReceiveError, SendRefused};

use testkit::wait_until;

fn waiting<T, L: Levels>(queue: &Queue<T, L>) -> (usize, usize) {
    queue.stats().waiting
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// A task has a permit for a message and does not poll: the thread behind it gets the message at
/// its deadline.
#[test]
fn inv09_a_receive_does_not_time_out_beside_a_message() {
    retry_until_in_time(|| {
        let queue: Queue<u32> = Queue::new(4).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let mut idle = pin!(queue.receive_async());
        assert!(idle.as_mut().poll(&mut cx).is_pending());
        let got = thread::scope(|scope| {
            let receiver = scope.spawn(|| queue.receive_deadline(soon()));
            wait_until(|| waiting(&queue).1 == 2 || receiver.is_finished());
            queue.send(1, 0).unwrap();
            receiver.join().unwrap()
        });
        if got == Err(ReceiveError::Timeout) {
            return false;
        }
        assert_eq!((got, queue.stats().timeouts), (Ok((1, 0)), 0));
        assert!(idle.as_mut().poll(&mut cx).is_pending());
        true
    });
}

/// A task has a permit for room and is leaked: the thread behind it sends at its deadline.
#[test]
fn inv09_a_send_does_not_time_out_beside_room() {
    retry_until_in_time(|| {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        queue.send(1, 0).unwrap();
        let mut forgotten = Box::pin(queue.send_async(2, 0));
        assert!(forgotten.as_mut().poll(&mut cx).is_pending());
        std::mem::forget(forgotten);
        let sent = thread::scope(|scope| {
            let sender =
                scope.spawn(|| queue.send_deadline(3, 0, soon()).map_err(|error| error.reason));
            wait_until(|| waiting(&queue).0 == 2 || sender.is_finished());
            assert_eq!(queue.try_receive(), Ok((1, 0)));
            sender.join().unwrap()
        });
        if sent == Err(SendRefused::Timeout) {
            return false;
        }
        assert_eq!((sent, queue.receive()), (Ok(()), Ok((3, 0))));
        true
    });
}

/// Repeats an attempt until it was in time, which it returns. On a machine that stalls for a
/// moment, a deadline can pass too early.
fn retry_until_in_time(attempt: impl Fn() -> bool) {
    assert!((0..20).any(|_| attempt()), "it is never in time");
}

#[test]
fn a_future_that_was_never_polled_does_nothing() {
    let queue: Queue<Arc<()>> = Queue::new(1).unwrap();
    let message = Arc::new(());
    drop(queue.send_async(Arc::clone(&message), 1));
    drop(queue.receive_async());
    assert_eq!((queue.len(), Arc::strong_count(&message)), (0, 1));
    queue.send(Arc::clone(&message), 1).unwrap();
    drop(queue.receive_async());
    drop(queue.send_async(Arc::clone(&message), 1));
    assert_eq!((queue.len(), Arc::strong_count(&message)), (1, 2));
    queue.validate();
}

/// A batch that is dropped while it waits has taken no message.
#[test]
fn inv09_a_dropped_batch_loses_no_message() {
    let mut cx = Context::from_waker(Waker::noop());
    let queue = Queue::<u32>::new(4).unwrap();
    let mut out = Vec::new();
    {
        let mut batch = pin!(queue.receive_batch_async(&mut out, 3));
        assert!(batch.as_mut().poll(&mut cx).is_pending());
        (0..4).for_each(|n| queue.send(n, n).unwrap());
    }
    assert_eq!((out.len(), queue.len()), (0, 4));
    assert_eq!(pin!(queue.receive_batch_async(&mut out, 3)).poll(&mut cx), Poll::Ready(Ok(3)));
    assert_eq!(out, [(3, 3), (2, 2), (1, 1)]);
    assert_eq!(pin!(queue.receive_batch_async(&mut out, 0)).poll(&mut cx), Poll::Ready(Ok(0)));
    queue.validate();
}

#[test]
fn a_queue_works_after_a_panic() {
    const fn unwind_safe<T: RefUnwindSafe>() {}
    const { unwind_safe::<Queue<u32>>() };
    const { unwind_safe::<Queue<u32, RbTree<u64>>>() };
}
