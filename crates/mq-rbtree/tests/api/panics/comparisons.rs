//! Keys whose comparison panics.

use std::cell::Cell;
use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::thread;

use mq_rbtree::Queue;
use testkit::wait_until;

use super::{Calls, Payload};
use crate::panicking::poll;

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

/// A sender that is woken to compare by itself finds the room taken, by the waker that ran before, and
/// waits again.
#[test]
fn a_sender_that_tries_again_may_wait_again() {
    let queue = Arc::new(Queue::builder_with_keys(3).spin(false).build().unwrap());
    (0..3).for_each(|n| queue.send(n, PanickingKey(0)).unwrap());
    let inner = Arc::clone(&queue);
    let refill = move || (7..9).for_each(|n| inner.try_send(n, PanickingKey(0)).unwrap());
    let mut task = Box::pin(queue.send_async(9, PanickingKey(0)));
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
    let mut task = Box::pin(queue.receive_async());
    assert!(poll(&mut task, Arc::new(Calls(take)).into()).is_pending());
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().waiting == (0, 2));
        ARMED.set(2); // the first is of the second message
        let mut batch = [(1, PanickingKey(1)), (2, PanickingKey(1))].into();
        let sent = catch_unwind(AssertUnwindSafe(|| queue.try_send_batch(&mut batch)));
        wait_until(|| queue.stats().receive_waits == 3 && queue.stats().waiting == (0, 1));
        drop(task);
        queue.send(3, PanickingKey(1)).unwrap();
        assert_eq!(blocked.join().unwrap(), Ok((3, PanickingKey(1))));
        assert!(sent.is_err(), "the drop of the payload panics");
    });
    queue.validate();
}
