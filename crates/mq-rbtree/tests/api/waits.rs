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

/// A receive beside blocked senders wakes the first one, which sends its message by itself.
#[test]
fn inv11_a_receive_wakes_one_blocked_sender() {
    let queue: Queue<u32> = Queue::builder(3).spin(false).build().unwrap();
    (0..3).for_each(|n| queue.send(n, 5).unwrap());
    thread::scope(|scope| {
        let queue = &queue;
        let send = |n: u32| move || queue.send(n, n);
        let threads = one_by_one(scope, queue, [9, 1].map(send).into_iter());
        assert_eq!(queue.receive(), Ok((0, 5)));
        let mut threads = threads.into_iter();
        assert!(threads.next().unwrap().join().unwrap().is_ok());
        assert_eq!((queue.len(), queue.stats().waiting, queue.stats().peak), (3, (1, 0), 3));
        assert_eq!(queue.receive(), Ok((9, 9)));
        assert!(threads.next().unwrap().join().unwrap().is_ok());
    });
    for expected in [(1, 5), (2, 5), (1, 1)] {
        assert_eq!(queue.receive(), Ok(expected));
    }
}

/// Two receivers that wait take the messages of a batch, for which there is room.
#[test]
fn inv08_each_waiting_thread_takes_one_message() {
    let queue: Queue<u32> = Queue::builder(2).spin(false).build().unwrap();
    thread::scope(|scope| {
        let queue = &queue;
        let threads = one_by_one(scope, queue, [0, 0].map(|_| || queue.receive()).into_iter());
        let mut batch = VecDeque::from([(1, 1), (2, 2)]);
        assert!(matches!(queue.try_send_batch(&mut batch), Ok(2)));
        let mut got: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        got.sort_by_key(|received| received.map_or(0, |(n, _)| n));
        assert_eq!(got, [Ok((1, 1)), Ok((2, 2))]);
    });
    queue.validate();
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

#[test]
fn a_close_ends_every_wait() {
    for full in [false, true] {
        let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
        if full {
            queue.send(77, 7).unwrap();
        }
        thread::scope(|scope| {
            let waits = (0..9).map(|n| {
                let queue = &queue;
                move || {
                    if full {
                        let error = queue.send(n, 1).unwrap_err();
                        assert_eq!((error.value, error.reason), (n, SendRefused::Closed));
                    } else {
                        assert_eq!(queue.receive(), Err(ReceiveError::Closed));
                    }
                }
            });
            let threads = one_by_one(scope, &queue, waits);
            assert_eq!((queue.close(), queue.close()), (true, false));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        queue.validate();
        assert_eq!(queue.try_receive().is_ok(), full, "what was there can be received");
        assert_eq!(queue.try_receive(), Err(ReceiveError::Closed));
    }
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
