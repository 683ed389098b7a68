//! The end of a queue: it is closed, or its last sender or receiver is dropped.

use std::task::Poll;

use mq_rbtree::{Bitmap, Queue, ReceiveError, SendRefused};
use offlock_sync::thread;
use testkit::TestTask;

use super::payload::By::{Task, Thread};
use super::payload::Operation::{Receive, Send};
use super::payload::{Payload, finish, received, run, run_with_unseen, sent, spawn, unseen, with};

/// A send and a receive race a close: the message is received, returned, or still in the queue.
#[test]
fn close_races_a_send_and_a_receive() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let sender = Send(1).spawn(&queue, Thread);
        let receiver = Receive.spawn(&queue, Thread);
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
    for (operation, len) in [(Receive, 0), (Send(1), 1)] {
        run(move || {
            let queue = with::<Bitmap>(1, len);
            let waits = [Thread, Task].map(|by| operation.spawn(&queue, by));
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
        let mut tasks = [(); 2].map(|()| TestTask::waiting(Receive.perform(&queue)));
        let sender =
            spawn(&queue, |queue| sent(queue.try_send(Payload::new(1), 0), SendRefused::Closed));
        assert!(queue.close());
        let went = sender.join().unwrap();
        assert!(tasks.iter().all(|task| task.wakes() == 1));
        let mut got = 0;
        for task in &mut tasks {
            let Poll::Ready(done) = task.poll() else { panic!("it waits on a closed queue") };
            got += done;
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
        let second = sender.clone();
        let other = thread::spawn(move || assert!(!second.is_closed(), "one is left")); // drops it
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
        let second = receiver.clone();
        let other = thread::spawn(move || drop(second));
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
