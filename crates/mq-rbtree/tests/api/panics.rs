//! User code that panics in every callback that a queue has, and wakers that use their queue: the queue stays
//! consistent, no message is lost or dropped under the lock, and the other waiters proceed.

use std::cell::Cell;
use std::cmp::Ordering;
use std::mem;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::task::{Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;

use mq_rbtree::{Queue, RbTree};
use testkit::{TestTask, wait_until};

use crate::panicking::{OnWake, bomb, panics, poll};

// Comparisons of priorities.

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

/// Returns whether `f` panics in its comparison of this number.
fn panics_at<R>(nth: i32, f: impl FnOnce() -> R) -> bool {
    COMPARISONS.set(nth);
    let panicked = panics(f);
    COMPARISONS.set(-1);
    panicked
}

type Probed = Queue<LockProbe, RbTree<Key>>;

/// A message that counts its drops while its queue is not locked.
struct LockProbe(Weak<Probed>, Arc<AtomicUsize>);

impl Drop for LockProbe {
    fn drop(&mut self) {
        let free = self.0.upgrade().is_none_or(|queue| format!("{queue:?}").contains("len"));
        self.1.fetch_add(usize::from(free), SeqCst);
    }
}

/// An operation, which gets a message and the number of the comparison that panics and returns whether it
/// panicked, and the change of the length without and with a panic.
type Operation = (&'static str, fn(&Probed, LockProbe, i32) -> bool, isize, isize);

const OPERATIONS: [Operation; 9] = [
    ("try_send", |q, m, n| panics_at(n, || q.try_send(m, Key(83)).map_err(drop).unwrap()), 1, 0),
    (
        "send_async",
        |queue, message, nth| {
            let mut task = TestTask::new(queue.send_async(message, Key(83)));
            panics_at(nth, || assert!(task.poll().is_ready()))
        },
        1,
        0,
    ),
    (
        "try_send_batch",
        |queue, message, nth| {
            let mut batch = [(message, Key(83))].into();
            panics_at(nth, || queue.try_send_batch(&mut batch).unwrap())
        },
        1,
        0,
    ),
    ("try_receive", |queue, _, nth| panics_at(nth, || queue.try_receive().unwrap()), -1, 0),
    (
        "receive_async",
        |queue, _, nth| {
            let mut task = TestTask::new(queue.receive_async());
            panics_at(nth, || assert!(task.poll().is_ready()))
        },
        -1,
        0,
    ),
    (
        "try_receive_batch",
        |queue, _, nth| panics_at(nth, || queue.try_receive_batch(&mut Vec::new(), 1).unwrap()),
        -1,
        0,
    ),
    (
        "accept",
        |queue, _, nth| panics_at(nth, || queue.try_receive_guard().unwrap().accept()),
        -1,
        0,
    ),
    // The place of a message that cannot be put back is free.
    (
        "drop of a guard",
        |queue, _, nth| {
            let guard = queue.try_receive_guard().unwrap();
            panics_at(nth, || drop(guard))
        },
        0,
        -1,
    ),
    // It takes the first message, before it compares priorities.
    (
        "drain_filter",
        |queue, _, nth| {
            let mut first = true;
            panics_at(nth, || queue.drain_filter(|_, _| mem::take(&mut first)))
        },
        -1,
        -1,
    ),
];

/// Each comparison of each operation panics in turn, with and without ageing, and beside a task that waits for
/// room. The queue is as it was, no node is lost, and the task proceeds.
#[test]
fn inv06_an_order_that_panics_leaves_the_queue_as_it_was() {
    for at in 0..4 * OPERATIONS.len() {
        let ((name, operation, more, less), ages, waits) =
            (OPERATIONS[at / 4], at % 2 == 1, at / 2 % 2 == 1);
        let mut builder = Queue::builder_with_keys(16).reserve(Key(70), 4).no_alloc();
        if ages {
            builder = builder.ageing(NonZeroU32::MIN);
        }
        let queue: Arc<Probed> = Arc::new(builder.build().unwrap());
        let (dropped, made) = (Arc::new(AtomicUsize::new(0)), Cell::new(0));
        let message = || {
            made.set(made.get() + 1);
            LockProbe(Arc::downgrade(&queue), Arc::clone(&dropped))
        };
        let send = |key| queue.try_send(message(), Key(key)).map_err(drop).unwrap();
        (0..12).for_each(|n| send(n * 5 + 40));
        drop(queue.try_receive()); // with ageing, the next receive looks for a lower priority
        send(55);
        let mut task = TestTask::new(queue.send_async(message(), Key(12)));
        assert!(!waits || task.poll().is_pending());
        let nodes = || queue.stats().levels.live + queue.stats().levels.kept;
        let before = nodes();
        for nth in 0.. {
            let len = queue.len() as isize;
            let panicked = operation(&queue, message(), nth);
            queue.validate();
            let change = if panicked { less } else { more };
            assert_eq!(queue.len() as isize - len, change, "{name} {nth}");
            assert_eq!((nodes(), queue.stats().guarded), (before, 0), "{name} {nth}");
            let alive = queue.len() + 1; // that of the task
            assert_eq!(dropped.load(SeqCst), made.get() - alive, "{name} {nth}: under the lock");
            if !panicked {
                // A send compares with the reserve and in the tree.
                let least = if more > 0 { 3 } else { i32::from(less < 0 || (ages && more < 0)) };
                assert!(nth >= least, "{name}: {nth} panics");
                break;
            }
            (queue.len()..12).for_each(|_| send(55));
        }
        assert!(queue.drain().is_sorted_by(|a, b| a.1 >= b.1));
        assert!(!waits || task.wakes() == 1, "{name}");
        assert!(task.poll().is_ready());
        drop(task);
        COMPARISONS.set(0);
        drop(queue);
        assert_eq!(COMPARISONS.replace(-1), 0, "the drop of a queue compares nothing");
    }
}

/// In a thread that panics already, the second panic is dropped, and so is the message.
#[test]
fn an_order_that_panics_in_an_unwind_drops_the_message() {
    let queue: Queue<Box<u32>, RbTree<Key>> = Queue::with_keys(2).unwrap();
    (1..=2).for_each(|n| queue.send(Box::new(n), Key(n)).unwrap());
    assert!(panics(|| {
        let _guard = queue.receive_guard().unwrap();
        COMPARISONS.set(0);
        panic!("in the consumer");
    }));
    assert_eq!(COMPARISONS.get(), -1, "a comparison panicked");
    queue.validate();
    assert_eq!((queue.len(), queue.stats().guarded, queue.stats().received), (1, 0, 1));
}

/// The first of two tasks panics in the poll for which it was woken, and is dropped. The other one proceeds.
#[test]
fn inv14_a_task_whose_order_panics_passes_its_wake_up_on() {
    for sends in [false, true] {
        let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(2).ageing(NonZeroU32::MIN);
        let queue = &builder.build().unwrap();
        for _ in 0..2 {
            queue.send(0, Key(3)).unwrap(); // the next ageing receive looks for a lower priority
            assert!(queue.try_receive().is_ok());
        }
        (0..u32::from(sends) * 2).for_each(|n| queue.send(n, Key(n)).unwrap());
        let perform = |n| async move {
            match sends {
                true => queue.send_async(n, Key(n)).await.is_ok(),
                false => queue.receive_async().await.is_ok(),
            }
        };
        let [mut first, mut second] = [8, 9].map(|n| TestTask::waiting(perform(n)));
        match sends {
            true => drop(queue.try_receive()),
            false => queue.send(1, Key(1)).unwrap(),
        }
        assert_eq!((first.wakes(), second.wakes()), (1, 0));
        assert!(panics_at(0, || first.poll()));
        drop(first);
        assert_eq!((second.wakes(), second.poll()), (1, Poll::Ready(true)));
        queue.validate();
    }
}

// Filters, and the drops of messages.

/// If a filter panics, the messages it has selected are dropped, the others stay, and the room is used.
#[test]
fn a_panicking_filter_leaves_the_remaining_messages() {
    let queue: Queue<Arc<u32>> = Queue::new(10).unwrap();
    let messages: Vec<_> = (0..10).map(Arc::new).collect();
    for (n, message) in messages.iter().enumerate() {
        queue.send(Arc::clone(message), n as u32 / 3).unwrap();
    }
    let mut task = TestTask::waiting(queue.send_async(Arc::new(77), 7));
    let left = Cell::new(5);
    assert!(panics(|| {
        queue.drain_filter(|_, _| {
            assert!(left.replace(left.get() - 1) > 0, "a predicate");
            left.get() % 2 == 0
        })
    }));
    assert_eq!(task.wakes(), 1);
    queue.validate();
    let kept = messages.iter().filter(|message| Arc::strong_count(message) == 2).count();
    assert_eq!((kept, queue.len()), (7, 7), "of ten, five looked at, three taken");
    assert!(task.poll().is_ready());
}

/// The drop of a message panics in each of the places where one is dropped. All others are dropped once.
#[test]
fn a_panicking_drop_loses_no_other_message() {
    struct PanicsOnDrop(Arc<AtomicUsize>);
    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
            assert!(thread::panicking(), "a message");
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let message = || PanicsOnDrop(Arc::clone(&dropped));
    let (sender, receiver) = Queue::builder(8).channel().unwrap();
    (0..8).for_each(|n| sender.send(message(), n).unwrap());
    assert!(panics(|| receiver.try_receive()));
    sender.validate();
    assert!(panics(|| receiver.drain_filter(|_, priority| priority > 4)));
    sender.validate();
    assert_eq!((dropped.load(SeqCst), sender.len()), (3, 5));
    assert!(panics(move || drop(receiver)), "the first of five");
    assert!(sender.is_closed() && panics(|| sender.try_send(message(), 1)));
    sender.validate();
    assert_eq!((dropped.load(SeqCst), sender.len()), (5, 4));
    assert!(panics(move || drop(sender)));
    assert_eq!(dropped.load(SeqCst), 9, "each, though the first of them panicked");
}

// Wakers.

/// A waker whose clone panics: the future is dropped, and takes no message and no wake-up with it.
#[test]
fn a_waker_that_cannot_be_cloned_costs_no_message() {
    fn no_clone(_: *const ()) -> RawWaker {
        panic!("a clone");
    }
    static NO_CLONE: RawWakerVTable = RawWakerVTable::new(no_clone, |_| (), |_| (), |_| ());
    // SAFETY: the functions of the table use no data.
    let waker = || unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &NO_CLONE)) };
    let queue: Queue<u32> = Queue::new(1).unwrap();
    for is_listed in [false, true] {
        let mut receive = Box::pin(queue.receive_async());
        assert!(!is_listed || poll(&mut receive, Waker::noop().clone()).is_pending());
        assert!(panics(|| poll(&mut receive, waker()).is_ready()));
        drop(receive);
        queue.send(1, 1).unwrap();
        let mut send = Box::pin(queue.send_async(2, 2));
        assert!(!is_listed || poll(&mut send, Waker::noop().clone()).is_pending());
        assert!(panics(|| poll(&mut send, waker()).is_ready()));
        drop(send);
        assert_eq!((queue.receive(), queue.stats().waiting), (Ok((1, 1)), (0, 0)));
    }
    queue.validate();
}

