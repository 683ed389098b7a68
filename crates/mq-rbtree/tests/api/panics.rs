//! User code that panics, and user code that uses the same queue: the queue stays consistent, and
//! the other waiters proceed.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::panicking;
use crate::timed::TIMED_SENDS;

use std::cell::Cell;
use std::cmp::Ordering;
use std::future::{Future, ready};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;
use std::time::Duration;

use mq_rbtree::{Queue, RbTree, ReceiveError, SendError, SendRefused, Wait};

use panicking::{panics, poll};
use testkit::WakeCount;
use testkit::wait_until;

/// A waker that panics once, when it is woken.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

/// A waker whose clone panics: the futures proceed with the next waker.
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

/// If one of several wakers panics, the others are called, and threads proceed.
#[test]
fn a_panicking_waker_does_not_stop_other_wake_ups() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let flags: Vec<_> = (0..10).map(|_| WakeCount::new()).collect();
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
        wait_until(|| queue.stats().waiting == (0, 15));
        assert!(panics(|| queue.close()));
        for blocked in blocked {
            assert_eq!(blocked.join().unwrap(), Err(ReceiveError::Closed));
        }
    });
    assert!(flags.iter().all(|flag| flag.count() == 1));
    queue.validate();
    assert!(queue.is_closed());
}

/// A waker that panics when it is woken, with a payload whose drop panics.
struct NestedBomb;

struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("the drop of a payload");
    }
}

impl Wake for NestedBomb {
    fn wake(self: Arc<Self>) {
        panic_any(Payload);
    }
}

/// Only the first panic resumes. The payloads of the others are dropped, and a panic in their drop
/// stops no wake-up.
#[test]
fn payloads_that_panic_when_dropped_cost_no_wake_up() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let flags: Vec<_> = (0..6).map(|_| WakeCount::new()).collect();
    let mut bombs: Vec<_> = (0..3).map(|_| Box::pin(queue.receive_async().urgency(9))).collect();
    for bomb in &mut bombs {
        assert!(poll(bomb, Waker::from(Arc::new(NestedBomb))).is_pending());
    }
    let mut tasks: Vec<_> = flags.iter().map(|_| Box::pin(queue.receive_async())).collect();
    for (task, flag) in tasks.iter_mut().zip(&flags) {
        assert!(poll(task, flag.waker()).is_pending());
    }
    let panic = catch_unwind(AssertUnwindSafe(|| queue.close())).unwrap_err();
    let is_first = panic.is::<Payload>();
    std::mem::forget(panic); // its drop would panic here
    let woken: Vec<_> = flags.iter().map(|flag| flag.count()).collect();
    assert_eq!((woken, is_first), (vec![1; 6], true));
    queue.validate();
}

/// A key whose comparison panics on an armed thread, with a payload whose drop panics.
#[derive(Clone, Copy, Debug)]
struct PanickingKey(u32);

thread_local! {
    /// The comparison of this thread that panics: the next is 1. None does at 0.
    static ARMED: Cell<u32> = const { Cell::new(0) };
    /// The drops of messages on this thread.
    static DROPS: Cell<u32> = const { Cell::new(0) };
}

