//! Waits, of threads and of tasks: both are one future, which a thread polls by itself.

use std::task::Poll;

use mq_rbtree::{Bitmap, ReceiveError, SendRefused};

use super::payload::{
    Payload, WakeCounter, finish, receive, received, run, send, sent, soon, spawn, thoroughly, with,
};

/// Each mutant with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("unlock: wake receivers for the messages", "threads::inv08_a_message_wakes_a_waiter"),
    ("unlock: wake senders for the places", "threads::inv11_room_wakes_a_waiter"),
];

#[test]
fn inv08_a_message_wakes_a_waiter() {
    for by_task in [false, true] {
        run(move || {
            let queue = with::<Bitmap>(1, 0);
            let receiver = receive(&queue, by_task);
            queue.send(Payload::new(5), 3).unwrap();
            assert_eq!((receiver.join().unwrap(), finish(&queue)), (1, 0));
        });
    }
}

#[test]
fn inv11_room_wakes_a_waiter() {
    for by_task in [false, true] {
        run(move || {
            let queue = with::<Bitmap>(1, 1);
            let sender = send(&queue, 1, by_task);
            assert_eq!(queue.receive().unwrap().0.seen(), 0);
            assert_eq!((sender.join().unwrap(), finish(&queue)), (1, 1));
            assert_eq!((queue.stats().sent, queue.stats().peak), (2, 1));
        });
    }
}

/// Two wait, and two messages come: each waiter gets one.
#[test]
fn inv08_two_receivers_get_a_message_each() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let receivers = [false, true].map(|by_task| receive(&queue, by_task));
        for id in 1..3 {
            queue.try_send(Payload::new(id), 0).unwrap();
        }
        assert_eq!(receivers.map(|receiver| receiver.join().unwrap()), [1, 1]);
        assert_eq!(finish(&queue), 0);
    });
}

/// Another one, which does not wait, may take the message or the room of a waiter that was woken. The waiter
/// gets the next.
#[test]
fn inv07_a_waiter_that_is_woken_in_vain_waits_again() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let receiver = receive(&queue, false);
        queue.send(Payload::new(1), 0).unwrap();
        if received(queue.try_receive(), ReceiveError::Empty) == 1 {
            queue.send(Payload::new(2), 0).unwrap();
        }
        assert_eq!((receiver.join().unwrap(), finish(&queue)), (1, 0));
    });
}

/// With room for one message, the sender and the receiver wait for each other in turn. This is too much for
/// loom, which runs the parts: [`inv08_a_message_wakes_a_waiter`] and [`inv11_room_wakes_a_waiter`].
#[cfg(offlock_shuttle)]
#[test]
fn inv07_sender_and_receiver_never_both_wait() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let sender =
            spawn(&queue, |queue| (0..2).for_each(|id| queue.send(Payload::new(id), 0).unwrap()));
        for id in 0..2 {
            assert_eq!(queue.receive().unwrap().0.seen(), id);
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
        let receiver =
            spawn(&queue, |queue| received(queue.receive_deadline(soon()), ReceiveError::Timeout));
        queue.send(Payload::new(1), 0).unwrap();
        let got = receiver.join().unwrap();
        assert_eq!((queue.stats().timeouts, finish(&queue)), (1 - got, 1 - got));
    });
}

/// The sender gets its message back, or the message was sent.
#[test]
fn inv09_room_beats_the_deadline() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 1);
        let sender = spawn(&queue, |queue| {
            sent(queue.send_deadline(Payload::new(1), 0, soon()), SendRefused::Timeout)
        });
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        let went = sender.join().unwrap();
        assert_eq!((queue.stats().timeouts, finish(&queue)), (1 - went, went));
    });
}

/// A thread times out while a message comes: the message goes to the task that waits as well.
#[test]
fn inv09_message_goes_to_the_remaining_waiter() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let gives_up =
            spawn(&queue, |queue| received(queue.receive_deadline(soon()), ReceiveError::Timeout));
        let counter = WakeCounter::new();
        let mut waits = Box::pin(queue.receive_async());
        assert!(counter.poll(waits.as_mut()).is_pending());
        queue.send(Payload::new(1), 0).unwrap();
        if gives_up.join().unwrap() == 0 {
            assert_eq!(counter.wakes(), 1, "it was woken for the message");
            let Poll::Ready(got) = counter.poll(waits.as_mut()) else { panic!("it waits") };
            assert_eq!(received(got, ReceiveError::Closed), 1);
        }
        drop(waits);
        assert_eq!(finish(&queue), 0);
    });
}
