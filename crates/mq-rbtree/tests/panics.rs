//! Code of the user's that panics, and code of the user's that uses the same queue: whatever runs for a
//! queue, the queue stays whole, and whoever waits on it goes on.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/flag.rs"]
mod flag;
#[path = "common/until.rs"]
mod until;

use std::cell::Cell;
use std::cmp::Ordering;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::task::{Context, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;

use mq_rbtree::{Queue, RbTree, ReceiveError, SendRefused, Wait};

use flag::Flag;
use until::wait_until;

/// Panics, once, when it is woken.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

fn poll<F: Future>(future: &mut Pin<Box<F>>, waker: Waker) -> std::task::Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(&waker))
}

/// Whether `f` panics.
fn panics<R>(f: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(f()))).is_err()
}

/// A waker that panics when it is cloned: the futures go on with the next.
#[test]
fn a_waker_that_cannot_be_cloned_costs_no_message() {
    fn no_clone(_: *const ()) -> RawWaker {
        panic!("a clone");
    }
    static NO_CLONE: RawWakerVTable = RawWakerVTable::new(no_clone, |_| (), |_| (), |_| ());
    // SAFETY: the functions use no data.
    let waker = || unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &NO_CLONE)) };
    let noop = || Waker::noop().clone();
    let queue: Queue<u32> = Queue::new(1).unwrap();
    for is_listed in [false, true] {
        queue.send(1, 1).unwrap();
        let mut send = Box::pin(queue.send_async(2, 2));
        if is_listed {
            assert!(poll(&mut send, noop()).is_pending());
        }
        assert!(panics(|| poll(&mut send, waker()).is_ready()));
        queue.validate();
        assert!(poll(&mut send, noop()).is_pending());
        assert_eq!(queue.receive(), Ok((1, 1)));
        assert!(poll(&mut send, noop()).is_ready());
        assert_eq!(queue.receive(), Ok((2, 2)));
        let mut receive = Box::pin(queue.receive_async());
        if is_listed {
            assert!(poll(&mut receive, noop()).is_pending());
        }
        assert!(panics(|| poll(&mut receive, waker()).is_ready()));
        queue.send(3, 3).unwrap();
        assert_eq!(poll(&mut receive, noop()), std::task::Poll::Ready(Ok((3, 3))));
    }
    queue.validate();
}

/// A waker that panics among others: the others are called, and threads go on.
#[test]
fn a_waker_that_panics_costs_nobody_else_its_wake_up() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let flags: Vec<_> = (0..10).map(|_| Flag::new()).collect();
    let mut bombs: Vec<_> = (0..2).map(|_| Box::pin(queue.receive_async().urgency(9))).collect();
    for bomb in &mut bombs {
        assert!(poll(bomb, Waker::from(Arc::new(Bomb))).is_pending());
    }
    let mut tasks: Vec<_> = flags.iter().map(|_| Box::pin(queue.receive_async())).collect();
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    thread::scope(|scope| {
        let blocked: Vec<_> = (0..3).map(|_| scope.spawn(|| queue.receive())).collect();
        wait_until(|| queue.stats().unwrap().waiting == (0, 15));
        assert!(panics(|| queue.close()));
        for blocked in blocked {
            assert_eq!(blocked.join().unwrap(), Err(ReceiveError::Closed));
        }
    });
    assert!(flags.iter().all(|flag| flag.count() == 1));
    queue.validate();
    assert_eq!(queue.is_closed(), Ok(true));
}

