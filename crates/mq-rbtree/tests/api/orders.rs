//! Comparisons of priorities that panic: the queue stays consistent, and no message is lost.
#![cfg(not(offlock_model))]

use crate::panicking;

use std::cell::Cell;
use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::thread;

use mq_rbtree::{Queue, RbTree};

use panicking::{panics, poll};
use testkit::WakeCount;
use testkit::wait_until;

thread_local! {
    /// The number of comparisons before one panics; if negative, none does.
    static COMPARISONS: Cell<i32> = const { Cell::new(-1) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key(u32);

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        let left = COMPARISONS.get();
        if left == 0 {
            COMPARISONS.set(-1);
            panic!("an order");
        }
        COMPARISONS.set((left - 1).max(-1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Repeats an operation so that each of its comparisons panics in turn.
fn at_every_comparison(mut operation: impl FnMut() -> bool) {
    for nth in 0..1_000 {
        COMPARISONS.set(nth);
        let panicked = operation();
        COMPARISONS.set(-1);
        if !panicked {
            return;
        }
    }
    panic!("it panics for ever");
}

#[test]
fn inv06_an_order_that_panics_leaves_the_queue_as_it_was() {
    let queue: Queue<Arc<u32>, RbTree<Key>> = Queue::with_keys(100).unwrap();
    for n in 0..60 {
        queue.send(Arc::new(n), Key(n * 7 % 61)).unwrap();
    }
    let message = Arc::new(1);
    for priority in [0, 5, 30, 61, 100] {
        at_every_comparison(|| {
            let before = queue.len();
            let panicked = panics(|| queue.try_send(Arc::clone(&message), Key(priority)).unwrap());
            COMPARISONS.set(-1);
            queue.validate();
            let more = usize::from(!panicked);
            assert_eq!(queue.len(), before + more);
            panicked
        });
        at_every_comparison(|| {
            let before = (queue.len(), queue.stats().received);
            let panicked = panics(|| queue.try_receive().unwrap());
            COMPARISONS.set(-1);
            queue.validate();
            if panicked {
                assert_eq!((queue.len(), queue.stats().received), before);
            }
            panicked
        });
        at_every_comparison(|| {
            let panicked = panics(|| queue.drain_filter(|n, _| **n % 9 == 3));
            COMPARISONS.set(-1);
            queue.validate();
            panicked
        });
    }
    let left = queue.drain();
    assert!(left.is_sorted_by(|a, b| a.1 >= b.1));
    drop(left);
    assert_eq!(Arc::strong_count(&message), 1, "none was leaked");
}

/// A receive in a guard that panics does not lose the node for the way back.
#[test]
fn inv06_an_order_that_panics_in_an_aged_guard_keeps_the_nodes() {
    let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(40).no_alloc();
    let queue = builder.ageing(std::num::NonZeroU32::MIN).build().unwrap();
    (0..20).for_each(|n| queue.send(n, Key(n * 3)).unwrap());
    assert_eq!(queue.try_receive(), Ok((19, Key(57)))); // the next one looks for a lower priority
    let nodes = || {
        let levels = queue.stats().levels;
        levels.live + levels.kept
    };
    let (before, mut panicked) = (nodes(), 0);
    at_every_comparison(|| {
        let panics = panics(|| queue.try_receive_guard().unwrap().accept());
        COMPARISONS.set(-1);
        queue.validate();
        assert_eq!(nodes(), before);
        panicked += usize::from(panics);
        panics
    });
    assert!(panicked > 1);
}

/// The place of a message that cannot be put back is free.
#[test]
fn an_order_that_panics_in_the_drop_of_a_guard_drops_the_message() {
    let queue: Queue<Box<u32>, RbTree<Key>> = Queue::with_keys(3).unwrap();
    for n in 1..=3 {
        queue.send(Box::new(n), Key(n)).unwrap();
    }
    let guard = queue.receive_guard().unwrap();
    COMPARISONS.set(0);
    assert!(panics(|| drop(guard)));
    // In a thread that panics already, the second panic is dropped.
    assert!(panics(|| {
        let _guard = queue.receive_guard().unwrap();
        COMPARISONS.set(0);
        panic!("in the consumer");
    }));
    assert_eq!(COMPARISONS.get(), -1, "a comparison panicked");
    queue.validate();
    assert_eq!((queue.len(), queue.stats().guarded, queue.stats().received), (1, 0, 2));
}

/// A waiting sender proceeds even if an ageing receive panics.
#[test]
fn inv06_an_order_that_panics_in_an_aged_receive_leaves_the_sender_able_to_go_on() {
    at_every_comparison(|| {
        let left = COMPARISONS.replace(-1);
        let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(40).spin(false);
        let queue = builder.ageing(std::num::NonZeroU32::MIN).build().unwrap();
        (0..40).for_each(|n| queue.send(n, Key(n * 3)).unwrap());
        let mut panicked = false;
        thread::scope(|scope| {
            let blocked = scope.spawn(|| queue.send(100, Key(10)));
            wait_until(|| queue.stats().waiting == (1, 0));
            COMPARISONS.set(left);
            panicked |= panics(|| queue.try_receive());
            panicked |= panics(|| queue.try_receive());
            COMPARISONS.set(-1);
            let _ = queue.try_receive();
            assert!(blocked.join().unwrap().is_ok());
        });
        queue.validate();
        panicked
    });
}

/// A message that records at its drop whether its queue is locked.
struct LockProbe(Weak<Queue<LockProbe, RbTree<Key>>>, Arc<AtomicUsize>);

impl Drop for LockProbe {
    fn drop(&mut self) {
        let free = self.0.upgrade().is_some_and(|queue| format!("{queue:?}").contains("len"));
        self.1.fetch_add(usize::from(free), SeqCst);
    }
}

/// The message of a panicking send is dropped after the unlock, also that of a batch.
#[test]
fn inv06_an_order_that_panics_does_not_drop_the_message_under_the_lock() {
    type ProbedQueue = Arc<Queue<LockProbe, RbTree<Key>>>;
    let dropped = Arc::new(AtomicUsize::new(0));
    let check = |send: &dyn Fn(&ProbedQueue, LockProbe)| {
        let builder = Queue::builder_with_keys(20).reserve(Key(70), 2).spin(false);
        let queue: ProbedQueue = Arc::new(builder.build().unwrap());
        let message = || LockProbe(Arc::downgrade(&queue), Arc::clone(&dropped));
        (0..12).for_each(|n| queue.try_send(message(), Key(n * 5)).map_err(drop).unwrap());
        let mut panicked = 0;
        at_every_comparison(|| {
            let before = (queue.len(), dropped.load(SeqCst));
            let panics = panics(|| send(&queue, message()));
            COMPARISONS.set(-1);
            queue.validate();
            let more = usize::from(panics);
            assert_eq!(queue.len(), before.0 + 1 - more);
            assert_eq!(dropped.load(SeqCst), before.1 + more, "under the lock, or not at all");
            panicked += more;
            panics
        });
        assert!(panicked > 2, "a comparison with the reserve, and some in the tree");
        queue.drain();
    };
    check(&|queue, message| queue.try_send(message, Key(33)).map_err(drop).unwrap());
    check(&|queue, message| {
        let mut future = Box::pin(queue.send_async(message, Key(33)));
        assert!(poll(&mut future, Waker::noop().clone()).is_ready());
    });
    check(&|queue, message| {
        queue.try_send_batch(&mut [(message, Key(33))].into()).unwrap();
    });
}

/// A sender that begins to wait compares its own priority with the reserves, once.
#[test]
fn inv06_an_order_that_panics_loses_no_message_beside_reserves() {
    for nth in 0..8 {
        let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(4).reserve(Key(50), 2);
        let queue = builder.spin(false).build().unwrap();
        (60..64).for_each(|n| queue.send(n, Key(n)).unwrap());
        thread::scope(|scope| {
            let blocked = scope.spawn(|| queue.send(10, Key(10)));
            wait_until(|| queue.stats().waiting == (1, 0));
            for n in (60..64).rev() {
                COMPARISONS.set(nth);
                let received = catch_unwind(AssertUnwindSafe(|| queue.try_receive()));
                COMPARISONS.set(-1);
                assert_eq!(received.unwrap(), Ok((n, Key(n))), "{nth}");
            }
            assert!(blocked.join().unwrap().is_ok());
        });
        queue.validate();
        assert_eq!(queue.drain(), [(10, Key(10))]);
    }
}

/// A sender that was woken for room panics. The messages stay, and the room is the next sender's.
#[test]
fn inv14_a_blocked_send_whose_order_panics_leaves_its_room() {
    let queue: Queue<u32, RbTree<Key>> = Queue::with_keys(3).unwrap();
    (1..4).for_each(|n| queue.send(n, Key(n)).unwrap());
    let flags = [WakeCount::new(), WakeCount::new()];
    let mut sends = [9, 8].map(|n| Box::pin(queue.send_async(n, Key(n))));
    for (send, flag) in sends.iter_mut().zip(&flags) {
        assert!(poll(send, flag.waker()).is_pending());
    }
    assert_eq!(queue.try_receive(), Ok((3, Key(3))));
    let [mut first, mut second] = sends;
    COMPARISONS.set(0);
    assert!(panics(|| poll(&mut first, flags[0].waker())));
    drop(first);
    assert_eq!((flags[0].count(), flags[1].count()), (1, 1));
    assert!(poll(&mut second, flags[1].waker()).is_ready());
    assert_eq!(queue.drain(), [(8, Key(8)), (2, Key(2)), (1, Key(1))]);
    queue.validate();
}

/// A permit is passed on if its task's own poll panics and the task is dropped.
#[test]
fn inv14_a_receive_whose_order_panics_keeps_no_message() {
    let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(2).spin(false);
    let queue = builder.ageing(std::num::NonZeroU32::MIN).build().unwrap();
    for _ in 0..2 {
        queue.send(0, Key(3)).unwrap(); // the next ageing receive looks for a lower priority
        assert!(queue.try_receive().is_ok());
    }
    let flags = [WakeCount::new(), WakeCount::new()];
    let mut tasks = [(); 2].map(|()| Box::pin(queue.receive_async()));
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    queue.send(1, Key(1)).unwrap();
    assert_eq!((flags[0].count(), flags[1].count()), (1, 0));
    let [mut first, mut second] = tasks;
    COMPARISONS.set(0);
    assert!(panics(|| poll(&mut first, flags[0].waker())));
    drop(first);
    assert_eq!((flags[0].count(), flags[1].count()), (1, 1));
    assert!(poll(&mut second, flags[1].waker()).is_ready());
    queue.validate();
}
