//! Messages in guards: put back or accepted, beside receivers, full senders and a close.

use mq_rbtree::{Bitmap, RbTree, ReceiveError};

use super::payload::By::{Deadline, Task, Thread};
use super::payload::Operation::{Receive, ReceiveGuard, Send};
use super::payload::{Payload, finish, received, run, spawn, thoroughly, with};

/// A thread waits, or comes, while the only message is in a guard.
#[test]
fn inv25_a_message_put_back_wakes_a_thread() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 1);
        let guard = queue.try_receive_guard().unwrap();
        let receiver = Receive.spawn(&queue, Thread);
        drop(guard);
        assert_eq!((receiver.join().unwrap(), finish(&queue)), (1, 0));
    });
}

/// A sender waits for the place of the message in the guard, and never gets it if that is put back.
#[test]
fn inv25_an_accepted_message_makes_room() {
    run(|| {
        let queue = with::<RbTree<u32>>(1, 1);
        let guard = queue.try_receive_guard().unwrap();
        let sender = spawn(&queue, |queue| queue.send(Payload::new(2), 7).unwrap());
        drop(guard);
        let guard = queue.try_receive_guard().unwrap();
        assert_eq!(guard.id(), 0, "the sender has no room");
        assert_eq!(guard.accept().0.seen(), 0);
        sender.join().unwrap();
        assert_eq!(finish(&queue), 1);
    });
}

/// The receiver of a closed queue waits for the guard's message, or for the end.
#[test]
fn inv25_the_last_guard_ends_a_closed_queue() {
    for accepts in [false, true] {
        run(move || {
            let queue = with::<Bitmap>(1, 1);
            let guard = queue.try_receive_guard().unwrap();
            let receiver = Receive.spawn(&queue, Thread);
            assert!(queue.close());
            if accepts {
                guard.accept().0.seen();
            } else {
                drop(guard);
            }
            assert_eq!((receiver.join().unwrap(), finish(&queue)), (u64::from(!accepts), 0));
        });
    }
}

/// A guard ends beside a close and a sender that finds the queue full.
#[test]
fn inv25_a_drop_races_a_close_and_a_full_sender() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let guard = queue.try_receive_guard().unwrap();
        let sender = Send(1).spawn(&queue, Thread);
        let closer = spawn(&queue, |queue| queue.close());
        drop(guard);
        assert_eq!(received(queue.receive(), ReceiveError::Closed), 1);
        assert!(closer.join().unwrap());
        assert_eq!(sender.join().unwrap(), finish(&queue));
    });
}

/// Only the wait with a deadline may end without one.
#[test]
fn inv25_a_guard_is_waited_for() {
    for by in [Thread, Task, Deadline] {
        run(move || ReceiveGuard.wait_and_end(&with(1, 0), by));
    }
}