impl Ord for PanickingKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let nth = ARMED.get();
        ARMED.set(nth.saturating_sub(1));
        if nth == 1 {
            panic_any(Payload);
        }
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for PanickingKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PanickingKey {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for PanickingKey {}

/// The panic of a comparison for another thread is discarded. If the drop of its payload panics, the
/// notification is called and the other waiters are served.
#[test]
fn a_discarded_panic_whose_drop_panics_costs_no_action() {
    let queue = Queue::builder_with_keys(8).spin(false).build().unwrap();
    (0..8).for_each(|n| queue.send(n, PanickingKey(0)).unwrap());
    let called = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&called);
    queue.notify(move || _ = counter.fetch_add(1, SeqCst)).unwrap();
    let flag = WakeCount::new();
    thread::scope(|scope| {
        // The first finds an empty tree and compares nothing; the comparison for the second panics.
        let blocked: Vec<_> = (1..3)
            .map(|n| {
                let blocked = scope.spawn(|| queue.send(8, PanickingKey(1)));
                wait_until(|| queue.stats().waiting == (n, 0));
                blocked
            })
            .collect();
        let mut task = Box::pin(queue.send_async(9, PanickingKey(0)));
        assert!(poll(&mut task, flag.waker()).is_pending());
        let drained = catch_unwind(AssertUnwindSafe(|| {
            queue.drain_filter(|_, _| {
                ARMED.set(1);
                true
            })
        }));
        let is_of_the_drop = drained.unwrap_err().is::<&str>();
        assert_eq!((called.load(SeqCst), flag.count(), is_of_the_drop), (1, 1, true));
        assert!(blocked.into_iter().all(|blocked| blocked.join().unwrap().is_ok()));
        assert!(poll(&mut task, flag.waker()).is_ready());
    });
    queue.validate();
    assert_eq!((queue.len(), ARMED.get()), (3, 0));
}

/// A waker that calls a function.
struct Calls<F>(F);

impl<F: Fn() + Send + Sync> Wake for Calls<F> {
    fn wake(self: Arc<Self>) {
        self.0();
    }
}

/// A sender that is woken to compare by itself finds the room taken, by the waker that ran before, and
/// waits again.
#[test]
fn a_sender_that_tries_again_may_wait_again() {
    let queue = Arc::new(Queue::builder_with_keys(3).spin(false).build().unwrap());
    (0..3).for_each(|n| queue.send(n, PanickingKey(0)).unwrap());
    let inner = Arc::clone(&queue);
    let refill = move || (7..9).for_each(|n| inner.try_send(n, PanickingKey(0)).unwrap());
    let mut task = Box::pin(queue.send_async(9, PanickingKey(0)).urgency(9));
    assert!(poll(&mut task, Arc::new(Calls(refill)).into()).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(5, PanickingKey(1)));
        wait_until(|| queue.stats().waiting == (2, 0));
        let drained = catch_unwind(AssertUnwindSafe(|| {
            queue.drain_filter(|&n, _| {
                ARMED.set(2); // the first is of the filter's own search
                n < 2
            })
        }));
        assert!(drained.is_err(), "the drop of the payload panics");
        wait_until(|| queue.stats().send_waits == 3 && queue.stats().waiting == (1, 0));
        drop(task);
        assert_eq!(queue.receive(), Ok((2, PanickingKey(0))));
        assert!(blocked.join().unwrap().is_ok());
    });
    queue.validate();
    assert_eq!(queue.receive(), Ok((5, PanickingKey(1))));
}

/// A receiver that is woken to compare by itself finds the message taken, and waits again.
#[test]
fn a_receiver_that_tries_again_may_wait_again() {
    let every = NonZeroU32::MIN;
    let builder = Queue::builder_with_keys(3).ageing(every).spin(false);
    let queue = Arc::new(builder.build().unwrap());
    // The two nodes are kept, for a batch in one section, and the next receive compares by age.
    [0, 2].into_iter().for_each(|key| queue.send(0, PanickingKey(key)).unwrap());
    (0..2).for_each(|_| assert!(queue.receive().is_ok()));
    let inner = Arc::clone(&queue);
    let take = move || (0..2).for_each(|_| assert!(inner.try_receive().is_ok()));
    let mut task = Box::pin(queue.receive_async().urgency(9));
    assert!(poll(&mut task, Arc::new(Calls(take)).into()).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().waiting == (0, 2));
        ARMED.set(2); // the first is of the second message
        let mut batch = [(1, PanickingKey(1)), (2, PanickingKey(1))].into();
        let sent = catch_unwind(AssertUnwindSafe(|| queue.send_batch(&mut batch, Wait::NO)));
        wait_until(|| queue.stats().receive_waits == 3 && queue.stats().waiting == (0, 1));
        drop(task);
        queue.send(3, PanickingKey(1)).unwrap();
        assert_eq!(blocked.join().unwrap(), Ok((3, PanickingKey(1))));
        assert!(sent.is_err(), "the drop of the payload panics");
    });
    queue.validate();
}