/// If one of several wakers panics, the others are called, and threads proceed: receivers of a queue that is
/// closed, or senders of one that is drained.
#[test]
fn a_panicking_waker_does_not_stop_other_wake_ups() {
    for sends in [false, true] {
        let queue: &Queue<u32> = &Queue::builder(12).spin(false).build().unwrap();
        (0..12 * u32::from(sends)).for_each(|n| queue.send(n, 1).unwrap());
        let perform = || async move {
            match sends {
                true => queue.send_async(7, 7).await.is_ok(),
                false => queue.receive_async().await.is_ok(),
            }
        };
        let mut first = Box::pin(perform());
        assert!(poll(&mut first, bomb()).is_pending());
        let mut tasks = [(); 6].map(|()| TestTask::waiting(perform()));
        thread::scope(|scope| {
            let block = || match sends {
                true => queue.send(7, 7).is_ok(),
                false => queue.receive().is_ok(),
            };
            let blocked = [(); 3].map(|()| scope.spawn(block));
            wait_until(|| queue.stats().waiting == if sends { (10, 0) } else { (0, 10) });
            assert!(panics(|| match sends {
                true => drop(queue.drain()),
                false => assert!(queue.close()),
            }));
            assert!(blocked.into_iter().all(|thread| thread.join().unwrap() == sends));
        });
        queue.validate();
        drop(first);
        for task in &mut tasks {
            assert_eq!((task.wakes(), task.poll()), (1, Poll::Ready(sends)));
        }
        assert_eq!(queue.len(), if sends { 9 } else { 0 });
    }
}

