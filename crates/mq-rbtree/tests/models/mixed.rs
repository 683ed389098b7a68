//! Senders and receivers of every kind at once, and a close. This is too much for loom, which runs
//! the parts of it: [`threads`](super::threads), [`tasks`](super::tasks) and
//! [`closing`](super::closing).
//!
//! The operations of each thread are fixed; the schedule decides which of them meet.

#[cfg(offlock_shuttle)]
mod random {
    use std::pin::pin;
    use std::task::Poll;

    use mq_rbtree::{Bitmap, RbTree, ReceiveError, SendError, SendRefused};
    use offlock_sync::{Arc, thread};

    use crate::models::payload::{
        Payload, Shared, TestLevels, WakeCounter, block_on, finish, run_with_unseen, soon, unseen,
        with,
    };

    const SENDERS: u64 = 3;
    const EACH: u64 = 6;
    const RECEIVERS: u64 = 3;

    /// The number of a message: its sender, and its serial among the sender's messages.
    fn id(sender: u64, nth: u64) -> u64 {
        sender * 100 + nth
    }

    fn priority(nth: u64) -> u32 {
        (nth % 2) as u32
    }

    /// Sends all messages. Returns how many were sent, how many were dropped with their future, and
    /// whether the queue was closed.
    fn send_all<L: TestLevels>(queue: &Shared<L>, sender: u64) -> (u64, u64, bool) {
        let (mut went, mut cancelled) = (0, 0);
        for nth in 0..EACH {
            let (message, priority) = (Payload::new(id(sender, nth)), priority(nth));
            let result = match (sender + nth) % 4 {
                0 => queue.send(message, priority),
                1 => queue.send_deadline(message, priority, soon()),
                2 => block_on(queue.send_async(message, priority)),
                _ => {
                    let mut task = pin!(queue.send_async(message, priority));
                    match WakeCounter::new().poll(task.as_mut()) {
                        Poll::Ready(result) => result,
                        Poll::Pending => {
                            thread::yield_now();
                            cancelled += 1; // dropped, with its message
                            continue;
                        }
                    }
                }
            };
            match result {
                Ok(()) => went += 1,
                Err(SendError { value, reason }) => {
                    assert_eq!(value.seen(), id(sender, nth));
                    match reason {
                        SendRefused::Timeout => {}
                        SendRefused::Closed => return (went, cancelled, true),
                        other => panic!("{other}"),
                    }
                }
            }
        }
        (went, cancelled, false)
    }

    /// Receives until the queue is closed and empty. Returns the number of messages. Checks that
    /// those of one sender and priority come in the order in which they were sent.
    fn receive_all<L: TestLevels>(queue: &Shared<L>, receiver: u64) -> u64 {
        let mut last = [[None; 2]; SENDERS as usize];
        let mut got = 0;
        for nth in receiver.. {
            let result = match nth % 4 {
                0 => queue.receive(),
                1 => queue.receive_deadline(soon()),
                2 => block_on(queue.receive_async()),
                _ => {
                    let mut task = pin!(queue.receive_async());
                    match WakeCounter::new().poll(task.as_mut()) {
                        Poll::Ready(result) => result,
                        Poll::Pending => {
                            thread::yield_now();
                            continue; // dropped
                        }
                    }
                }
            };
            match result {
                Ok((message, priority)) => {
                    let id = message.seen();
                    let last = &mut last[(id / 100) as usize][priority as usize];
                    assert!(*last < Some(id), "{id} behind {last:?}");
                    *last = Some(id);
                    got += 1;
                }
                Err(ReceiveError::Timeout) => {}
                Err(ReceiveError::Closed) => return got,
                Err(other) => panic!("{other}"),
            }
        }
        unreachable!()
    }

    /// Checks conservation: each message that was sent is received or in the queue; the others were
    /// returned, or dropped with their future.
    fn mixed<L: TestLevels>(closes_early: bool) {
        run_with_unseen((SENDERS * EACH) as usize, move || {
            let queue = with::<L>(2, 0);
            let senders: Vec<_> = (0..SENDERS)
                .map(|sender| {
                    let queue = Arc::clone(&queue);
                    thread::spawn(move || send_all(&queue, sender))
                })
                .collect();
            let receivers: Vec<_> = (0..RECEIVERS)
                .map(|receiver| {
                    let queue = Arc::clone(&queue);
                    thread::spawn(move || receive_all(&queue, receiver))
                })
                .collect();
            if closes_early {
                while queue.stats().sent < EACH {
                    thread::yield_now();
                }
                queue.close();
            }
            let (mut went, mut cancelled) = (0, 0);
            for sender in senders {
                let (sent, dropped, closed) = sender.join().unwrap();
                assert!(closes_early || !closed);
                went += sent;
                cancelled += dropped;
            }
            queue.validate();
            queue.close();
            let got: u64 = receivers.into_iter().map(|receiver| receiver.join().unwrap()).sum();
            assert_eq!((went, finish(&queue)), (got, 0));
            assert_eq!(unseen() as u64, cancelled);
        });
    }

    #[test]
    fn inv09_mixed_operations_conserve_messages() {
        mixed::<RbTree<u32>>(false);
    }

    #[test]
    fn inv09_mixed_operations_race_a_close() {
        mixed::<Bitmap>(true);
    }
}
