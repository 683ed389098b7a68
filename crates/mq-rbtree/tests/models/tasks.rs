//! Tasks that wait, among themselves and beside threads: futures that are polled, woken and dropped.

use std::task::Poll;

use mq_rbtree::{Bitmap, Queue, ReceiveError, SendRefused};
use percpu::sync::{Arc, thread};

use super::payload::{
    Bell, Payload, Shared, block_on, dawdle, finish, look, measured, received, run, run_but, sent,
    with,
};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    (
        "receive dropped: pass the promised message on",
        "tasks::inv14_a_permit_to_receive_is_passed_on_at_drop",
    ),
    ("end of a permit to receive: count it out", "tasks::inv14_a_task_is_woken_for_each_message"),
    ("serve a receiving task: count its permit", "tasks::inv14_one_message_wakes_one_task"),
    ("send dropped: let other senders go on", "tasks::inv14_a_permit_to_send_is_passed_on_at_drop"),
    (
        "end of a permit to send: count it out",
        "tasks::inv14_a_task_is_woken_whenever_there_is_room",
    ),
    ("serve a sending task: count its permit", "tasks::inv14_room_for_one_wakes_one_task"),
    (
        "send refused: pass the promised room on",
        "tasks::inv14_a_permit_that_came_to_nothing_lets_others_go_on",
    ),
    ("poll: wait with the new waker", "tasks::inv14_the_last_waker_is_woken"),
    ("send dropped: let other senders go on", "tasks::inv14_a_task_that_goes_lets_others_go_on"),
];

/// Takes what a future of a message is ready with.
fn got(polled: Poll<Result<(Payload, u32), ReceiveError>>) -> Option<u64> {
    match polled {
        Poll::Ready(result) => Some(result.unwrap().0.seen()),
        Poll::Pending => None,
    }
}

/// Sends one message from a thread of its own.
fn send_one(queue: &Shared<Bitmap>, id: u64) -> thread::JoinHandle<()> {
    let queue = Arc::clone(queue);
    thread::spawn(move || queue.send(Payload::new(id), 0).unwrap())
}

/// A task waits, and a thread behind it. The message comes while the task gives up: the thread gets it,
/// or the task did.
fn passed_on(by_task: bool) {
    run(move || {
        let queue = with::<Bitmap>(2, 0);
        let bell = Bell::new();
        let mut first = Box::pin(queue.receive_async());
        assert!(bell.poll(first.as_mut()).is_pending());
        let other = thread::spawn({
            let queue = Arc::clone(&queue);
            move || {
                let got = if by_task { block_on(queue.receive_async()) } else { queue.receive() };
                received(got, ReceiveError::Closed)
            }
        });
        queue.send(Payload::new(1), 0).unwrap();
        drop(first);
        assert_eq!((other.join().unwrap(), finish(&queue)), (1, 0));
    });
}

#[test]
fn inv14_a_permit_to_receive_is_passed_on_at_drop() {
    passed_on(false);
}

#[test]
fn inv14_a_permit_is_passed_on_to_a_task() {
    passed_on(true);
}

/// Two tasks and one message, while one of them may give up.
#[test]
fn inv09_a_dropped_future_neither_loses_nor_doubles_a_message() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let sender = send_one(&queue, 1);
        let (bells, mut sum) = ([Bell::new(), Bell::new()], 0);
        let mut first = Box::pin(queue.receive_async());
        let mut second = Box::pin(queue.receive_async());
        sum += got(bells[0].poll(first.as_mut())).unwrap_or(0);
        let mut done = sum == 1;
        if !done {
            sum += got(bells[1].poll(second.as_mut())).unwrap_or(0);
            done = sum == 1;
        }
        drop(first);
        sender.join().unwrap();
        if !done {
            assert_eq!(bells[1].rings(), 1, "the message is its");
            sum += got(bells[1].poll(second.as_mut())).unwrap();
        }
        drop(second);
        assert_eq!((sum, finish(&queue)), (1, 0));
    });
}