/// If a waker panics, the received message is dropped and not leaked.
#[test]
fn a_received_message_is_dropped_if_a_waker_panics() {
    type Messages = Queue<Arc<()>>;
    let receives: [fn(&Messages); 6] = [
        |queue| drop(queue.receive()),
        |queue| drop(queue.try_receive()),
        |queue| drop(poll(&mut Box::pin(queue.receive_async()), Waker::noop().clone())),
        |queue| assert!(queue.try_receive_batch(&mut Vec::new(), 1).is_err()),
        |queue| drop(queue.drain()),
        |queue| drop(queue.try_receive_guard().unwrap().accept()),
    ];
    for (nth, receive) in receives.into_iter().enumerate() {
        let (queue, message): (Messages, _) = (Queue::new(1).unwrap(), Arc::new(()));
        queue.send(Arc::clone(&message), 1).unwrap();
        let mut waits = Box::pin(queue.send_async(Arc::new(()), 1));
        assert!(poll(&mut waits, bomb()).is_pending());
        assert!(panics(|| receive(&queue)), "{nth}");
        assert_eq!(Arc::strong_count(&message), 1, "{nth}");
        queue.validate();
    }
}

/// A task that waits takes a message that another task was woken for. If the drop of its former waker
/// panics, the message is dropped and not leaked.
#[test]
fn a_message_is_dropped_if_the_drop_of_a_waker_panics() {
    struct PanicsWhenDropped;
    impl Wake for PanicsWhenDropped {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            panic!("the drop of a waker");
        }
    }
    let (queue, message) = (Queue::<Arc<()>>::new(1).unwrap(), Arc::new(()));
    let _woken = TestTask::waiting(queue.receive_async());
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, Arc::new(PanicsWhenDropped).into()).is_pending());
    queue.send(Arc::clone(&message), 1).unwrap();
    assert!(panics(|| poll(&mut receive, Waker::noop().clone())));
    assert_eq!((Arc::strong_count(&message), queue.len()), (1, 0));
    queue.validate();
}

/// A waker that sends and receives on the queue that calls it.
#[test]
fn wakers_may_use_the_queue() {
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(1).unwrap());
    let used = Arc::new(AtomicUsize::new(0));
    let waker = || -> Waker {
        let (queue, used) = (Arc::downgrade(&queue), Arc::clone(&used));
        let run = move || {
            let queue = queue.upgrade().unwrap();
            queue.validate();
            let _ = (queue.try_receive(), queue.try_send(9, 9), queue.stats());
            used.fetch_add(1, SeqCst);
        };
        Arc::new(OnWake(Box::new(run))).into()
    };
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, waker()).is_pending());
    queue.send(1, 1).unwrap();
    let mut send = Box::pin(queue.send_async(2, 2));
    assert!(poll(&mut send, waker()).is_pending());
    queue.try_receive().unwrap();
    assert_eq!(used.load(SeqCst), 2);
    drop((send, receive));
    queue.drain();
    queue.validate();
}
