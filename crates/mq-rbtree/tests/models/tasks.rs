//! Waiting tasks, beside other tasks and beside threads: futures that are polled, woken and
//! dropped.

use std::task::Poll;

use mq_rbtree::{Bitmap, Queue, ReceiveError};

use super::payload::{
    Payload, WakeCounter, block_on, finish, receive, received, run, run_with_unseen, send, spawn,
    thoroughly, with, yield_often,
};

/// Returns the message of a future that is ready.
fn got(polled: Poll<Result<(Payload, u32), ReceiveError>>) -> Option<u64> {
    match polled {
        Poll::Ready(result) => Some(result.unwrap().0.seen()),
        Poll::Pending => None,
    }
}

/// A task waits, and a thread or task behind it. The message comes while the first task is dropped:
/// the second one gets it.
#[test]
fn inv14_dropped_receive_permit_passes_on() {
    for by_task in [false, true] {
        run(move || passed_on(by_task));
    }
}

fn passed_on(by_task: bool) {
    let queue = with::<Bitmap>(2, 0);
    let counter = WakeCounter::new();
    let mut first = Box::pin(queue.receive_async());
    assert!(counter.poll(first.as_mut()).is_pending());
    let other = receive(&queue, by_task);
    queue.send(Payload::new(1), 0).unwrap();
    drop(first);
    assert_eq!((other.join().unwrap(), finish(&queue)), (1, 0));
}

/// A task waits for the message. Another one is polled while that comes, and dropped.
#[test]
fn inv09_dropped_receive_conserves_messages() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let counters = [WakeCounter::new(), WakeCounter::new()];
        let mut waits = Box::pin(queue.receive_async());
        assert!(counters[0].poll(waits.as_mut()).is_pending());
        let sender = send(&queue, 1, false);
        let mut dropped = Box::pin(queue.receive_async());
        let early = got(counters[1].poll(dropped.as_mut()));
        drop(dropped);
        sender.join().unwrap();
        let late = early.is_none().then(|| {
            assert_eq!(counters[0].wakes(), 1, "it was woken for the message");
            got(counters[0].poll(waits.as_mut())).unwrap()
        });
        drop(waits);
        assert_eq!((early.or(late), finish(&queue)), (Some(1), 0));
    });
}

#[test]
fn inv14_a_task_is_woken_for_each_free_place() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let counter = WakeCounter::new();
        let mut first = Box::pin(queue.send_async(Payload::new(1), 0));
        assert!(counter.poll(first.as_mut()).is_pending());
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        assert_eq!(counter.wakes(), 1);
        assert!(matches!(counter.poll(first.as_mut()), Poll::Ready(Ok(()))));
        drop(first);
        let second = spawn(&queue, |queue| block_on(queue.send_async(Payload::new(2), 0)).unwrap());
        for id in 1..3 {
            yield_often();
            assert_eq!(queue.receive().unwrap().0.seen(), id);
        }
        second.join().unwrap();
        assert_eq!(finish(&queue), 0);
    });
}

/// Two tasks wait, and two threads send a message each. The first message wakes one task.
#[test]
fn inv14_one_message_wakes_one_task() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let counters = [WakeCounter::new(), WakeCounter::new()];
        let mut tasks = [(); 2].map(|()| Box::pin(queue.receive_async()));
        for (counter, task) in counters.iter().zip(&mut tasks) {
            assert!(counter.poll(task.as_mut()).is_pending());
        }
        let sender = send(&queue, 1, false);
        let mut sum = 0;
        queue.validate();
        if counters[0].wakes() == 1 {
            assert_eq!(counters[1].wakes(), 0, "there is one message");
            sum += got(counters[0].poll(tasks[0].as_mut())).unwrap();
        }
        queue.send(Payload::new(2), 0).unwrap();
        sender.join().unwrap();
        assert_eq!((counters[0].wakes(), counters[1].wakes()), (1, 1));
        for (counter, task) in counters.iter().zip(&mut tasks).skip(usize::from(sum != 0)) {
            sum += got(counter.poll(task.as_mut())).unwrap();
        }
        drop(tasks);
        assert_eq!((sum, finish(&queue)), (3, 0));
    });
}

