//! Asynchronous sends and receives: which task is woken, the effect of a drop, and wakers.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use mq_rbtree::{Queue, ReceiveError, SendRefused};

use testkit::{WakeCount, wait_until};

/// Polls a future once, with a waker that counts in `flag`.
fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>, flag: &Arc<WakeCount>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(&flag.waker()))
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

/// A future is dropped while it is listed, with a permit, and with a permit whose message is gone.
/// Each time the next one proceeds in its place.
#[test]
fn inv09_a_receive_dropped_at_any_stage_loses_no_message() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let (first_flag, flag) = (WakeCount::new(), WakeCount::new());
    for stage in 0..3 {
        let before = flag.count();
        let mut first = Box::pin(queue.receive_async());
        let mut second = Box::pin(queue.receive_async());
        assert!(
            poll(&mut first, &first_flag).is_pending() && poll(&mut second, &flag).is_pending()
        );
        let first = match stage {
            0 => {
                drop(first);
                None
            }
            _ => Some(first),
        };
        queue.send(7, 1).unwrap();
        if stage == 2 {
            assert_eq!(queue.try_receive(), Ok((7, 1)), "another was faster");
        }
        assert_eq!(flag.count() - before, usize::from(stage == 0));
        drop(first);
        queue.validate();
        assert_eq!(flag.count() - before, 1, "the wake-up is passed on");
        if stage == 2 {
            assert!(poll(&mut second, &flag).is_pending());
            queue.send(7, 1).unwrap();
        }
        assert_eq!(poll(&mut second, &flag), Poll::Ready(Ok((7, 1))));
        assert_eq!(queue.stats().waiting, (0, 0));
        queue.validate();
    }
}

#[test]
fn inv09_a_send_dropped_at_any_stage_leaves_no_trace() {
    let queue: Queue<Arc<u32>> = Queue::new(1).unwrap();
    let (first_flag, flag) = (WakeCount::new(), WakeCount::new());
    for stage in 0..3 {
        queue.send(Arc::new(0), 1).unwrap();
        let before = flag.count();
        let message = Arc::new(1);
        let mut first = Box::pin(queue.send_async(Arc::clone(&message), 9));
        let mut second = Box::pin(queue.send_async(Arc::new(2), 1));
        assert!(
            poll(&mut first, &first_flag).is_pending() && poll(&mut second, &flag).is_pending()
        );
        let first = match stage {
            0 => {
                drop(first);
                None
            }
            _ => Some(first),
        };
        assert_eq!(*queue.receive().unwrap().0, 0);
        if stage == 2 {
            queue.try_send(Arc::new(3), 1).unwrap();
        }
        assert_eq!(flag.count() - before, usize::from(stage == 0));
        drop(first);
        queue.validate();
        assert_eq!(Arc::strong_count(&message), 1, "its message went with it");
        assert_eq!(flag.count() - before, 1);
        if stage == 2 {
            assert!(poll(&mut second, &flag).is_pending());
            assert_eq!(*queue.receive().unwrap().0, 3);
        }
        assert!(matches!(poll(&mut second, &flag), Poll::Ready(Ok(()))));
        assert_eq!(*queue.receive().unwrap().0, 2);
        queue.validate();
    }
}

#[test]
fn inv14_the_waker_of_the_last_poll_is_the_one_that_is_called() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let flags: Vec<_> = (0..3).map(|_| WakeCount::new()).collect();
    let mut receive = Box::pin(queue.receive_async());
    for flag in &flags {
        assert!(poll(&mut receive, flag).is_pending());
        queue.validate();
    }
    let replaced = flags.iter().map(Arc::strong_count).take(2);
    assert!(replaced.eq([1, 1]), "replaced wakers are dropped");
    queue.send(1, 1).unwrap();
    assert!(flags.iter().map(|flag| flag.count()).eq([0, 0, 1]));
    let mut send = Box::pin(queue.send_async(2, 1));
    for flag in &flags {
        assert!(poll(&mut send, flag).is_pending());
    }
    assert_eq!(poll(&mut receive, &flags[0]), Poll::Ready(Ok((1, 1))));
    assert!(flags.iter().map(|flag| flag.count()).eq([0, 0, 2]));
    drop((receive, send));
    assert!(flags.iter().all(|flag| Arc::strong_count(flag) == 1), "no waker is kept");
}

#[test]
fn a_future_polled_after_completion_panics() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let flag = WakeCount::new();
    let mut send = Box::pin(queue.send_async(1, 1));
    assert!(poll(&mut send, &flag).is_ready());
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, &flag).is_ready());
    queue.send(2, 2).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut send, &flag))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut receive, &flag))).is_err());
    queue.validate();
    assert_eq!(queue.try_receive(), Ok((2, 2)), "nothing was taken");
}