/// If a filter and wakers panic, the filter's panic resumes.
#[test]
fn a_filter_and_wakers_may_panic_with_such_payloads() {
    let queue: Queue<u32> = Queue::builder(2).spin(false).build().unwrap();
    [1, 2].into_iter().for_each(|n| queue.send(n, 1).unwrap());
    let mut bomb = Box::pin(queue.send_async(3, 1).urgency(9));
    assert!(poll(&mut bomb, Waker::from(Arc::new(NestedBomb))).is_pending());
    let flag = WakeCount::new();
    let mut task = Box::pin(queue.send_async(4, 1));
    assert!(poll(&mut task, flag.waker()).is_pending());
    let filter = |n: &u32, _| if *n == 1 { true } else { panic_any("the filter") };
    let panic = catch_unwind(AssertUnwindSafe(|| queue.drain_filter(filter))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"the filter"));
    queue.validate();
    queue.drain();
    assert_eq!(flag.count(), 1);
    queue.validate();
}

/// If a waker panics, the received message is dropped and not leaked.
#[test]
fn a_received_message_is_dropped_if_a_waker_panics() {
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

/// Creates a queue of 10 bytes. A message has its number of bytes.
fn of_ten_bytes() -> Queue<u32> {
    Queue::builder(9).measure(|n: &u32| *n as usize).max_bytes(10).build().unwrap()
}

/// A timed send tries for the last time before the senders behind it are served: it keeps its room and
/// its message.
#[test]
fn a_panicking_waker_behind_a_timed_send_loses_no_message() {
    for send in TIMED_SENDS {
        let queue = of_ten_bytes();
        queue.send(10, 1).unwrap();
        let mut permitted = Box::pin(queue.send_async(4, 1));
        assert!(poll(&mut permitted, Waker::noop().clone()).is_pending());
        let mut bomb = Box::pin(queue.send_async(3, 1));
        let mut behind = || assert!(poll(&mut bomb, Waker::from(Arc::new(Bomb))).is_pending());
        let sent = send(&queue, &mut behind, &mut || assert_eq!(queue.receive(), Ok((10, 1))));
        assert!(sent.is_ok(), "{sent:?}");
        assert_eq!((queue.bytes(), queue.stats().timeouts), (8, 0));
        queue.validate();
    }
}

/// A send that is refused returns its message, though the wakers of the senders behind it panic.
#[test]
fn a_refused_send_returns_its_message_if_wakers_panic() {
    for send in TIMED_SENDS {
        let queue = of_ten_bytes();
        (0..2).for_each(|_| queue.send(5, 1).unwrap());
        // More than one lock section wakes.
        let mut bombs: Vec<_> = (0..5).map(|_| Box::pin(queue.send_async(1, 1))).collect();
        let mut behind = || {
            for bomb in &mut bombs {
                assert!(poll(bomb, Waker::from(Arc::new(NestedBomb))).is_pending());
            }
        };
        let sent = send(&queue, &mut behind, &mut || assert_eq!(queue.receive(), Ok((5, 1))));
        let error = sent.unwrap_err();
        assert_eq!((error.value, error.reason), (8, SendRefused::Timeout));
        assert_eq!((queue.stats().waiting, queue.stats().timeouts), ((0, 0), 1), "all were woken");
        assert!(bombs.iter_mut().all(|bomb| poll(bomb, Waker::noop().clone()).is_ready()));
        queue.validate();
    }
}

/// So does the send of a task that has a permit when the queue closes. A waker polls it before all waiters are
/// dismissed, and it serves those that are left.
#[test]
fn a_send_that_a_close_refuses_returns_its_message_if_wakers_panic() {
    let (sender, receiver) = Queue::builder(1).channel().unwrap();
    sender.send(1, 1).unwrap();
    let mut permitted = Box::pin(sender.clone().into_send_async(2, 1));
    assert!(poll(&mut permitted, Waker::noop().clone()).is_pending());
    let permitted = Arc::new(Mutex::new((permitted, Poll::Pending)));
    let inner = Arc::clone(&permitted);
    let poll_permitted = move || {
        let (future, sent) = &mut *inner.lock().unwrap();
        *sent = poll(future, Waker::noop().clone());
    };
    let mut first = Box::pin(sender.send_async(3, 1));
    assert!(poll(&mut first, Arc::new(Calls(poll_permitted)).into()).is_pending());
    let mut bombs: Vec<_> = (0..9).map(|_| Box::pin(sender.send_async(4, 1))).collect();
    for bomb in &mut bombs {
        assert!(poll(bomb, Waker::from(Arc::new(Bomb))).is_pending());
    }
    assert_eq!(receiver.receive(), Ok((1, 1)));
    assert!(panics(|| receiver.close()), "the first bombs are its own");
    let sent = std::mem::replace(&mut permitted.lock().unwrap().1, Poll::Pending);
    let Poll::Ready(Err(refused)) = sent else { panic!("{sent:?}") };
    assert_eq!((refused.value, refused.reason), (2, SendRefused::Closed));
    receiver.validate();
}

/// A message whose drop panics. In an unwind that would end the process.
struct PanicsInDrop;

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        DROPS.set(DROPS.get() + 1);
        panic!("the drop of a message");
    }
}

