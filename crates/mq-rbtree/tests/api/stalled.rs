//! Senders that are stopped between their claim of a slot and its publication, and the exact capacity
//! of a queue whose sends take no lock.
#![cfg(not(offlock_model))]

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Interest, Queue, Readiness, ReceiveError, SendRefused};

use testkit::TestTask;
use testkit::pin::{allowed_cpus, pin_to};

use crate::asleep::asleep;
use crate::panicking::{OnWake, poll};
use crate::queue_ops::is_readable;

/// Creates an empty queue that has the memory for `max` messages.
fn warm(max: usize) -> Queue<u64> {
    let queue = Queue::new(max).unwrap();
    (0..max as u64).for_each(|n| queue.try_send(n, 0).unwrap());
    queue.drain();
    queue
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(5)
}

#[test]
fn inv22_a_stopped_sender_delays_receives_until_their_deadline() {
    let queue = warm(8);
    let publish = queue.claim(1, 5).unwrap();
    // The send has not returned, so the queue may be called empty.
    assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
    assert_eq!(queue.len(), 0);
    let begin = Instant::now();
    assert_eq!(queue.receive_deadline(soon()), Err(ReceiveError::Timeout));
    assert!(begin.elapsed() >= Duration::from_millis(5));
    publish();
    assert_eq!(queue.receive(), Ok((1, 5)));
    queue.validate();
    assert_eq!(queue.stats().timeouts, 1);
    queue.claim(2, 0).expect("the ring is open again")();
    assert_eq!(queue.receive(), Ok((2, 0)));
}

#[test]
fn inv21_a_send_behind_a_stopped_one_is_not_overlooked() {
    let queue = warm(8);
    let publish = queue.claim(1, 5).unwrap();
    queue.try_send(2, 9).unwrap();
    assert_eq!(queue.receive_deadline(soon()), Err(ReceiveError::Timeout), "not `Empty`");
    thread::scope(|scope| {
        let receiver = scope.spawn(|| queue.receive());
        thread::sleep(Duration::from_millis(5));
        publish();
        assert_eq!(receiver.join().unwrap(), Ok((2, 9)));
    });
    assert_eq!(queue.receive(), Ok((1, 5)));
    assert_eq!(queue.stats().timeouts, 1);
    queue.validate();
}

#[test]
fn inv22_tasks_poll_again_beside_a_stopped_sender() {
    let queue = warm(2);
    let publish = queue.claim(1, 5).unwrap();
    queue.try_send(2, 9).unwrap();
    let mut receive = TestTask::waiting(queue.receive_async());
    let mut send = TestTask::waiting(queue.send_async(3, 3));
    assert_eq!((receive.wakes(), send.wakes()), (1, 1));
    drop(Box::pin(queue.receive_async())); // a future that is dropped does not wait
    publish();
    assert_eq!(receive.poll(), Poll::Ready(Ok((2, 9))));
    assert_eq!(send.poll(), Poll::Ready(Ok(())));
    assert_eq!(queue.drain(), [(1, 5), (3, 3)]);
    queue.validate();
}

/// A task's batch has a message, and then comes to the slot of a sender that stopped meanwhile. It does
/// not block its executor.
#[test]
fn inv22_a_batch_of_a_task_does_not_wait_for_a_stopped_sender() {
    let queue: &Queue<u64> = Box::leak(Box::new(warm(8)));
    (0..8).for_each(|n| queue.try_send(n, 1).unwrap());
    let (stopped, at) = mpsc::channel();
    let run = move || {
        queue.drain();
        stopped.send(queue.claim(100, 1).unwrap()).unwrap();
        queue.try_send(101, 9).unwrap();
    };
    let mut blocked = Box::pin(queue.send_async(99, 1));
    assert!(poll(&mut blocked, Arc::new(OnWake(Box::new(run))).into()).is_pending());
    let (mut polled, mut out) = (Poll::Pending, Vec::new());
    let receive = || polled = TestTask::new(queue.receive_batch_async(&mut out, 8)).poll();
    assert!(ends_before(receive, || at.recv().unwrap()()), "the poll waits for the sender");
    assert_eq!((polled, out), (Poll::Ready(Ok(1)), vec![(0, 1)]));
    assert_eq!(queue.stats().timeouts, 0);
    assert_eq!(queue.drain(), [(101, 9), (100, 1)]);
    queue.validate();
}

/// The receive waits for the sends that had returned when it began, and for no later ones.
#[test]
fn inv22_a_receive_does_not_wait_for_later_holes() {
    // The thread may sleep for another reason before the receive has begun, which then waits for both.
    assert!((0..10).any(|_| receives_before_a_later_hole()), "it waits each time");
}

/// Returns whether the receive ended before its deadline.
fn receives_before_a_later_hole() -> bool {
    let queue = warm(8);
    let first = queue.claim(1, 5).unwrap();
    queue.try_send(2, 9).unwrap();
    let received = thread::scope(|scope| {
        let receive = || queue.receive_deadline(Instant::now() + Duration::from_secs(5));
        let receiver = asleep(scope, receive, || true);
        let second = queue.claim(3, 5).unwrap();
        queue.try_send(4, 4).unwrap();
        first();
        let received = receiver.join().unwrap();
        second();
        received
    });
    if received == Err(ReceiveError::Timeout) {
        return false;
    }
    assert_eq!(received, Ok((2, 9)));
    assert_eq!(queue.drain(), [(1, 5), (3, 5), (4, 4)]);
    queue.validate();
    true
}