#[test]
fn an_invalid_message_is_refused_at_the_first_poll() {
    let queue = Queue::<u32>::new(1).unwrap();
    let mut send = Box::pin(queue.send_async(1, 32_768));
    let Poll::Ready(Err(error)) = poll(&mut send, &WakeCount::new()) else { panic!("it waits") };
    let reason = SendRefused::BadPriority { priority: 32_768 };
    assert_eq!((error.value, error.reason), (1, reason));
    queue.validate();
}

#[test]
fn close_wakes_every_task_and_returns_messages() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let flags: Vec<_> = (0..20).map(|_| WakeCount::new()).collect();
    let mut receives: Vec<_> = flags.iter().map(|_| Box::pin(queue.receive_async())).collect();
    for (receive, flag) in receives.iter_mut().zip(&flags) {
        assert!(poll(receive, flag).is_pending());
    }
    queue.send(1, 1).unwrap(); // drops_future a permit
    assert!(queue.close());
    assert!(flags.iter().all(|flag| flag.count() == 1));
    let results: Vec<_> =
        receives.iter_mut().zip(&flags).map(|(receive, flag)| poll(receive, flag)).collect();
    assert_eq!(results[0], Poll::Ready(Ok((1, 1))));
    assert!(results[1..].iter().all(|result| *result == Poll::Ready(Err(ReceiveError::Closed))));
    queue.validate();

    let queue: Queue<u32> = Queue::new(1).unwrap();
    queue.send(100, 1).unwrap();
    let mut sends: Vec<_> = (0..20).map(|n| Box::pin(queue.send_async(n, 1))).collect();
    for (send, flag) in sends.iter_mut().zip(&flags) {
        assert!(poll(send, flag).is_pending());
    }
    queue.close();
    for (n, (send, flag)) in (0..).zip(sends.iter_mut().zip(&flags)) {
        assert_eq!(flag.count(), 2);
        let Poll::Ready(Err(error)) = poll(send, flag) else { panic!("{n}") };
        assert_eq!((error.value, error.reason), (n, SendRefused::Closed));
    }
    queue.validate();
    assert_eq!(queue.receive(), Ok((100, 1)), "what was there can be received");
}

/// A dropped permit passes its message to a blocked thread.
#[test]
fn inv14_a_dropped_permit_gives_the_message_to_a_blocked_thread() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let flag = WakeCount::new();
    let mut task = Box::pin(queue.receive_async());
    assert!(poll(&mut task, &flag).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().waiting == (0, 2));
        queue.send(5, 5).unwrap();
        assert_eq!((flag.count(), queue.stats().waiting), (1, (0, 1)));
        drop(task);
        assert_eq!(blocked.join().unwrap(), Ok((5, 5)));
    });
    queue.validate();

    // A dropped permit to send lets the blocked thread's message in.
    let queue: Queue<u32> = Queue::new(1).unwrap();
    queue.send(1, 1).unwrap();
    let mut task = Box::pin(queue.send_async(2, 2));
    assert!(poll(&mut task, &flag).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(3, 3));
        wait_until(|| queue.stats().waiting == (2, 0));
        assert_eq!(queue.receive(), Ok((1, 1)));
        assert_eq!((flag.count(), queue.stats().waiting), (2, (1, 0)));
        drop(task);
        assert!(blocked.join().unwrap().is_ok());
    });
    assert_eq!(queue.receive(), Ok((3, 3)));
    queue.validate();
}

/// A task is polled without a wake-up and takes the message of another's permit. The senders served
/// then must not give it a permit as well, for a message that it will never poll for.
#[test]
fn inv14_a_barging_task_gets_no_permit() {
    let queue = Queue::<u32>::new(1).unwrap();
    let (first, second) = (WakeCount::new(), WakeCount::new());
    let mut woken = Box::pin(queue.receive_async());
    assert!(poll(&mut woken, &first).is_pending());
    let mut barges = Box::pin(queue.receive_async());
    assert!(poll(&mut barges, &second).is_pending());
    queue.send(6, 1).unwrap();
    assert_eq!((first.count(), second.count()), (1, 0));
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(3, 1));
        wait_until(|| queue.stats().waiting == (1, 1));
        assert!(poll(&mut barges, &second).is_ready());
        blocked.join().unwrap().unwrap();
    });
    drop((woken, barges));
    assert_eq!((first.count(), second.count()), (1, 0));
    assert_eq!(queue.receive(), Ok((3, 1)));
    let mut next = Box::pin(queue.receive_async());
    assert!(poll(&mut next, &second).is_pending());
    queue.send(1, 1).unwrap();
    assert_eq!(second.count(), 1);
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
