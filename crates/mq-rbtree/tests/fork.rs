//! Queues in a fork child: of a parent that was at rest, and of one whose threads waited.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/child.rs"]
mod child;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use mq_rbtree::{
    Forked, Interest, NotifyRefused, Queue, Readiness, ReceiveError, SendRefused, Wait,
};

use child::in_child;
use testkit::wait_until;

/// One fork at a time: another test's threads are not to be in the middle of things.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_child_of_a_quiet_parent_uses_the_queue_on() {
    let _alone = alone();
    let queue: Queue<u32> = Queue::new(4).unwrap();
    (0..4).for_each(|n| queue.send(n, n).unwrap());
    let ready = Readiness::new(&queue, Interest::Readable).unwrap();
    assert!(in_child(|| {
        assert_eq!(queue.try_send(9, 9).unwrap_err().reason, SendRefused::Full);
        assert_eq!(queue.receive(), Ok((3, 3)));
        queue.send(70, 70).unwrap();
        queue.validate();
        let mut out = Vec::new();
        assert_eq!(queue.receive_batch(&mut out, 2, Wait::NO), Ok(2));
        assert_eq!(queue.drain_filter(|n, _| *n == 0).unwrap(), [(0, 0)]);
        let mut cx = Context::from_waker(Waker::noop());
        let received = pin!(queue.receive_async()).poll(&mut cx);
        assert_eq!(received, Poll::Ready(Ok((1, 1))));
        ready.clear();
        assert_eq!((queue.try_receive(), queue.close()), (Err(ReceiveError::Empty), Ok(true)));
        queue.validate();
        true
    }));
    assert_eq!(queue.len(), Ok(4), "the parent's is its own");
}

/// Who would wake it is not there: it is told so at once, and the queue stays usable.
#[test]
fn in_a_child_nobody_waits_on_what_it_inherited() {
    let _alone = alone();
    let queue: Queue<u32> = Queue::new(1).unwrap();
    assert!(in_child(|| {
        let mut cx = Context::from_waker(Waker::noop());
        let soon = Wait::at_most(std::time::Duration::from_millis(1));
        for wait in [Wait::FOREVER, soon] {
            assert_eq!(queue.receive_with(wait), Err(ReceiveError::Forked));
        }
        {
            let mut receive = pin!(queue.receive_async());
            let polled = receive.as_mut().poll(&mut cx);
            assert_eq!(polled, Poll::Ready(Err(ReceiveError::Forked)));
        }
        queue.validate();
        queue.send(1, 1).unwrap();
        for wait in [Wait::FOREVER, soon] {
            let error = queue.send_with(2, 2, wait).unwrap_err();
            assert_eq!((error.value, error.reason), (2, SendRefused::Forked));
        }
        {
            let mut send = pin!(queue.send_async(2, 2));
            let Poll::Ready(Err(error)) = send.as_mut().poll(&mut cx) else { return false };
            assert_eq!((error.value, error.reason), (2, SendRefused::Forked));
        }
        queue.validate();
        queue.receive() == Ok((1, 1))
    }));
    queue.validate();
}

/// In a child of its own making, threads wait as ever.
#[test]
fn a_childs_own_queue_is_as_good_as_any() {
    let _alone = alone();
    assert!(in_child(|| {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        thread::scope(|scope| {
            let receive = scope.spawn(|| queue.receive());
            wait_until(|| queue.stats().unwrap().waiting == (0, 1));
            queue.send(1, 1).unwrap();
            receive.join().unwrap() == Ok((1, 1))
        })
    }));
}

/// Every operation in the child of a parent whose threads wait on the queue.
fn is_refused_everywhere(queue: &Queue<u32>) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    let refused = |error: mq_rbtree::SendError<u32>| {
        assert_eq!((error.value, error.reason), (7, SendRefused::Forked));
        assert_eq!(error.errno(), libc::EOWNERDEAD);
    };
    for wait in [Wait::NO, Wait::FOREVER] {
        refused(queue.send_with(7, 7, wait).unwrap_err());
        assert_eq!(queue.receive_with(wait), Err(ReceiveError::Forked));
        let mut batch = VecDeque::from([(7, 7), (8, 8)]);
        let error = queue.send_batch(&mut batch, wait).unwrap_err();
        assert_eq!((error.sent, error.reason, batch.len()), (0, SendRefused::Forked, 2));
        assert_eq!(queue.receive_batch(&mut Vec::new(), 3, wait), Err(ReceiveError::Forked));
    }
    let received = pin!(queue.receive_async()).poll(&mut cx);
    assert_eq!(received, Poll::Ready(Err(ReceiveError::Forked)));
    let Poll::Ready(Err(error)) = pin!(queue.send_async(7, 7)).poll(&mut cx) else { return false };
    refused(error);
    let forked = Err(Forked::new());
    assert_eq!((queue.close().map(drop), queue.len().map(drop)), (forked, forked));
    assert_eq!((queue.bytes().map(drop), queue.len_at(1).map(drop)), (forked, forked));
    assert_eq!((queue.is_empty().map(drop), queue.is_closed().map(drop)), (forked, forked));
    assert_eq!((queue.drain().map(drop), queue.peek(|_, _| ()).map(drop)), (forked, forked));
    assert_eq!(queue.stats().map(drop), forked);
    let refused = queue.notify(|| ()).unwrap_err();
    assert_eq!((refused.reason, refused.errno()), (NotifyRefused::Forked, libc::EOWNERDEAD));
    assert!(!queue.cancel_notify());
    let error = Readiness::new(queue, Interest::Readable).unwrap_err();
    assert_eq!(error.reason.raw_os_error(), Some(libc::EOWNERDEAD));
    !format!("{queue:?}").is_empty()
}