/// What a receive has taken when a waker panics is dropped, not leaked.
#[test]
fn a_message_is_dropped_when_its_receive_wakes_who_panics() {
    type Messages = Queue<Arc<()>>;
    let receives: [fn(&Messages); 5] = [
        |queue| drop(queue.receive()),
        |queue| drop(queue.try_receive()),
        |queue| drop(poll(&mut Box::pin(queue.receive_async()), Waker::noop().clone())),
        |queue| assert!(queue.receive_batch(&mut Vec::new(), 1, Wait::NO).is_err()),
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

/// The same for those who wait to send, when a drain makes room for all.
#[test]
fn room_for_many_is_given_to_all_though_a_waker_panics() {
    let queue: Queue<u32> = Queue::builder(12).spin(false).build().unwrap();
    (0..12).for_each(|n| queue.send(n, 1).unwrap());
    let mut bomb = Box::pin(queue.send_async(100, 1));
    assert!(poll(&mut bomb, Waker::from(Arc::new(Bomb))).is_pending());
    let flags: Vec<_> = (0..6).map(|_| Flag::new()).collect();
    let mut tasks: Vec<_> = flags.iter().map(|_| Box::pin(queue.send_async(7, 7))).collect();
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    thread::scope(|scope| {
        let blocked: Vec<_> = (0..3).map(|_| scope.spawn(|| queue.send(8, 8))).collect();
        wait_until(|| queue.stats().unwrap().waiting == (10, 0));
        assert!(panics(|| queue.drain()));
        assert!(blocked.into_iter().all(|blocked| blocked.join().unwrap().is_ok()));
    });
    assert!(flags.iter().all(|flag| flag.count() == 1));
    queue.validate();
    assert_eq!(queue.len(), Ok(3));
    drop(bomb);
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_ready());
    }
    assert_eq!(queue.len(), Ok(9));
    queue.validate();
}

#[test]
fn a_notification_that_panics_leaves_the_message_there() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    queue.notify(|| panic!("a notification")).unwrap();
    assert!(panics(|| queue.send(1, 1)));
    queue.validate();
    assert_eq!(queue.receive(), Ok((1, 1)));
    assert!(!queue.cancel_notify(), "it was the one shot");
    queue.send(2, 2).unwrap();
}

/// What the predicate had taken is dropped, the rest stays, and room that came of it is used.
#[test]
fn a_predicate_that_panics_leaves_what_it_had_not_looked_at() {
    let queue: Queue<Arc<u32>> = Queue::builder(10).spin(false).build().unwrap();
    let messages: Vec<_> = (0..10).map(Arc::new).collect();
    for (n, message) in messages.iter().enumerate() {
        queue.send(Arc::clone(message), n as u32 / 3).unwrap();
    }
    let flag = Flag::new();
    let mut task = Box::pin(queue.send_async(Arc::new(77), 7));
    assert!(poll(&mut task, flag.waker()).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(Arc::new(88), 8));
        wait_until(|| queue.stats().unwrap().waiting == (2, 0));
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
    assert_eq!((kept, queue.len()), (7, Ok(8)), "of ten, five looked at, three taken");
    assert!(poll(&mut task, flag.waker()).is_ready());
    queue.validate();
}

/// Looking is no change, and nothing is held afterwards.
#[test]
fn a_look_that_panics_changes_nothing() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    queue.send(1, 1).unwrap();
    assert!(panics(|| queue.peek(|_, _| panic!("a look"))));
    queue.validate();
    assert_eq!(queue.receive(), Ok((1, 1)));
}

#[test]
fn a_measure_that_panics_sends_nothing() {
    let queue: Queue<usize> = Queue::builder(9)
        .measure(|n| if *n == 7 { panic!("a measure") } else { *n })
        .build()
        .unwrap();
    assert!(panics(|| queue.send(7, 1)));
    assert!(panics(|| queue.send_async(7, 1)));
    let mut batch = [1, 2, 7, 3].map(|n| (n, 1)).into();
    assert!(panics(|| queue.send_batch(&mut batch, Wait::NO)));
    queue.validate();
    assert_eq!((batch.len(), queue.len()), (4, Ok(0)), "all are measured before the first is sent");
}

