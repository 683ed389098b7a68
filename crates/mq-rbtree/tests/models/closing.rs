//! The end of a queue: it is closed, or its last sender or receiver is dropped.

use std::task::Poll;

use mq_rbtree::{Bitmap, Queue, ReceiveError, SendRefused};
use offlock_sync::thread;

use super::payload::{
    Payload, WakeCounter, finish, receive, received, run, run_with_unseen, send, sent, spawn,
    unseen, with,
};

/// Each mutant with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("drop: the last handle", "closing::last_sender_closes"),
    ("last receiver: close before the drain", "closing::last_receiver_drains"),
];

/// A send and a receive race a close: the message is received, returned, or still in the queue.
#[test]
fn close_races_a_send_and_a_receive() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let sender = send(&queue, 1, false);
        let receiver = receive(&queue, false);
        assert!(queue.close());
        queue.validate();
        let (went, got) = (sender.join().unwrap(), receiver.join().unwrap());
        assert_eq!(went, got + finish(&queue));
        assert!(!queue.close());
        assert_eq!(received(queue.receive(), ReceiveError::Closed), 0);
    });
}

/// A close wakes a thread and a task that wait to receive, or to send, which leaves the queue's message.
#[test]
fn close_wakes_threads_and_tasks() {
    for len in [0, 1] {
        run(move || {
            let queue = with::<Bitmap>(1, len);
            let waits = [false, true].map(|by_task| match len {
                0 => receive(&queue, by_task),
                _ => send(&queue, 1, by_task),
            });
            assert!(queue.close());
            assert_eq!(waits.map(|wait| wait.join().unwrap()), [0, 0]);
            assert_eq!(finish(&queue), len);
        });
    }
}

/// Two tasks wait, and a message may come: the close wakes all.
#[test]
fn close_wakes_every_waiter() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let counters = [(); 2].map(|()| WakeCounter::new());
        let mut tasks = [(); 2].map(|()| Box::pin(queue.receive_async()));
        for (counter, task) in counters.iter().zip(&mut tasks) {
            assert!(counter.poll(task.as_mut()).is_pending());
        }
        let sender =
            spawn(&queue, |queue| sent(queue.try_send(Payload::new(1), 0), SendRefused::Closed));
        assert!(queue.close());
        let went = sender.join().unwrap();
        assert!(counters.iter().all(|counter| counter.wakes() == 1));
        let mut got = 0;
        for (counter, task) in counters.iter().zip(&mut tasks) {
            match counter.poll(task.as_mut()) {
                Poll::Ready(result) => got += received(result, ReceiveError::Closed),
                Poll::Pending => panic!("it waits on a closed queue"),
            }
        }
        drop(tasks);
        assert_eq!((got, finish(&queue)), (went, 0));
    });
}

/// Two senders are dropped; the drop of the last one, whichever it is, closes the queue.
#[test]
fn last_sender_closes() {
    run(|| {
        let (sender, receiver) = Queue::<Payload>::builder(1).channel().unwrap();
        sender.try_send(Payload::new(1), 0).unwrap();
        let other = thread::spawn({
            let sender = sender.clone();
            move || assert!(!sender.is_closed(), "one is left") // and drops it
        });
        drop(sender);
        assert_eq!(received(receiver.receive(), ReceiveError::Closed), 1);
        assert_eq!(received(receiver.receive(), ReceiveError::Closed), 0);
        other.join().unwrap();
    });
}

/// A message that is sent while both receivers are dropped is returned, or dropped with the queue's
/// messages. A waiting sender gets its message back.
#[test]
fn last_receiver_drains() {
    run_with_unseen(2, || {
        let (sender, receiver) = Queue::<Payload>::builder(1).channel().unwrap();
        let other = thread::spawn({
            let receiver = receiver.clone();
            move || drop(receiver)
        });
        let sends = thread::spawn(move || {
            let went = sent(sender.send(Payload::new(1), 0), SendRefused::Closed);
            (sender, went)
        });
        drop(receiver);
        other.join().unwrap();
        let (sender, went) = sends.join().unwrap();
        assert_eq!((sender.is_closed(), sender.is_empty()), (true, true));
        assert_eq!(unseen() as u64, went);
    });
}