/// A task that waits, a thread that does not: either may get it, and the task is not left behind.
#[test]
fn inv09_a_message_may_be_taken_from_under_a_permit() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let task = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(block_on(queue.receive_async()), ReceiveError::Closed)
        });
        queue.send(Payload::new(1), 0).unwrap();
        let barged = received(queue.try_receive(), ReceiveError::Empty);
        look(&queue);
        if barged == 1 {
            queue.send(Payload::new(2), 0).unwrap();
        }
        assert_eq!((task.join().unwrap(), finish(&queue)), (1, 0));
    });
}

#[test]
fn inv14_a_task_is_woken_for_each_message() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let task = thread::spawn({
            let queue = Arc::clone(&queue);
            move || {
                for id in 0..2 {
                    assert_eq!(block_on(queue.receive_async()).unwrap().0.seen(), id);
                }
            }
        });
        for id in 0..2 {
            dawdle();
            queue.send(Payload::new(id), 0).unwrap();
        }
        task.join().unwrap();
        assert_eq!(finish(&queue), 0);
    });
}

#[test]
fn inv14_a_task_is_woken_whenever_there_is_room() {
    run(|| {
        let queue = with::<Bitmap>(1, 1);
        let task = thread::spawn({
            let queue = Arc::clone(&queue);
            move || {
                for id in 1..3 {
                    block_on(queue.send_async(Payload::new(id), 0)).unwrap();
                }
            }
        });
        for id in 0..3 {
            dawdle();
            assert_eq!(queue.receive().unwrap().0.seen(), id);
        }
        task.join().unwrap();
        assert_eq!(finish(&queue), 0);
    });
}

/// Two wait, and one message comes, from one of two threads or the other; and then the second.
#[test]
fn inv14_one_message_wakes_one_task() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let bells = [Bell::new(), Bell::new()];
        let mut tasks = [(); 2].map(|()| Box::pin(queue.receive_async()));
        for (bell, task) in bells.iter().zip(&mut tasks) {
            assert!(bell.poll(task.as_mut()).is_pending());
        }
        let sender = send_one(&queue, 1);
        let mut sum = 0;
        queue.validate();
        if bells[0].rings() == 1 {
            assert_eq!(bells[1].rings(), 0, "there is one message");
            sum += got(bells[0].poll(tasks[0].as_mut())).unwrap();
        }
        queue.send(Payload::new(2), 0).unwrap();
        sender.join().unwrap();
        assert_eq!((bells[0].rings(), bells[1].rings()), (1, 1));
        for (bell, task) in bells.iter().zip(&mut tasks).skip(usize::from(sum != 0)) {
            sum += got(bell.poll(task.as_mut())).unwrap();
        }
        drop(tasks);
        assert_eq!((sum, finish(&queue)), (3, 0));
    });
}

/// Two wait for room, and then there is room for one, and for two.
#[test]
fn inv14_room_for_one_wakes_one_task() {
    run(|| {
        let queue = with::<Bitmap>(2, 2);
        let bells = [Bell::new(), Bell::new()];
        let mut tasks = [2, 3].map(|id| Box::pin(queue.send_async(Payload::new(id), 0)));
        for (bell, task) in bells.iter().zip(&mut tasks) {
            assert!(bell.poll(task.as_mut()).is_pending());
        }
        let receiver = thread::spawn({
            let queue = Arc::clone(&queue);
            move || received(queue.try_receive(), ReceiveError::Empty)
        });
        queue.validate();
        let early = bells[0].rings();
        assert!(early == 1 || bells[1].rings() == 0);
        if early == 1 {
            assert_eq!(bells[1].rings(), 0, "there is room for one");
            assert!(bells[0].poll(tasks[0].as_mut()).is_ready());
        }
        assert_eq!(received(queue.try_receive(), ReceiveError::Empty), 1);
        assert_eq!(receiver.join().unwrap(), 1);
        assert_eq!((bells[0].rings(), bells[1].rings()), (1, 1));
        for (bell, task) in bells.iter().zip(&mut tasks).skip(early) {
            assert!(bell.poll(task.as_mut()).is_ready());
        }
        drop(tasks);
        assert_eq!(finish(&queue), 2);
    });
}