/// Whichever comparison of a send panics, its message is dropped before that panic resumes.
#[test]
fn a_message_whose_comparison_panics_is_not_dropped_in_an_unwind() {
    type Messages = Queue<Option<PanicsInDrop>, RbTree<PanickingKey>>;
    type Send = fn(&Messages) -> Result<(), SendError<Option<PanicsInDrop>>>;
    let by_thread: Send = |queue| {
        let wait = Wait::at_most(Duration::from_millis(5));
        queue.send_with(Some(PanicsInDrop), PanickingKey(2), wait)
    };
    let by_task: Send = |queue| {
        let send = queue.send_async(Some(PanicsInDrop), PanickingKey(2)).until(ready(()));
        let Poll::Ready(sent) = poll(&mut Box::pin(send), Waker::noop().clone()) else { panic!() };
        sent
    };
    for (send, most, spare, fewest) in
        [(by_thread, 3, 9, 5), (by_task, 3, 9, 4), (by_thread, 5, 0, 2), (by_task, 5, 9, 2)]
    {
        let builder = Queue::builder_with_keys(most).spare_nodes(spare).spin(false);
        let queue: Messages = builder.reserve(PanickingKey(7), 1).build().unwrap();
        let fill = |keys: [u32; 3]| keys.map(|key| queue.send(None, PanickingKey(key)).is_ok());
        fill([5, 6, 9]);
        queue.drain(); // a node is kept, if any may be
        assert_eq!(fill([5, 5, 9]), [true; 3]);
        let mut sent = Ok(());
        let panics = (1..).take_while(|&nth| {
            ARMED.set(nth);
            DROPS.set(0);
            let caught = catch_unwind(AssertUnwindSafe(|| send(&queue)));
            ARMED.set(0);
            queue.validate();
            match caught {
                Ok(done) => sent = done,
                Err(panic) => {
                    assert_eq!((DROPS.get(), panic.is::<Payload>(), queue.len()), (1, true, 3));
                    std::mem::forget(panic);
                    return true;
                }
            }
            false
        });
        assert!(panics.count() >= fewest, "{most} {spare}");
        assert_eq!(sent.is_ok(), most == 5);
        sent.map_err(std::mem::forget).unwrap_or(());
        queue.drain().into_iter().for_each(std::mem::forget);
    }
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

/// If `peek` panics, nothing has changed, and the lock is released.
#[test]
fn a_panicking_peek_changes_nothing() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    queue.send(1, 1).unwrap();
    assert!(panics(|| queue.peek(|_, _| panic!("a panic of the caller"))));
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
    assert_eq!((batch.len(), queue.len()), (4, 0), "all are measured before the first is sent");
}

