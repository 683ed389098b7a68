//! Threads that wait for each other, with and without a deadline.

use mq_rbtree::{Bitmap, ReceiveError, SendRefused};
use offlock_sync::{Arc, thread};

use super::payload::{
    Payload, WakeCounter, check_waiters, finish, received, run, sent, soon, thoroughly, with,
};

/// Each mutant with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("end: after the last use of the node", "threads::inv08_a_message_is_handed_over_once"),
    ("poll end: before the message is read", "threads::inv08_a_message_is_handed_over_once"),
    ("park: the parker is set", "threads::inv08_a_message_is_handed_over_once"),
    ("end: before the parker is used", "threads::inv08_a_message_is_handed_over_once"),
    ("end: after the last use of the node", "threads::inv08_a_message_is_taken_over_once"),
    ("end: store the result for the parked thread", "threads::inv08_a_message_is_handed_over_once"),
    ("park: check again before the sleep", "threads::inv08_a_message_is_handed_over_once"),
    ("send: no receiver waits", "threads::inv08_a_message_is_handed_over_once"),
    (
        "receive: register in the lock section of the check",
        "threads::inv07_receiver_waits_only_on_an_empty_queue",
    ),
    (
        "send: register in the lock section of the check",
        "threads::inv07_sender_waits_only_on_a_full_queue",
    ),
    ("receive: serve the waiting senders", "threads::inv07_sender_waits_only_on_a_full_queue"),
    ("receive: a message beats the deadline", "threads::inv09_a_message_beats_the_deadline"),
];

/// The mutants that only loom can detect.
pub(super) const LOOM_ONLY: &[&str] = &[
    "end: after the last use of the node",
    "poll end: before the message is read",
    "park: the parker is set",
    "end: before the parker is used",
];

/// A message is handed to a waiting receiver without the levels, or else it
/// enters the queue.
#[test]
fn inv08_a_message_is_handed_over_once() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 0);
        let receiver = thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.receive().map(|(message, priority)| (message.seen(), priority))
        });
        queue.send(Payload::new(5), 3).unwrap();
        assert_eq!(receiver.join().unwrap(), Ok((5, 3)));
        assert_eq!(finish(&queue), 0);
        let stats = queue.stats();
        let levels = stats.levels.from_cache + stats.levels.from_preload + stats.levels.fallback;
        let pushed = 1 - stats.handed_over;
        assert_eq!((levels, stats.sent), (pushed, 1));
    });
}

/// A receiver takes the message of a waiting sender in its turn.
#[test]
fn inv08_a_message_is_taken_over_once() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let sender = thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.send(Payload::new(1), 0).unwrap()
        });
        for id in 0..2 {
            assert_eq!(queue.receive().unwrap().0.seen(), id);
        }
        sender.join().unwrap();
        assert_eq!(finish(&queue), 0);
        let stats = queue.stats();
        assert_eq!((stats.sent, stats.peak), (2, 1));
        assert!(stats.taken_over + stats.handed_over <= 1);
    });
}

/// Two threads wait, and two messages come: each thread gets one.
#[test]
fn inv08_two_receivers_get_a_message_each() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let receivers = [(); 2].map(|()| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.receive().unwrap().0.seen())
        });
        for id in 1..3 {
            queue.try_send(Payload::new(id), 0).unwrap();
        }
        let got: u64 = receivers.map(|receiver| receiver.join().unwrap()).iter().sum();
        assert_eq!((got, finish(&queue)), (3, 0));
    });
}

/// Another thread checks the waiters at any moment.
#[test]
fn inv07_receiver_waits_only_on_an_empty_queue() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let receiver = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(queue.receive(), ReceiveError::Closed)
        });
        check_waiters(&queue);
        queue.send(Payload::new(1), 0).unwrap();
        check_waiters(&queue);
        assert_eq!(receiver.join().unwrap(), 1);
        assert_eq!(finish(&queue), 0);
    });
}

#[test]
fn inv07_sender_waits_only_on_a_full_queue() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let sender = thread::spawn({
            let queue = Arc::clone(&queue);
            move || sent(queue.send(Payload::new(1), 0), SendRefused::Closed)
        });
        check_waiters(&queue);
        assert_eq!(queue.try_receive().unwrap().0.seen(), 0);
        check_waiters(&queue);
        assert_eq!(sender.join().unwrap(), 1);
        assert_eq!(finish(&queue), 1);
    });
}

/// With room for one message, the sender and the receiver wait for each other in turn.
#[test]
fn inv07_sender_and_receiver_never_both_wait() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let sender = thread::spawn({
            let queue = Arc::clone(&queue);
            move || (0..2).for_each(|id| queue.send(Payload::new(id), 0).unwrap())
        });
        for id in 0..2 {
            assert_eq!(queue.receive().unwrap().0.seen(), id);
            check_waiters(&queue);
        }
        sender.join().unwrap();
        assert_eq!(finish(&queue), 0);
    });
}

/// The receiver gets the message, or has timed out and the message is in the queue.
#[test]
fn inv09_a_message_beats_the_deadline() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let receiver = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(queue.receive_deadline(soon()), ReceiveError::Timeout)
        });
        queue.send(Payload::new(1), 0).unwrap();
        let got = receiver.join().unwrap();
        let stats = queue.stats();
        assert_eq!(stats.timeouts, 1 - got);
        assert!(stats.handed_over <= got);
        assert_eq!(finish(&queue), 1 - got);
    });
}

/// The sender gets its message back, or the message was sent.
#[test]
fn inv09_room_beats_the_deadline() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 1);
        let sender = thread::spawn({
            let queue = Arc::clone(&queue);
            move || sent(queue.send_deadline(Payload::new(1), 0, soon()), SendRefused::Timeout)
        });
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        let went = sender.join().unwrap();
        let stats = queue.stats();
        assert_eq!(stats.timeouts, 1 - went);
        assert!(stats.taken_over <= went);
        assert_eq!(finish(&queue), went);
    });
}

/// One receiver times out while a message comes: the message goes to the other.
#[test]
fn inv09_message_goes_to_the_remaining_waiter() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let gives_up = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(queue.receive_deadline(soon()), ReceiveError::Timeout)
        });
        let waits = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(queue.receive(), ReceiveError::Closed)
        });
        queue.send(Payload::new(1), 0).unwrap();
        if gives_up.join().unwrap() == 1 {
            queue.send(Payload::new(2), 0).unwrap();
        }
        assert_eq!(waits.join().unwrap(), 1);
        assert_eq!(finish(&queue), 0);
    });
}