thread_local! {
    /// Comparisons until one panics; negative: none does.
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

/// With the nth comparison of an operation panicking, for every n.
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
            assert_eq!(queue.len(), before.map(|len| len + more));
            panicked
        });
        at_every_comparison(|| {
            let before = (queue.len(), queue.stats().unwrap().received);
            let panicked = panics(|| queue.try_receive().unwrap());
            COMPARISONS.set(-1);
            queue.validate();
            if panicked {
                assert_eq!((queue.len(), queue.stats().unwrap().received), before);
            }
            panicked
        });
        at_every_comparison(|| {
            let panicked = panics(|| queue.drain_filter(|n, _| **n % 9 == 3));
            COMPARISONS.set(-1);
            queue.validate();
            panicked
        });
        at_every_comparison(|| {
            let panicked = panics(|| queue.len_at(Key(priority)));
            COMPARISONS.set(-1);
            queue.validate();
            panicked
        });
    }
    let left = queue.drain().unwrap();
    assert!(left.is_sorted_by(|a, b| a.1 >= b.1));
    drop(left);
    assert_eq!(Arc::strong_count(&message), 1, "none was leaked");
}

/// A receive that makes room compares the key of a sender that waits: if that panics it is the
/// sender's affair, which tries by itself.
#[test]
fn inv06_an_order_that_panics_in_a_hand_off_costs_the_receiver_nothing() {
    let mut by_itself = 0;
    for nth in 0..10 {
        let queue: Queue<u32, RbTree<Key>> =
            Queue::builder_with_keys(40).spin(false).build().unwrap();
        (0..40).for_each(|n| queue.send(n, Key(n * 3)).unwrap());
        thread::scope(|scope| {
            let blocked = scope.spawn(|| queue.send(100, Key(10)));
            wait_until(|| queue.stats().unwrap().waiting == (1, 0));
            COMPARISONS.set(nth);
            let received = queue.try_receive();
            COMPARISONS.set(-1);
            assert_eq!(received, Ok((39, Key(117))));
            assert!(blocked.join().unwrap().is_ok());
        });
        queue.validate();
        assert_eq!((queue.len(), queue.len_at(Key(10))), (Ok(40), Ok(1)));
        by_itself += 1 - queue.stats().unwrap().taken_over;
    }
    assert!((1..10).contains(&by_itself), "{by_itself}");
}

/// And whoever waits goes on where an aged receive panics.
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
            wait_until(|| queue.stats().unwrap().waiting == (1, 0));
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

/// Tells when it ends whether its queue is locked then.
struct Minds(Weak<Queue<Minds, RbTree<Key>>>, Arc<AtomicUsize>);

impl Drop for Minds {
    fn drop(&mut self) {
        let free = self.0.upgrade().is_some_and(|queue| format!("{queue:?}").contains("len"));
        self.1.fetch_add(usize::from(free), SeqCst);
    }
}

/// The message that was being sent is dropped after the unlock; of a batch it stays in front.
#[test]
fn inv06_an_order_that_panics_does_not_drop_the_message_under_the_lock() {
    type Minding = Arc<Queue<Minds, RbTree<Key>>>;
    let dropped = Arc::new(AtomicUsize::new(0));
    let check = |send: &dyn Fn(&Minding, Minds)| {
        let builder = Queue::builder_with_keys(20).reserve(Key(70), 2).spin(false);
        let queue: Minding = Arc::new(builder.build().unwrap());
        let message = || Minds(Arc::downgrade(&queue), Arc::clone(&dropped));
        (0..12).for_each(|n| queue.try_send(message(), Key(n * 5)).map_err(drop).unwrap());
        let mut panicked = 0;
        at_every_comparison(|| {
            let before = (queue.len().unwrap(), dropped.load(SeqCst));
            let panics = panics(|| send(&queue, message()));
            COMPARISONS.set(-1);
            queue.validate();
            let more = usize::from(panics);
            assert_eq!(queue.len(), Ok(before.0 + 1 - more));
            assert_eq!(dropped.load(SeqCst), before.1 + more, "under the lock, or not at all");
            panicked += more;
            panics
        });
        assert!(panicked > 2, "a comparison with the reserve, and some in the tree");
        queue.drain().unwrap();
        panicked
    };
    check(&|queue, message| queue.try_send(message, Key(33)).map_err(drop).unwrap());
    check(&|queue, message| {
        let mut future = Box::pin(queue.send_async(message, Key(33)));
        assert!(poll(&mut future, Waker::noop().clone()).is_ready());
    });
    let kept = AtomicUsize::new(0);
    let of_batches = check(&|queue, message| {
        let mut batch = [(message, Key(33))].into();
        let panics = panics(|| queue.send_batch(&mut batch, Wait::NO).unwrap());
        kept.fetch_add(batch.len(), SeqCst);
        assert!(!panics);
    });
    assert_eq!(kept.load(SeqCst), of_batches);
}