/// A message that inspects its queue when it is dropped.
struct InspectsQueue {
    queue: Weak<Queue<InspectsQueue>>,
    seen: Arc<AtomicUsize>,
}

impl Drop for InspectsQueue {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            // These calls would block for ever if the lock was held.
            let _ = (queue.len(), queue.is_closed(), queue.cancel_notify());
            queue.validate();
        }
        self.seen.fetch_add(1, SeqCst);
    }
}

#[test]
fn a_message_may_use_its_queue_when_it_is_dropped() {
    let seen = Arc::new(AtomicUsize::new(0));
    let queue: Arc<Queue<InspectsQueue>> = Arc::new(Queue::new(8).unwrap());
    let message = || InspectsQueue { queue: Arc::downgrade(&queue), seen: Arc::clone(&seen) };
    let fill = || {
        for n in 0..8 - queue.len() as u32 {
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
    queue.close();
    assert_eq!(queue.try_send(message(), 1).unwrap_err().reason, SendRefused::Closed);
    let mut out = Vec::new();
    let _ = queue.receive_batch(&mut out, 8, Wait::NO);
    drop(out);
    queue.validate();
    let before = seen.load(SeqCst);
    drop(queue);
    assert!(before > 40 && seen.load(SeqCst) >= before);
}

/// A message whose drop panics as often as configured.
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
    queue.drain();

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

/// The drop of the last receiver drops every message, also if the drops of some panic, in an unwind or
/// outside.
#[test]
fn messages_whose_drop_panics_leave_none_behind() {
    struct Message(Arc<AtomicUsize>, bool);
    impl Drop for Message {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
            assert!(!self.1, "the drop of a message");
        }
    }
    for in_unwind in [false, true] {
        let drops = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = Queue::builder(8).channel().unwrap();
        for n in 0..6 {
            sender.send(Message(Arc::clone(&drops), n % 2 == 0), n).unwrap();
        }
        let panic = catch_unwind(AssertUnwindSafe(move || {
            let _receiver = receiver;
            assert!(!in_unwind, "the receiver's thread");
        }));
        let panic = panic.unwrap_err();
        let is_own = panic.downcast_ref() == Some(&"the receiver's thread");
        assert_eq!((drops.load(SeqCst), sender.len(), is_own), (6, 0, in_unwind));
        sender.validate();
    }
}

/// A future that ends in an unwind wakes the next one. The panic of that one's waker does not end the
/// process.
#[test]
fn a_panicking_waker_behind_a_future_dropped_by_an_unwind_ends_no_process() {
    fn drop_in_unwind<F: Future>(mut first: Pin<Box<F>>, mut second: Pin<Box<F>>, wake: impl Fn()) {
        assert!(poll(&mut first, Waker::noop().clone()).is_pending());
        assert!(poll(&mut second, Waker::from(Arc::new(Bomb))).is_pending());
        wake(); // the first gets the permit
        let panic = catch_unwind(AssertUnwindSafe(move || {
            let _first = first;
            panic_any("the task's own");
        }));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"the task's own"));
        assert!(poll(&mut second, Waker::noop().clone()).is_ready());
    }
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let receive = || Box::pin(queue.receive_async());
    drop_in_unwind(receive(), receive(), || queue.send(1, 1).unwrap());
    queue.send(1, 1).unwrap();
    let send = || Box::pin(queue.send_async(2, 1));
    drop_in_unwind(send(), send(), || assert!(queue.receive().is_ok()));
    queue.validate();
}