/// A task waits for room, and a thread behind it. There is room while the task gives up: the thread's
/// message goes in.
#[test]
fn inv14_a_permit_to_send_is_passed_on_at_drop() {
    run_but(1, || {
        let queue = with::<Bitmap>(1, 1);
        let bell = Bell::new();
        let mut first = Box::pin(queue.send_async(Payload::new(1), 0));
        assert!(bell.poll(first.as_mut()).is_pending());
        let other = thread::spawn({
            let queue = Arc::clone(&queue);
            move || sent(queue.send(Payload::new(2), 0), SendRefused::Closed)
        });
        assert_eq!(queue.receive().unwrap().0.seen(), 0);
        drop(first);
        assert_eq!((other.join().unwrap(), finish(&queue)), (1, 1));
    });
}

/// A task's message of two bytes waits for room, and a thread's of one byte behind it: there is room for
/// the second alone.
#[test]
fn inv14_a_task_that_goes_lets_others_go_on() {
    run_but(1, || {
        let queue = measured(2);
        (0..2).for_each(|_| queue.try_send(Payload::new(1), 0).unwrap());
        let bell = Bell::new();
        let mut goes = Box::pin(queue.send_async(Payload::new(2), 0));
        assert!(bell.poll(goes.as_mut()).is_pending());
        let waits = thread::spawn({
            let queue = Arc::clone(&queue);
            move || sent(queue.send(Payload::new(1), 0), SendRefused::Closed)
        });
        assert_eq!(queue.try_receive().unwrap().0.seen(), 1);
        drop(goes);
        assert_eq!((waits.join().unwrap(), bell.rings()), (1, 0));
        assert_eq!(finish(&queue), 2);
    });
}

/// There is room, which a task has a permit for, and others take the part of it that is not reserved.
/// What is left is enough for who waits behind it.
#[test]
fn inv14_a_permit_that_came_to_nothing_lets_others_go_on() {
    run(|| {
        let (low, high) = (0, 5);
        let queue = Queue::<Payload>::builder(2).reserve(high, 1).build().unwrap();
        let bells = [Bell::new(), Bell::new()];
        queue.try_send(Payload::new(0), low).unwrap();
        let mut first = Box::pin(queue.send_async(Payload::new(1), low));
        assert!(bells[0].poll(first.as_mut()).is_pending());
        assert_eq!(queue.try_receive().unwrap().0.seen(), 0);
        assert_eq!(bells[0].rings(), 1);
        (2..4).for_each(|id| queue.try_send(Payload::new(id), high).unwrap());
        let mut second = Box::pin(queue.send_async(Payload::new(4), high));
        assert!(bells[1].poll(second.as_mut()).is_pending());
        assert_eq!(queue.try_receive().unwrap().0.seen(), 2);
        assert_eq!(bells[1].rings(), 0, "the room is the first one's");
        assert!(bells[0].poll(first.as_mut()).is_pending());
        assert_eq!(bells[1].rings(), 1, "the first one has no use for it");
        queue.validate();
        assert!(bells[1].poll(second.as_mut()).is_ready());
        (3..5).for_each(|id| assert_eq!(queue.try_receive().unwrap().0.seen(), id));
        assert!(bells[0].poll(first.as_mut()).is_ready());
        drop((first, second));
        assert_eq!(finish(&queue), 1);
    });
}

/// A task is polled again with another waker, which is woken from then on.
#[test]
fn inv14_the_last_waker_is_woken() {
    run(|| {
        let queue = with::<Bitmap>(1, 0);
        let bells = [Bell::new(), Bell::new()];
        let mut task = Box::pin(queue.receive_async());
        assert!(bells[0].poll(task.as_mut()).is_pending());
        let sender = send_one(&queue, 1);
        let early = got(bells[1].poll(task.as_mut()));
        sender.join().unwrap();
        let late = early.is_none().then(|| {
            assert_eq!((bells[0].rings(), bells[1].rings()), (0, 1));
            got(bells[1].poll(task.as_mut())).unwrap()
        });
        drop(task);
        assert_eq!((early.or(late), finish(&queue)), (Some(1), 0));
    });
}