/// What a sender that waits has is compared with the reserves by itself, once.
#[test]
fn inv06_an_order_that_panics_loses_no_message_beside_reserves() {
    for nth in 0..8 {
        let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(4).reserve(Key(50), 2);
        let queue = builder.spin(false).build().unwrap();
        (60..64).for_each(|n| queue.send(n, Key(n)).unwrap());
        thread::scope(|scope| {
            let blocked = scope.spawn(|| queue.send(10, Key(10)));
            wait_until(|| queue.stats().unwrap().waiting == (1, 0));
            for n in (60..64).rev() {
                COMPARISONS.set(nth);
                let received = catch_unwind(AssertUnwindSafe(|| queue.try_receive()));
                COMPARISONS.set(-1);
                assert_eq!(received.unwrap(), Ok((n, Key(n))), "{nth}");
            }
            assert!(blocked.join().unwrap().is_ok());
        });
        queue.validate();
        assert_eq!(queue.drain().unwrap(), [(10, Key(10))]);
    }
}

/// A send that would serve a thread by age, behind a task that has not looked yet.
#[test]
fn inv06_an_order_that_panics_in_an_aged_hand_off_costs_the_sender_nothing() {
    let mut by_itself = 0;
    for nth in 0..12 {
        let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(9).spin(false);
        let queue = builder.ageing(std::num::NonZeroU32::MIN).build().unwrap();
        queue.send(3, Key(3)).unwrap();
        queue.receive().unwrap(); // from here on there is a last one by age
        let mut task = Box::pin(queue.receive_async());
        assert!(poll(&mut task, Waker::noop().clone()).is_pending());
        thread::scope(|scope| {
            let blocked = scope.spawn(|| queue.receive());
            wait_until(|| queue.stats().unwrap().waiting == (0, 2));
            queue.send(5, Key(5)).unwrap(); // promised to the task
            COMPARISONS.set(nth);
            let sent = !panics(|| queue.try_send(7, Key(7)).unwrap());
            COMPARISONS.set(-1);
            if sent {
                by_itself += 1 - queue.stats().unwrap().handed_over;
            } else {
                queue.send(7, Key(7)).unwrap();
            }
            let received = blocked.join().unwrap();
            assert!(matches!(received, Ok((5 | 7, _))));
        });
        queue.validate();
        assert!(poll(&mut task, Waker::noop().clone()).is_ready());
    }
    assert!((1..12).contains(&by_itself), "{by_itself}");
}

/// What a task was told of is for another if its own poll panics, and it is dropped.
#[test]
fn inv14_a_receive_whose_order_panics_keeps_no_message() {
    let builder = Queue::<u32, RbTree<Key>>::builder_with_keys(2).spin(false);
    let queue = builder.ageing(std::num::NonZeroU32::MIN).build().unwrap();
    for _ in 0..2 {
        queue.send(0, Key(3)).unwrap(); // the next aged receive looks for what is below
        assert!(queue.try_receive().is_ok());
    }
    let flags = [Flag::new(), Flag::new()];
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

/// A message whose end looks at the queue that it was in.
struct Looks {
    queue: Weak<Queue<Looks>>,
    seen: Arc<AtomicUsize>,
}

impl Drop for Looks {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            // Would wait for itself for ever with the lock held.
            let _ = (queue.len(), queue.is_closed(), queue.cancel_notify());
            queue.validate();
        }
        self.seen.fetch_add(1, SeqCst);
    }
}