/// Two tasks wait for room, and two messages are received. The first room wakes one task.
#[test]
fn inv14_room_for_one_wakes_one_task() {
    thoroughly(|| {
        let queue = with::<Bitmap>(2, 2);
        let counters = [WakeCounter::new(), WakeCounter::new()];
        let mut tasks = [2, 3].map(|id| Box::pin(queue.send_async(Payload::new(id), 0)));
        for (counter, task) in counters.iter().zip(&mut tasks) {
            assert!(counter.poll(task.as_mut()).is_pending());
        }
        let receiver = spawn(&queue, |queue| received(queue.try_receive(), ReceiveError::Empty));
        queue.validate();
        let early = counters[0].wakes();
        assert!(early == 1 || counters[1].wakes() == 0);
        if early == 1 {
            assert_eq!(counters[1].wakes(), 0, "there is room for one");
            assert!(counters[0].poll(tasks[0].as_mut()).is_ready());
        }
        assert_eq!(received(queue.try_receive(), ReceiveError::Empty), 1);
        assert_eq!(receiver.join().unwrap(), 1);
        assert_eq!((counters[0].wakes(), counters[1].wakes()), (1, 1));
        for (counter, task) in counters.iter().zip(&mut tasks).skip(early) {
            assert!(counter.poll(task.as_mut()).is_ready());
        }
        drop(tasks);
        assert_eq!(finish(&queue), 2);
    });
}

/// A task waits for room, and a thread behind it. There is room while the task is dropped: the
/// thread's message is sent.
#[test]
fn inv14_dropped_send_permit_passes_to_thread() {
    run_with_unseen(1, || {
        let queue = with::<Bitmap>(1, 1);
        let counter = WakeCounter::new();
        let mut first = Box::pin(queue.send_async(Payload::new(1), 0));
        assert!(counter.poll(first.as_mut()).is_pending());
        let other = send(&queue, 2, false);
        yield_often();
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        drop(first);
        assert_eq!((other.join().unwrap(), finish(&queue)), (1, 1));
    });
}

/// A task has a permit for room, and other sends take the part of it that is not reserved. The rest
/// is enough for the sender behind the task.
#[test]
fn inv14_unused_send_permit_passes_on() {
    thoroughly(|| {
        let (low, high) = (0, 5);
        let queue = Queue::<Payload>::builder(2).reserve(high, 1).build().unwrap();
        let counters = [WakeCounter::new(), WakeCounter::new()];
        queue.try_send(Payload::new(0), low).unwrap();
        let mut first = Box::pin(queue.send_async(Payload::new(1), low));
        assert!(counters[0].poll(first.as_mut()).is_pending());
        assert_eq!(queue.try_receive().unwrap().0.seen(), 0);
        assert_eq!(counters[0].wakes(), 1);
        (2..4).for_each(|id| queue.try_send(Payload::new(id), high).unwrap());
        let mut second = Box::pin(queue.send_async(Payload::new(4), high));
        assert!(counters[1].poll(second.as_mut()).is_pending());
        assert_eq!(queue.try_receive().unwrap().0.seen(), 2);
        assert_eq!(counters[1].wakes(), 0, "the room is the first one's");
        assert!(counters[0].poll(first.as_mut()).is_pending());
        assert_eq!(counters[1].wakes(), 1, "the first one has no use for it");
        queue.validate();
        assert!(counters[1].poll(second.as_mut()).is_ready());
        (3..5).for_each(|id| assert_eq!(queue.try_receive().unwrap().0.seen(), id));
        assert!(counters[0].poll(first.as_mut()).is_ready());
        drop((first, second));
        assert_eq!(finish(&queue), 1);
    });
}

/// A task is polled again with another waker, which is woken from then on.
#[test]
fn inv14_the_last_waker_is_woken() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 0);
        let counters = [WakeCounter::new(), WakeCounter::new()];
        let mut task = Box::pin(queue.receive_async());
        assert!(counters[0].poll(task.as_mut()).is_pending());
        let sender = send(&queue, 1, false);
        let early = got(counters[1].poll(task.as_mut()));
        sender.join().unwrap();
        let late = early.is_none().then(|| {
            assert_eq!((counters[0].wakes(), counters[1].wakes()), (0, 1));
            got(counters[1].poll(task.as_mut())).unwrap()
        });
        drop(task);
        assert_eq!((early.or(late), finish(&queue)), (Some(1), 0));
    });
}
