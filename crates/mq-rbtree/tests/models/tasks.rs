//! Waiting tasks, beside other tasks and beside threads: futures that are polled, woken and
//! dropped.

use std::mem;
use std::task::Poll;

use mq_rbtree::{Bitmap, Queue};
use testkit::{TestTask, WakeCount};

use super::payload::By::{self, Task, Thread};
use super::payload::Operation::{self, Receive, Send};
use super::payload::{Payload, finish, run, run_with_unseen, spawn, thoroughly, with, yield_often};

/// A task waits, and a thread or task behind it. The message, or room, comes while the first task is dropped:
/// the second one gets it.
#[test]
fn inv14_a_dropped_permit_passes_on() {
    for by in [Thread, Task] {
        run(move || passed_on([Receive; 2], by, 0));
    }
    run_with_unseen(1, || passed_on([Send(1), Send(2)], Thread, 1));
}

fn passed_on([first, second]: [Operation; 2], by: By, len: u64) {
    let queue = with::<Bitmap>(1, len);
    let task = TestTask::waiting(first.perform(&queue));
    let other = second.spawn(&queue, by);
    yield_often();
    first.serve(&queue);
    drop(task);
    assert_eq!((other.join().unwrap(), finish(&queue)), (1, len));
}

/// A task waits for the message. Another one is polled while that comes, and dropped.
#[test]
fn inv09_dropped_receive_conserves_messages() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let mut waits = TestTask::waiting(Receive.perform(&queue));
        let sender = Send(1).spawn(&queue, Thread);
        let early = TestTask::new(Receive.perform(&queue)).poll();
        sender.join().unwrap();
        if early.is_pending() {
            assert_eq!(waits.wakes(), 1, "it was woken for the message");
            assert_eq!(waits.poll(), Poll::Ready(1));
        }
        drop(waits);
        assert_eq!(finish(&queue), 0);
    });
}

#[test]
fn inv14_a_task_is_woken_for_each_free_place() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let mut first = TestTask::waiting(Send(1).perform(&queue));
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        assert_eq!((first.wakes(), first.poll()), (1, Poll::Ready(1)));
        drop(first);
        let second = Send(2).spawn(&queue, Task);
        for id in 1..3 {
            yield_often();
            assert_eq!(queue.receive().unwrap().0.seen(), id);
        }
        assert_eq!((second.join().unwrap(), finish(&queue)), (1, 0));
    });
}

/// Two tasks wait, and there are two messages, or places. The first one wakes one task.
#[test]
fn inv14_one_message_or_place_wakes_one_task() {
    run(|| one_wakes_one([Receive; 2], 0));
    thoroughly(|| one_wakes_one([Send(2), Send(3)], 2));
}

fn one_wakes_one(operations: [Operation; 2], len: u64) {
    let queue = with::<Bitmap>(2, len);
    let mut tasks = operations.map(|operation| TestTask::waiting(operation.perform(&queue)));
    let other = spawn(&queue, move |queue| operations[0].serve(queue));
    queue.validate();
    let early = tasks[0].wakes();
    assert_eq!(tasks[1].wakes(), 0, "there is one message, or place");
    if early == 1 {
        assert_eq!(tasks[0].poll(), Poll::Ready(1));
    }
    operations[1].serve(&queue);
    other.join().unwrap();
    assert_eq!((tasks[0].wakes(), tasks[1].wakes()), (1, 1));
    tasks[early..].iter_mut().for_each(|task| assert_eq!(task.poll(), Poll::Ready(1)));
    drop(tasks);
    assert_eq!(finish(&queue), len);
}

/// A task has a permit for room, and other sends take the part of it that is not reserved. The rest
/// is enough for the sender behind the task.
#[test]
fn inv14_unused_send_permit_passes_on() {
    thoroughly(|| {
        let (low, high) = (0, 5);
        let queue = Queue::<Payload>::builder(2).reserve(high, 1).build().unwrap();
        queue.try_send(Payload::new(0), low).unwrap();
        let mut first = TestTask::waiting(queue.send_async(Payload::new(1), low));
        assert_eq!(queue.try_receive().unwrap().0.seen(), 0);
        assert_eq!(first.wakes(), 1);
        (2..4).for_each(|id| queue.try_send(Payload::new(id), high).unwrap());
        let mut second = TestTask::waiting(queue.send_async(Payload::new(4), high));
        assert_eq!(queue.try_receive().unwrap().0.seen(), 2);
        assert_eq!(second.wakes(), 0, "the room is the first one's");
        assert!(first.poll().is_pending());
        assert_eq!(second.wakes(), 1, "the first one has no use for it");
        queue.validate();
        assert!(second.poll().is_ready());
        (3..5).for_each(|id| assert_eq!(queue.try_receive().unwrap().0.seen(), id));
        assert!(first.poll().is_ready());
        drop((first, second));
        assert_eq!(finish(&queue), 1);
    });
}

/// A task is polled again with another waker, which is woken from then on.
#[test]
fn inv14_the_last_waker_is_woken() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 0);
        let mut task = TestTask::waiting(Receive.perform(&queue));
        let sender = Send(1).spawn(&queue, Thread);
        let first = mem::replace(&mut task.woken, WakeCount::new());
        let early = task.poll();
        sender.join().unwrap();
        if early.is_pending() {
            assert_eq!((first.count(), task.wakes()), (0, 1));
            assert_eq!(task.poll(), Poll::Ready(1));
        }
        drop(task);
        assert_eq!(finish(&queue), 0);
    });
}