/// A receive that gives up, of a thread or of a task, and a descriptor do not make later sends take the
/// lock: they need not wait for the stopped sender.
#[test]
fn inv22_a_receive_that_gives_up_lets_senders_go_on() {
    let queue = warm(8);
    let publish = queue.claim(1, 5).unwrap();
    assert_eq!(queue.receive_deadline(soon()), Err(ReceiveError::Timeout));
    let second = queue.claim(2, 5).expect("the ring is open");
    TestTask::waiting(queue.receive_async());
    queue.claim(3, 9).expect("the ring is open")();
    drop(Readiness::new(&queue, Interest::Readable).unwrap());
    queue.claim(4, 9).expect("the ring is open")();
    second();
    publish();
    assert_eq!(queue.drain(), [(3, 9), (4, 9), (1, 5), (2, 5)]);
    queue.validate();
}

/// Threads that compute on the CPU of the receiver do not delay it by their time slices.
#[test]
fn inv22_a_deadline_ends_beside_busy_threads() {
    let queue = warm(8);
    let publish = queue.claim(1, 5).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        pin_to(&[allowed_cpus()[0]]); // the threads below as well
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    spin_loop();
                }
            });
        }
        // The scheduler takes the CPU away during some of them, but not during each one.
        let soon = (0..20).any(|_| {
            let begin = Instant::now();
            assert_eq!(queue.receive_deadline(begin), Err(ReceiveError::Timeout));
            begin.elapsed() < Duration::from_millis(50)
        });
        stop.store(true, Relaxed);
        assert!(soon, "each receive lasts for the time slices of the others");
    });
    publish();
}

/// Runs `call` in another thread, and `publish` once it has ended, or after a minute. Returns whether it had
/// ended before.
fn ends_before(call: impl FnOnce() + Send, publish: impl FnOnce()) -> bool {
    thread::scope(|scope| {
        let call = scope.spawn(call);
        let start = Instant::now();
        while !call.is_finished() && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
        }
        let in_time = call.is_finished();
        publish();
        in_time
    })
}

/// A descriptor that is made or cleared beside a stopped sender becomes readable at once: the event loop
/// comes again, and is not blocked.
#[test]
fn inv22_an_event_loop_does_not_wait_for_a_stopped_sender() {
    for interest in [Interest::Readable, Interest::Writable] {
        let queue = warm(8);
        let publish = queue.claim(1, 5).unwrap();
        queue.try_send(2, 9).unwrap(); // reports the hole
        let slot = Mutex::new(None);
        let make = || *slot.lock().unwrap() = Some(Readiness::new(&queue, interest).unwrap());
        assert!(ends_before(make, publish), "{interest:?}: a new one");
        let ready = slot.into_inner().unwrap().unwrap();
        assert!(is_readable(&ready));
        ready.clear();
        assert!(is_readable(&ready), "two messages, and room for six");
        assert_eq!(queue.drain(), [(2, 9), (1, 5)]);

        // It is not armed: it has just become readable.
        let publish = queue.claim(3, 5);
        let publish = publish.or_else(|| {
            queue.try_send(0, 0).unwrap();
            queue.drain();
            queue.claim(3, 5)
        });
        let publish = publish.unwrap();
        queue.try_send(4, 9).unwrap();
        assert!(ends_before(|| ready.clear(), publish), "{interest:?}: a cleared one");
        assert!(is_readable(&ready));
        ready.clear();
        assert!(is_readable(&ready));
        assert_eq!(queue.drain(), [(4, 9), (3, 5)]);
        if interest == Interest::Readable {
            ready.clear();
            assert!(!is_readable(&ready), "armed, and silent");
        }
        queue.try_send(5, 5).unwrap();
        assert!(is_readable(&ready));
        queue.validate();
    }
}

#[test]
fn inv22_close_does_not_wait_for_a_stopped_sender() {
    let queue = warm(8);
    let publish = queue.claim(1, 5).unwrap();
    assert!(queue.close());
    assert_eq!(queue.try_send(2, 1).unwrap_err().reason, SendRefused::Closed);
    assert_eq!(queue.receive_deadline(soon()), Err(ReceiveError::Timeout), "its send will succeed");
    publish();
    assert_eq!(queue.receive(), Ok((1, 5)));
    assert_eq!(queue.receive(), Err(ReceiveError::Closed));
    queue.validate();
}

#[test]
fn inv24_a_claimed_place_is_taken() {
    let queue = warm(2);
    queue.try_send(1, 1).unwrap();
    let publish = queue.claim(2, 2).unwrap();
    assert!(queue.claim(3, 3).is_none());
    let refused = queue.send_deadline(4, 4, soon()).unwrap_err();
    assert_eq!((refused.value, refused.reason), (4, SendRefused::Timeout));
    publish();
    assert_eq!(queue.try_send(5, 5).unwrap_err().reason, SendRefused::Full);
    assert!(queue.drain().into_iter().eq([(2, 2), (1, 1)]));
    queue.validate();
}
