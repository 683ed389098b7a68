//! Waiting threads: their order, what wakes them, and the ends of waits.
#![cfg(not(offlock_model))]

use std::collections::VecDeque;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError, SendRefused};

use testkit::wait_until;

type Joined<'s, T> = ScopedJoinHandle<'s, T>;

/// Starts threads one by one: each waits before the next is started.
fn one_by_one<'s, 'e, T: Send + 's, F: FnOnce() -> T + Send + 's>(
    scope: &'s Scope<'s, 'e>,
    queue: &Queue<u32>,
    waits: impl Iterator<Item = F>,
) -> Vec<Joined<'s, T>> {
    let waiting = || {
        let (senders, receivers) = queue.stats().waiting;
        senders + receivers
    };
    let before = waiting();
    let mut threads = Vec::new();
    for wait in waits {
        threads.push(scope.spawn(wait));
        wait_until(|| waiting() == before + threads.len());
    }
    threads
}

#[test]
fn inv10_threads_are_served_in_the_order_of_arrival() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    thread::scope(|scope| {
        let receives = (0..4).map(|_| || queue.receive());
        for (n, thread) in (0..).zip(one_by_one(scope, &queue, receives)) {
            // The first waiter gets the message whatever its priority.
            queue.send(n, 100 - n).unwrap();
            assert_eq!(thread.join().unwrap(), Ok((n, 100 - n)));
        }
        queue.send(100, 0).unwrap();
        let queue = &queue;
        let sends = (0..4).map(|n| move || queue.send(n, n * 1_000)); // a later one is more urgent
        let threads = one_by_one(scope, queue, sends);
        assert_eq!(queue.receive(), Ok((100, 0)));
        for (n, thread) in (0..).zip(threads) {
            assert!(thread.join().unwrap().is_ok());
            assert_eq!(queue.receive(), Ok((n, n * 1_000)));
        }
    });
}

#[test]
fn inv13_a_past_deadline_only_ends_blocking_operations() {
    for past in [Instant::now() - Duration::from_secs(1), Instant::now()] {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        assert_eq!(queue.receive_deadline(past), Err(ReceiveError::Timeout));
        assert!(queue.send_deadline(1, 1, past).is_ok());
        let refused = queue.send_deadline(2, 2, past).unwrap_err();
        assert_eq!((refused.value, refused.reason), (2, SendRefused::Timeout));
        assert_eq!(queue.receive_deadline(past), Ok((1, 1)));
        // Other faults are reported first, as by the kernel.
        let refused = queue.send_deadline(2, 40_000, past).unwrap_err();
        assert_eq!(refused.reason, SendRefused::BadPriority { priority: 40_000 });
        queue.close();
        assert_eq!(queue.receive_deadline(past), Err(ReceiveError::Closed));
        assert_eq!(queue.send_deadline(2, 2, past).unwrap_err().reason, SendRefused::Closed);
        let stats = queue.stats();
        assert_eq!((stats.timeouts, stats.waiting), (2, (0, 0)));
        queue.validate();
    }
}

#[test]
fn inv13_a_wait_ends_at_its_deadline_and_not_before() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let time = Duration::from_millis(30);
    let began = Instant::now();
    assert_eq!(queue.receive_deadline(began + time), Err(ReceiveError::Timeout));
    queue.send(1, 1).unwrap();
    let refused = queue.send_deadline(2, 2, began + time * 2).unwrap_err();
    assert_eq!((refused.value, refused.reason), (2, SendRefused::Timeout));
    assert!(began.elapsed() >= time * 2);
    assert_eq!(queue.receive(), Ok((1, 1)));
    queue.validate();
    // A message that comes before the deadline is received.
    let far = Instant::now() + Duration::from_secs(100);
    thread::scope(|scope| {
        let threads = one_by_one(scope, &queue, [|| queue.receive_deadline(far)].into_iter());
        queue.send(3, 3).unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Ok((3, 3)));
        }
    });
}

/// A batch that waits for each of its messages, against a receiver that takes what is in the queue.
#[test]
fn batches_wait_for_room_and_messages() {
    let queue: Queue<u32> = Queue::new(5).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch: VecDeque<_> = (0..1000).map(|n| (n, 1)).collect();
            assert!(matches!(queue.send_batch(&mut batch), Ok(1000)));
            queue.close();
        });
        let mut out = Vec::new();
        assert_eq!(queue.receive_batch(&mut out, 0), Ok(0), "none is asked for");
        loop {
            let before = out.len();
            match queue.receive_batch(&mut out, 100) {
                Ok(count) => assert!(count >= 1 && out.len() == before + count && count <= 100),
                Err(error) => break assert_eq!(error, ReceiveError::Closed),
            }
        }
        assert!(out.into_iter().eq((0..1000).map(|n| (n, 1))), "in order");
    });
    queue.validate();
}