#[test]
fn a_child_is_refused_where_threads_of_its_parent_wait() {
    let _alone = alone();
    for full in [false, true] {
        let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
        if full {
            queue.send(1, 1).unwrap();
        }
        thread::scope(|scope| {
            let (mut receives, mut sends) = (Vec::new(), Vec::new());
            for _ in 0..3 {
                if full {
                    sends.push(scope.spawn(|| queue.send(2, 2)));
                } else {
                    receives.push(scope.spawn(|| queue.receive()));
                }
            }
            wait_until(|| {
                let (senders, receivers) = queue.stats().unwrap().waiting;
                senders + receivers == 3
            });
            assert!(in_child(|| is_refused_everywhere(&queue)));
            queue.validate();
            queue.close().unwrap();
            assert!(receives.into_iter().all(|thread| thread.join().unwrap().is_err()));
            assert!(sends.into_iter().all(|thread| thread.join().unwrap().is_err()));
        });
    }
}

/// The same with a task of the parent's, whose future the child has as well: it ends there quietly.
#[test]
fn a_child_may_drop_a_future_that_waits() {
    let _alone = alone();
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut receive = Box::pin(queue.receive_async());
    assert!(receive.as_mut().poll(&mut cx).is_pending());
    assert!(in_child(|| {
        assert_eq!(receive.as_mut().poll(&mut cx), Poll::Ready(Err(ReceiveError::Forked)));
        drop(receive);
        is_refused_everywhere(&queue)
    }));
}

/// Another thread is inside the lock at the moment of the fork.
#[test]
fn a_child_does_not_wait_for_a_lock_that_nobody_unlocks() {
    let _alone = alone();
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(4).unwrap());
    queue.send(1, 1).unwrap();
    let (inside, done) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            queue.peek(|_, _| {
                inside.store(true, SeqCst);
                wait_until(|| done.load(SeqCst));
            })
        });
        wait_until(|| inside.load(SeqCst));
        let held = in_child(|| is_refused_everywhere(&queue));
        done.store(true, SeqCst);
        assert!(held);
    });
    queue.validate();
}

/// Handles whose last goes in a child: nobody there is told, and nothing hangs.
#[test]
fn a_child_may_drop_the_handles_of_a_queue_that_is_waited_on() {
    let _alone = alone();
    let (sender, receiver) = Queue::<u32>::builder(1).spin(false).channel().unwrap();
    let (mut sender, mut receiver) = (Some(sender), Some(receiver));
    let queue = receiver.as_ref().unwrap().clone();
    thread::scope(|scope| {
        let blocked = scope.spawn(move || queue.receive());
        wait_until(|| sender.as_ref().unwrap().stats().unwrap().waiting == (0, 1));
        assert!(in_child(|| {
            drop((sender.take(), receiver.take()));
            true
        }));
        assert!(sender.is_some(), "the parent's are its own");
        sender.as_ref().unwrap().send(1, 1).unwrap();
        assert_eq!(blocked.join().unwrap(), Ok((1, 1)));
    });
    assert_eq!(receiver.as_ref().unwrap().try_receive(), Err(ReceiveError::Empty));
}

/// `adopt` says that nobody else was there at the fork. Where that is wrong, it must not lead to the
/// stacks of threads that do not exist.
#[test]
fn a_child_that_adopts_does_not_touch_who_waited_in_its_parent() {
    let _alone = alone();
    let queue: Queue<u32> = Queue::new(4).unwrap();
    thread::scope(|scope| {
        let receiver = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().unwrap().waiting == (0, 1));
        assert!(in_child(|| {
            percpu::fork::adopt();
            queue.try_send(7, 7).unwrap_err().reason == SendRefused::Forked
        }));
        queue.send(1, 1).unwrap();
        assert_eq!(receiver.join().unwrap(), Ok((1, 1)));
    });
    // Of a quiet queue it may wait, and leave.
    assert!(in_child(|| {
        percpu::fork::adopt();
        let mut cx = Context::from_waker(Waker::noop());
        let mut receive = Box::pin(queue.receive_async());
        assert!(receive.as_mut().poll(&mut cx).is_pending());
        assert_eq!(queue.stats().unwrap().waiting, (0, 1));
        drop(receive);
        queue.validate();
        queue.stats().unwrap().waiting == (0, 0)
    }));
}
