//! Sends through the staging ring, which take no lock, beside operations that hold it.
//!
//! In a model the ring has four slots. The queues have been used before, so that no send needs
//! memory.

use std::time::Instant;

use mq_rbtree::{Bitmap, Queue, ReceiveError, SendRefused};
use offlock_sync::thread;

use super::payload::By::{Deadline, Task, Thread};
use super::payload::Operation::{Receive, ReceiveGuard};
#[cfg(offlock_shuttle)]
use super::payload::block_on;
use super::payload::{Payload, Shared, finish, received, run, sent, soon, spawn, thoroughly, with};

/// Creates an empty queue that has the memory for `max` messages.
fn warm(max: usize) -> Shared<Bitmap> {
    let queue = with::<Bitmap>(max, max as u64);
    for _ in 0..max {
        queue.try_receive().unwrap().0.seen();
    }
    queue
}

/// Runs a send of one message in another thread.
fn send(queue: &Shared<Bitmap>, id: u64, priority: u32) -> thread::JoinHandle<()> {
    spawn(queue, move |queue| queue.try_send(Payload::new(id), priority).unwrap())
}

/// Returns the message's number, or `None` if the queue is empty.
fn next(queue: &Queue<Payload>) -> Option<u64> {
    queue.try_receive().ok().map(|(message, _)| message.seen())
}

/// The message that a receive takes is written completely.
#[test]
fn inv21_a_message_is_published_with_its_send() {
    thoroughly(|| {
        let queue = warm(2);
        let sender = send(&queue, 7, 0);
        let got = next(&queue);
        assert!(got.is_none_or(|id| id == 7));
        sender.join().unwrap();
        assert_eq!(u64::from(got.is_some()) + finish(&queue), 1);
    });
}

/// A send has returned, and a sender before it has only claimed its slot: the receive waits for it.
#[test]
fn inv21_a_send_behind_a_hole_is_drained() {
    thoroughly(|| {
        let queue = warm(2);
        let sender = send(&queue, 1, 0);
        queue.try_send(Payload::new(2), 0).unwrap();
        assert!(next(&queue).is_some(), "a message was sent before");
        sender.join().unwrap();
        assert_eq!(finish(&queue), 1);
    });
}

/// A receiver that finds a hole gets the message of the hole before the one behind it.
#[test]
fn inv21_the_message_of_a_hole_is_received_before_those_behind_it() {
    thoroughly(|| {
        let queue = warm(2);
        let publish = queue.claim(Payload::new(1), 0).unwrap();
        let receiver = spawn(&queue, |queue| {
            queue.try_send(Payload::new(2), 0).unwrap();
            [next(&queue), next(&queue)]
        });
        publish();
        assert_eq!((receiver.join().unwrap(), finish(&queue)), ([Some(1), Some(2)], 0));
    });
}

/// The sender at a hole publishes its message after the deadline. Behind the hole is the highest message,
/// so the one before it is not the next.
#[test]
fn inv22_a_receive_at_a_hole_ends_at_its_deadline() {
    thoroughly(|| {
        let queue = warm(3);
        queue.try_send(Payload::new(1), 0).unwrap();
        let publish = queue.claim(Payload::new(2), 0).unwrap();
        queue.try_send(Payload::new(3), 1).unwrap();
        assert_eq!(received(queue.receive_deadline(Instant::now()), ReceiveError::Timeout), 0);
        publish();
        assert_eq!(queue.stats().timeouts, 1);
        assert_eq!([(); 3].map(|()| next(&queue)), [3, 1, 2].map(Some));
        assert_eq!(finish(&queue), 0);
    });
}

/// Messages of two priorities are staged; a receive that begins then takes the higher one.
#[test]
fn inv21_the_highest_staged_message_is_next() {
    thoroughly(|| {
        let queue = warm(3);
        let low = send(&queue, 1, 0);
        queue.try_send(Payload::new(2), 1).unwrap();
        assert_eq!(next(&queue), Some(2));
        low.join().unwrap();
        assert_eq!(next(&queue), Some(1));
        assert_eq!(finish(&queue), 0);
    });
}

/// Messages of one priority are received in their order, and a higher one behind them is received first.
#[test]
fn inv21_messages_of_one_priority_are_received_in_order() {
    thoroughly(|| {
        let queue = warm(4);
        (1..=2).for_each(|id| queue.try_send(Payload::new(id), 0).unwrap());
        let high = send(&queue, 4, 1);
        let first = next(&queue).unwrap();
        high.join().unwrap();
        let rest = [next(&queue).unwrap(), next(&queue).unwrap()];
        match first {
            4 => assert_eq!(rest, [1, 2]),
            _ => assert_eq!((first, rest), (1, [4, 2])),
        }
        assert_eq!(finish(&queue), 0);
    });
}

/// Two receivers take the messages of one priority from the ring beside a sender: each message once.
#[test]
fn inv21_two_receivers_share_the_messages_of_the_ring() {
    thoroughly(|| {
        let queue = warm(4);
        queue.try_send(Payload::new(1), 0).unwrap();
        let sender = send(&queue, 2, 0);
        let receiver = spawn(&queue, |queue| u64::from(next(&queue).is_some()));
        let here = u64::from(next(&queue).is_some());
        sender.join().unwrap();
        let there = receiver.join().unwrap();
        assert!(here + there > 0, "a message was sent before");
        assert_eq!(here + there + finish(&queue), 2);
    });
}