#[test]
fn a_message_may_use_its_queue_when_it_is_dropped() {
    let seen = Arc::new(AtomicUsize::new(0));
    let queue: Arc<Queue<Looks>> = Arc::new(Queue::new(8).unwrap());
    let message = || Looks { queue: Arc::downgrade(&queue), seen: Arc::clone(&seen) };
    let fill = || {
        for n in 0..8 - queue.len().unwrap() as u32 {
            queue.try_send(message(), n).unwrap();
        }
    };
    fill();
    (0..8).for_each(|_| drop(queue.try_receive().unwrap()));
    fill();
    drop(queue.drain_filter(|_, _| true));
    fill();
    assert!(panics(|| queue.drain_filter(|_, priority| {
        assert!(priority > 3);
        true
    })));
    fill();
    let mut future = Box::pin(queue.send_async(message(), 1));
    let pending = poll(&mut future, Waker::noop().clone()).is_pending();
    drop(future);
    assert!(pending);
    let mut batch = (0..20).map(|_| (message(), 2)).collect();
    assert_eq!(queue.send_batch(&mut batch, Wait::NO).unwrap_err().reason, SendRefused::Full);
    drop(batch);
    queue.close().unwrap();
    assert_eq!(queue.try_send(message(), 1).unwrap_err().reason, SendRefused::Closed);
    let mut out = Vec::new();
    let _ = queue.receive_batch(&mut out, 8, Wait::NO);
    drop(out);
    queue.validate();
    let before = seen.load(SeqCst);
    drop(queue);
    assert!(before > 40 && seen.load(SeqCst) >= before);
}

/// Panics as often as it is told to.
struct Fragile(Arc<AtomicUsize>);

impl Drop for Fragile {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        if !thread::panicking() {
            panic!("a message");
        }
    }
}

#[test]
fn a_message_that_panics_when_it_is_dropped_takes_no_other_along() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let message = || Fragile(Arc::clone(&dropped));
    let queue: Queue<Fragile> = Queue::new(8).unwrap();
    (0..8).for_each(|n| queue.send(message(), n).unwrap());
    assert!(panics(|| queue.try_receive()));
    queue.validate();
    assert!(panics(|| queue.drain_filter(|_, priority| priority > 4)));
    queue.validate();
    assert_eq!((dropped.load(SeqCst), queue.len()), (3, Ok(5)));
    assert!(panics(|| queue.close().map(|_| queue.try_send(message(), 1))));
    assert!(panics(move || drop(queue)));
    assert_eq!(dropped.load(SeqCst), 9, "each, though the first of them panicked");
}

/// A waker and a notification that send and receive on the queue that calls them.
#[test]
fn wakers_and_notifications_may_use_the_queue() {
    struct Uses(Weak<Queue<u32>>, AtomicUsize);
    impl Wake for Uses {
        fn wake(self: Arc<Self>) {
            let queue = self.0.upgrade().unwrap();
            queue.validate();
            let _ = (queue.try_receive(), queue.try_send(9, 9), queue.stats());
            let _ = (queue.notify(|| ()), queue.cancel_notify());
            self.1.fetch_add(1, SeqCst);
        }
    }
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(1).unwrap());
    let uses = Arc::new(Uses(Arc::downgrade(&queue), AtomicUsize::new(0)));
    let waker = || Waker::from(Arc::clone(&uses));
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, waker()).is_pending());
    queue.send(1, 1).unwrap();
    let mut send = Box::pin(queue.send_async(2, 2));
    assert!(poll(&mut send, waker()).is_pending());
    queue.try_receive().unwrap();
    assert_eq!(uses.1.load(SeqCst), 2);
    drop((send, receive));
    queue.drain().unwrap();

    let (inner, called) = (Arc::downgrade(&queue), Arc::new(AtomicUsize::new(0)));
    let counter = Arc::clone(&called);
    let notification = move || {
        let queue = inner.upgrade().unwrap();
        assert_eq!(queue.try_receive(), Ok((5, 5)), "after the message is there");
        let counter = Arc::clone(&counter);
        let count = move || {
            counter.fetch_add(1, SeqCst);
        };
        queue.notify(count).unwrap();
        queue.send(6, 6).unwrap();
    };
    queue.notify(notification).unwrap();
    queue.send(5, 5).unwrap();
    assert_eq!((called.load(SeqCst), queue.try_receive()), (1, Ok((6, 6))));
    queue.validate();
}
