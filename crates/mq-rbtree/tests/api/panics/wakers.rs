//! Wakers that panic when they are woken, cloned or dropped.

use std::sync::Arc;
use std::task::{RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;

use mq_rbtree::{Queue, ReceiveError};
use testkit::{WakeCount, wait_until};

use crate::panicking::{panics, poll};

/// A waker that panics once, when it is woken.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

/// A waker whose clone panics: the future is dropped, and takes no message and no wake-up with it.
#[test]
fn a_waker_that_cannot_be_cloned_costs_no_message() {
    fn no_clone(_: *const ()) -> RawWaker {
        panic!("a clone");
    }
    static NO_CLONE: RawWakerVTable = RawWakerVTable::new(no_clone, |_| (), |_| (), |_| ());
    // SAFETY: the functions of the table use no data.
    let waker = || unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &NO_CLONE)) };
    let noop = || Waker::noop().clone();
    let queue: Queue<u32> = Queue::new(1).unwrap();
    for is_listed in [false, true] {
        let mut receive = Box::pin(queue.receive_async());
        if is_listed {
            assert!(poll(&mut receive, noop()).is_pending());
        }
        assert!(panics(|| poll(&mut receive, waker()).is_ready()));
        drop(receive);
        queue.send(1, 1).unwrap();
        let mut send = Box::pin(queue.send_async(2, 2));
        if is_listed {
            assert!(poll(&mut send, noop()).is_pending());
        }
        assert!(panics(|| poll(&mut send, waker()).is_ready()));
        drop(send);
        assert_eq!((queue.receive(), queue.stats().waiting), (Ok((1, 1)), (0, 0)));
    }
    queue.validate();
}

/// If one of several wakers panics, the others are called, and threads proceed.
#[test]
fn a_panicking_waker_does_not_stop_other_wake_ups() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let flags: Vec<_> = (0..10).map(|_| WakeCount::new()).collect();
    let mut bomb = Box::pin(queue.receive_async());
    assert!(poll(&mut bomb, Waker::from(Arc::new(Bomb))).is_pending());
    let mut tasks: Vec<_> = flags.iter().map(|_| Box::pin(queue.receive_async())).collect();
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    thread::scope(|scope| {
        let blocked: Vec<_> = (0..3).map(|_| scope.spawn(|| queue.receive())).collect();
        wait_until(|| queue.stats().waiting == (0, 14));
        assert!(panics(|| queue.close()));
        for blocked in blocked {
            assert_eq!(blocked.join().unwrap(), Err(ReceiveError::Closed));
        }
    });
    assert!(flags.iter().all(|flag| flag.count() == 1));
    queue.validate();
    assert!(queue.is_closed());
}

/// If a waker panics, the received message is dropped and not leaked.
#[test]
fn a_received_message_is_dropped_if_a_waker_panics() {
    type Messages = Queue<Arc<()>>;
    let receives: [fn(&Messages); 5] = [
        |queue| drop(queue.receive()),
        |queue| drop(queue.try_receive()),
        |queue| drop(poll(&mut Box::pin(queue.receive_async()), Waker::noop().clone())),
        |queue| assert!(queue.try_receive_batch(&mut Vec::new(), 1).is_err()),
        |queue| drop(queue.drain()),
    ];
    for (nth, receive) in receives.into_iter().enumerate() {
        let (queue, message): (Messages, _) = (Queue::new(1).unwrap(), Arc::new(()));
        queue.send(Arc::clone(&message), 1).unwrap();
        let mut bomb = Box::pin(queue.send_async(Arc::new(()), 1));
        assert!(poll(&mut bomb, Waker::from(Arc::new(Bomb))).is_pending());
        assert!(panics(|| receive(&queue)), "{nth}");
        assert_eq!(Arc::strong_count(&message), 1, "{nth}");
        queue.validate();
    }
}

/// A waker whose drop panics.
struct PanicsWhenDropped;

impl Wake for PanicsWhenDropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("the drop of a waker");
    }
}

/// A task that waits takes a message that another task was woken for. If the drop of its former waker
/// panics, the message is dropped and not leaked.
#[test]
fn a_message_is_dropped_if_the_drop_of_a_waker_panics() {
    let (queue, message) = (Queue::<Arc<()>>::new(1).unwrap(), Arc::new(()));
    let mut woken = Box::pin(queue.receive_async());
    assert!(poll(&mut woken, Waker::noop().clone()).is_pending());
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, Arc::new(PanicsWhenDropped).into()).is_pending());
    queue.send(Arc::clone(&message), 1).unwrap();
    assert!(panics(|| poll(&mut receive, Waker::noop().clone())));
    assert_eq!((Arc::strong_count(&message), queue.len()), (1, 0));
    queue.validate();
}

/// If a waker panics in a drain, the other waiting senders are served.
#[test]
fn a_panicking_waker_does_not_stop_other_senders() {
    let queue: Queue<u32> = Queue::builder(12).spin(false).build().unwrap();
    (0..12).for_each(|n| queue.send(n, 1).unwrap());
    let mut bomb = Box::pin(queue.send_async(100, 1));
    assert!(poll(&mut bomb, Waker::from(Arc::new(Bomb))).is_pending());
    let flags: Vec<_> = (0..6).map(|_| WakeCount::new()).collect();
    let mut tasks: Vec<_> = flags.iter().map(|_| Box::pin(queue.send_async(7, 7))).collect();
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    thread::scope(|scope| {
        let blocked: Vec<_> = (0..3).map(|_| scope.spawn(|| queue.send(8, 8))).collect();
        wait_until(|| queue.stats().waiting == (10, 0));
        assert!(panics(|| queue.drain()));
        assert!(blocked.into_iter().all(|blocked| blocked.join().unwrap().is_ok()));
    });
    assert!(flags.iter().all(|flag| flag.count() == 1));
    queue.validate();
    assert_eq!(queue.len(), 3);
    drop(bomb);
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_ready());
    }
    assert_eq!(queue.len(), 9);
    queue.validate();
}