/// Messages that a drain has stored were sent before those of the ring.
#[test]
fn inv21_stored_messages_are_received_before_staged_ones() {
    thoroughly(|| {
        let queue = warm(2);
        queue.try_send(Payload::new(1), 0).unwrap();
        assert_eq!(queue.len(), 1);
        let sender = send(&queue, 2, 0);
        assert_eq!(next(&queue), Some(1));
        sender.join().unwrap();
        assert_eq!(next(&queue), Some(2));
    });
}

/// A message that comes through the ring while a receiver begins to wait wakes it.
#[test]
fn inv22_a_waiting_receiver_gets_a_staged_message() {
    let plain = [Thread, Task, Deadline].map(|by| (Receive, by)); // at its deadline it loses no message
    let guards = [Thread, Task].map(|by| (ReceiveGuard, by));
    for (operation, by) in plain.into_iter().chain(guards) {
        run(move || operation.wait_and_end(&warm(2), by));
    }
}

/// A thread and a task wait, and two threads send a message each. This is too much for loom.
#[cfg(offlock_shuttle)]
#[test]
fn inv22_two_receivers_get_a_staged_message_each() {
    run(|| {
        let queue = warm(2);
        let receiver = spawn(&queue, |queue| queue.receive().unwrap().0.seen());
        let sender = send(&queue, 1, 0);
        queue.try_send(Payload::new(2), 0).unwrap();
        let got = block_on(queue.receive_async()).unwrap().0.seen();
        assert_eq!((receiver.join().unwrap() + got, finish(&queue)), (3, 0));
        sender.join().unwrap();
    });
}

/// A sender is stopped between its claim and its publication, and two receives give up. Later sends take
/// no lock.
#[test]
fn inv22_receives_that_give_up_open_the_ring() {
    thoroughly(|| {
        let queue = warm(2);
        let first = queue.claim(Payload::new(1), 0).unwrap();
        let receiver = Receive.spawn(&queue, Deadline);
        assert_eq!(received(queue.receive_deadline(soon()), ReceiveError::Timeout), 0);
        assert_eq!(receiver.join().unwrap(), 0);
        let second = queue.claim(Payload::new(2), 0).expect("the ring is open");
        second();
        first();
        assert_eq!(finish(&queue), 2);
    });
}

/// Each of two sends is before the close and succeeds, or after it and is refused.
#[test]
fn inv22_close_races_two_claims() {
    thoroughly(|| {
        let queue = warm(2);
        let sender = spawn(&queue, |queue| {
            [1, 2].map(|id| sent(queue.try_send(Payload::new(id), 0), SendRefused::Closed))
        });
        assert!(queue.close());
        let mut got = 0;
        // Whatever was sent before the close is received before the end.
        while let Ok((message, _)) = queue.receive() {
            message.seen();
            got += 1;
        }
        let [first, second] = sender.join().unwrap();
        assert!(first >= second);
        assert_eq!((got, finish(&queue)), (first + second, 0));
    });
}

/// A sender finds the queue full only if it is: the message that another has just claimed a place
/// for is seen by the next receive.
#[test]
fn inv24_full_is_ordered_with_claims() {
    thoroughly(|| {
        let queue = warm(1);
        let sender =
            spawn(&queue, |queue| sent(queue.try_send(Payload::new(1), 0), SendRefused::Full));
        let went = sent(queue.try_send(Payload::new(2), 0), SendRefused::Full);
        assert!(next(&queue).is_some(), "it was full");
        let more = sender.join().unwrap();
        assert_eq!(finish(&queue), went + more - 1);
    });
}

/// The capacity is exact, whether messages go through the ring or under the lock.
#[test]
fn inv24_locked_and_staged_sends_share_the_room() {
    run(|| {
        let queue = warm(2);
        let sender = spawn(&queue, |queue| {
            [1, 2]
                .map(|id| sent(queue.try_send(Payload::new(id), 0), SendRefused::Full))
                .iter()
                .sum::<u64>()
        });
        let mut batch = [(Payload::new(3), 0)].into();
        let went = match queue.try_send_batch(&mut batch) {
            Ok(count) => count as u64,
            Err(error) => {
                assert_eq!(error.reason, SendRefused::Full);
                batch.pop_front().unwrap().0.seen();
                0
            }
        };
        queue.validate();
        assert_eq!(sender.join().unwrap() + went, 2);
        assert_eq!(finish(&queue), 2);
    });
}

/// The ring is full, and a receive makes room for one more.
#[test]
fn inv24_a_slot_is_reused_after_its_message_was_read() {
    thoroughly(|| {
        let queue = warm(4);
        (0..4).for_each(|id| queue.try_send(Payload::new(id), 0).unwrap());
        let receiver = spawn(&queue, |queue| next(&queue).unwrap());
        let went = sent(queue.try_send(Payload::new(5), 0), SendRefused::Full);
        assert_eq!(receiver.join().unwrap(), 0);
        assert_eq!(finish(&queue), 3 + went);
    });
}
