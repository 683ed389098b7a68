//! Waits, of threads and of tasks: both are one future, which a thread polls by itself.

use std::task::Poll;

use mq_rbtree::{Bitmap, ReceiveError};
use testkit::TestTask;

use super::payload::By::{Deadline, Task, Thread};
use super::payload::Operation::{Receive, Send};
use super::payload::{Payload, finish, received, run, spawn, thoroughly, with};

#[test]
fn inv08_a_message_wakes_a_waiter() {
    for by in [Thread, Task] {
        run(move || Receive.wait_and_end(&with(1, 0), by));
    }
}

#[test]
fn inv11_room_wakes_a_waiter() {
    for by in [Thread, Task] {
        run(move || Send(1).wait_and_end(&with(1, 1), by));
    }
}

#[test]
fn inv09_a_message_or_room_beats_the_deadline() {
    run(|| Receive.wait_and_end(&with(1, 0), Deadline));
    thoroughly(|| Send(1).wait_and_end(&with(1, 1), Deadline));
}

/// Two wait, and two messages come: each waiter gets one.
#[test]
fn inv08_two_receivers_get_a_message_each() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let receivers = [Thread, Task].map(|by| Receive.spawn(&queue, by));
        (1..3).for_each(|id| queue.try_send(Payload::new(id), 0).unwrap());
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
        let receiver = Receive.spawn(&queue, Thread);
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

/// A thread times out while a message comes: the message goes to the task that waits as well.
#[test]
fn inv09_message_goes_to_the_remaining_waiter() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let gives_up = Receive.spawn(&queue, Deadline);
        let mut waits = TestTask::waiting(Receive.perform(&queue));
        queue.send(Payload::new(1), 0).unwrap();
        if gives_up.join().unwrap() == 0 {
            assert_eq!(waits.wakes(), 1, "it was woken for the message");
            assert_eq!(waits.poll(), Poll::Ready(1));
        }
        drop(waits);
        assert_eq!(finish(&queue), 0);
    });
}
