//! User code that panics: the queue stays consistent, and the other waiters proceed.
//!
//! Here are the functions of a queue and the drops of messages.

mod wakers;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use mq_rbtree::Queue;
use testkit::{WakeCount, wait_until};

use crate::panicking::{panics, poll};

/// If a filter panics, the messages it has selected are dropped, the others stay, and the room is
/// used.
#[test]
fn a_panicking_filter_leaves_the_remaining_messages() {
    let queue: Queue<Arc<u32>> = Queue::builder(10).spin(false).build().unwrap();
    let messages: Vec<_> = (0..10).map(Arc::new).collect();
    for (n, message) in messages.iter().enumerate() {
        queue.send(Arc::clone(message), n as u32 / 3).unwrap();
    }
    let flag = WakeCount::new();
    let mut task = Box::pin(queue.send_async(Arc::new(77), 7));
    assert!(poll(&mut task, flag.waker()).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(Arc::new(88), 8));
        wait_until(|| queue.stats().waiting == (2, 0));
        let left = Cell::new(5);
        assert!(panics(|| {
            queue.drain_filter(|_, _| {
                assert!(left.replace(left.get() - 1) > 0, "a predicate");
                left.get() % 2 == 0
            })
        }));
        wait_until(|| blocked.is_finished());
        assert!(blocked.join().unwrap().is_ok());
    });
    assert_eq!(flag.count(), 1);
    queue.validate();
    let kept = messages.iter().filter(|message| Arc::strong_count(message) == 2).count();
    assert_eq!((kept, queue.len()), (7, 8), "of ten, five looked at, three taken");
    assert!(poll(&mut task, flag.waker()).is_ready());
    queue.validate();
}

/// A message whose drop panics, except in an unwind.
struct PanicsOnDrop(Arc<AtomicUsize>);

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        if !thread::panicking() {
            panic!("a message");
        }
    }
}

#[test]
fn a_panicking_drop_loses_no_other_message() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let message = || PanicsOnDrop(Arc::clone(&dropped));
    let queue: Queue<PanicsOnDrop> = Queue::new(8).unwrap();
    (0..8).for_each(|n| queue.send(message(), n).unwrap());
    assert!(panics(|| queue.try_receive()));
    queue.validate();
    assert!(panics(|| queue.drain_filter(|_, priority| priority > 4)));
    queue.validate();
    assert_eq!((dropped.load(SeqCst), queue.len()), (3, 5));
    assert!(panics(|| {
        queue.close();
        queue.try_send(message(), 1)
    }));
    assert!(panics(move || drop(queue)));
    assert_eq!(dropped.load(SeqCst), 9, "each, though the first of them panicked");
}

/// If the drop of a message panics in the drop of the last receiver, the drop of the queue drops the others.
#[test]
fn messages_whose_drop_panics_leave_none_behind() {
    struct Message(Arc<AtomicUsize>, bool);
    impl Drop for Message {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
            assert!(!self.1, "the drop of a message");
        }
    }
    let drops = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = Queue::builder(8).channel().unwrap();
    for n in 0..6 {
        sender.send(Message(Arc::clone(&drops), n == 4), n).unwrap();
    }
    assert!(panics(move || drop(receiver)));
    assert!(sender.is_closed());
    sender.validate();
    drop(sender);
    assert_eq!(drops.load(SeqCst), 6);
}
