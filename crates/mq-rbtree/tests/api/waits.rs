//! Waits of threads and of tasks: what wakes them, and their ends.
#![cfg(not(offlock_model))]

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError, SendError, SendRefused};

use testkit::{block_on, wait_until};

use crate::panicking::poll;

/// An operation that waits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Send,
    SendBatch,
    Receive,
    ReceiveGuard,
    ReceiveBatch,
}

/// What ends a wait.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// A message, or room.
    Message,
    MessageBeforeDeadline,
    Close,
    /// The drop of the last handle of the other side.
    LastHandle,
    Deadline,
    /// The drop of the future, after it was woken for a message or room.
    Drop,
}

/// Nothing, if the operation is done; otherwise its error.
type Outcome = Result<(), i32>;

use End::{Close, Deadline, Drop, LastHandle, Message, MessageBeforeDeadline};
use Operation::{Receive, ReceiveBatch, ReceiveGuard, Send, SendBatch};

fn sent<R>(result: Result<R, SendRefused>) -> Outcome {
    result.map(drop).map_err(|refused| refused.errno())
}

fn received<R>(result: Result<R, ReceiveError>) -> Outcome {
    result.map(drop).map_err(|error| error.errno())
}

/// Returns the reason of a refused message, which comes back.
fn reason(error: SendError<u32>) -> SendRefused {
    assert_eq!(error.value, 1);
    error.reason
}

impl Operation {
    fn is_send(self) -> bool {
        matches!(self, Send | SendBatch)
    }

    /// Returns whether the operation has such a wait.
    fn has(self, by_task: bool, end: End) -> bool {
        match end {
            Drop => by_task && self != SendBatch,
            Deadline | MessageBeforeDeadline => {
                !by_task && !matches!(self, SendBatch | ReceiveBatch)
            }
            _ => !by_task || self != SendBatch,
        }
    }

    /// Sends the message 1, or receives. Waits on the calling thread.
    fn run(self, queue: &Queue<u32>, deadline: Option<Instant>) -> Outcome {
        match (self, deadline) {
            (Send, None) => sent(queue.send(1, 1).map_err(reason)),
            (Send, Some(end)) => sent(queue.send_deadline(1, 1, end).map_err(reason)),
            (SendBatch, _) => sent(queue.send_batch(&mut [(1, 1)].into()).map_err(|e| e.reason)),
            (Receive, None) => received(queue.receive()),
            (Receive, Some(end)) => received(queue.receive_deadline(end)),
            (ReceiveGuard, None) => received(queue.receive_guard().map(|guard| guard.accept())),
            (ReceiveGuard, Some(end)) => {
                received(queue.receive_guard_deadline(end).map(|guard| guard.accept()))
            }
            (ReceiveBatch, _) => received(queue.receive_batch(&mut Vec::new(), 2)),
        }
    }

    async fn run_async(self, queue: &Queue<u32>) -> Outcome {
        match self {
            Send | SendBatch => sent(queue.send_async(1, 1).await.map_err(reason)),
            Receive => received(queue.receive_async().await),
            ReceiveGuard => received(queue.receive_guard_async().await.map(|guard| guard.accept())),
            ReceiveBatch => received(queue.receive_batch_async(&mut Vec::new(), 2).await),
        }
    }

    /// Ends the wait of the operation by room or a message.
    fn serve(self, queue: &Queue<u32>) {
        match self.is_send() {
            true => assert_eq!(queue.try_receive(), Ok((0, 0))),
            false => queue.try_send(1, 1).unwrap(),
        }
    }
}

fn waiting(queue: &Queue<u32>) -> usize {
    let (senders, receivers) = queue.stats().waiting;
    senders + receivers
}

/// Each operation, of a thread or of a task, with each end.
#[test]
fn inv13_a_wait_ends_by_each_of_its_ends() {
    let operations = [Send, SendBatch, Receive, ReceiveGuard, ReceiveBatch];
    let ends = [Message, MessageBeforeDeadline, Close, LastHandle, Deadline, Drop];
    let cases = operations.into_iter().flat_map(|operation| ends.map(|end| (operation, end)));
    for (operation, end, by_task) in cases.flat_map(|(o, e)| [(o, e, false), (o, e, true)]) {
        if operation.has(by_task, end) {
            println!("{operation:?}, {end:?}, by a task: {by_task}");
            waits(operation, by_task, end);
        }
    }
}

fn waits(operation: Operation, by_task: bool, end: End) {
    const SHORT: Duration = Duration::from_millis(20);
    let sends = operation.is_send();
    let (sender, receiver) = Queue::<u32>::builder(1).spin(false).channel().unwrap();
    if sends {
        sender.send(0, 0).unwrap();
    }
    // The handle of the waiting side, and that of the other side.
    let own = if sends { Ok(sender.clone()) } else { Err(receiver.clone()) };
    let queue: &Queue<u32> = match &own {
        Ok(sender) => sender,
        Err(receiver) => receiver,
    };
    let (mut sender, mut receiver) = (Some(sender), Some(receiver));
    let began = Instant::now();
    let deadline = match end {
        Deadline => Some(began + SHORT),
        MessageBeforeDeadline => Some(began + Duration::from_secs(100)),
        _ => None,
    };
    let outcome = thread::scope(|scope| {
        if end == Drop {
            let mut task = Box::pin(operation.run_async(queue));
            assert!(poll(&mut task, Waker::noop().clone()).is_pending());
            operation.serve(queue);
            return None;
        }
        let thread = scope.spawn(move || match by_task {
            true => block_on(operation.run_async(queue)),
            false => operation.run(queue, deadline),
        });
        if end != Deadline {
            wait_until(|| waiting(queue) == 1);
        }
        match end {
            Message | MessageBeforeDeadline => operation.serve(queue),
            Close => assert!(queue.close()),
            LastHandle if sends => drop(receiver.take()),
            LastHandle => drop(sender.take()),
            Deadline | Drop => {}
        }
        Some(thread.join().unwrap())
    });
    let (expected, left) = match end {
        Message | MessageBeforeDeadline => (Some(Ok(())), sends),
        Close => (Some(Err(libc::ESHUTDOWN)), sends),
        LastHandle => (Some(Err(libc::ESHUTDOWN)), false), // the last receiver drops the messages
        Deadline => (Some(Err(libc::ETIMEDOUT)), sends),
        Drop => (None, !sends),
    };
    assert_eq!(outcome, expected);
    let stats = queue.stats();
    assert_eq!((stats.waiting, stats.depth, stats.guarded), ((0, 0), usize::from(left), 0));
    assert_eq!(stats.timeouts, u64::from(end == Deadline));
    assert!(end != Deadline || began.elapsed() >= SHORT);
    queue.validate();
}

/// A task was woken for the message, or the room, and does not poll; also a leaked one. The thread behind it
/// takes that at its deadline.
#[test]
fn inv09_a_wait_does_not_time_out_beside_a_message_or_room() {
    // On a machine that stalls for a moment, the deadline can pass too early.
    let in_time = |operation: Operation| {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        if operation.is_send() {
            queue.send(0, 0).unwrap();
        }
        let mut idle = Box::pin(operation.run_async(&queue));
        assert!(poll(&mut idle, Waker::noop().clone()).is_pending());
        let soon = Some(Instant::now() + Duration::from_millis(200));
        let outcome = thread::scope(|scope| {
            let thread = scope.spawn(|| operation.run(&queue, soon));
            wait_until(|| waiting(&queue) == 2 || thread.is_finished());
            operation.serve(&queue);
            thread.join().unwrap()
        });
        let in_time = outcome != Err(libc::ETIMEDOUT);
        assert_eq!(queue.stats().timeouts, u64::from(!in_time));
        std::mem::forget(idle);
        in_time
    };
    for operation in [Send, Receive] {
        assert!((0..20).any(|_| in_time(operation)), "{operation:?} is never in time");
    }
}

#[test]
fn a_future_that_was_never_polled_does_nothing() {
    let queue: Queue<Arc<()>> = Queue::new(1).unwrap();
    let message = Arc::new(());
    for len in 0..2 {
        drop(queue.send_async(Arc::clone(&message), 1));
        drop(queue.receive_async());
        assert_eq!((queue.len(), Arc::strong_count(&message)), (len, 1 + len));
        let _ = queue.try_send(Arc::clone(&message), 1);
    }
    queue.validate();
}

#[test]
fn a_batch_of_nothing_does_not_wait() {
    let (queue, out): (Queue<u32>, _) = (Queue::new(1).unwrap(), &mut Vec::new());
    let mut batch = Box::pin(queue.receive_batch_async(out, 0));
    assert_eq!(poll(&mut batch, Waker::noop().clone()), Poll::Ready(Ok(0)));
    drop(batch);
    assert_eq!(queue.receive_batch(out, 0), Ok(0));
    queue.send(1, 1).unwrap();
    assert_eq!(queue.send_batch(&mut VecDeque::new()), Ok(0), "the queue is full");
}

#[test]
fn inv13_a_past_deadline_only_ends_blocking_operations() {
    for past in [Instant::now() - Duration::from_secs(1), Instant::now()] {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        assert_eq!(queue.receive_deadline(past), Err(ReceiveError::Timeout));
        assert!(queue.send_deadline(1, 1, past).is_ok());
        let refused = queue.send_deadline(2, 2, past).unwrap_err();
        assert_eq!((refused.value, refused.reason), (2, SendRefused::Timeout));
        assert_eq!(queue.receive_deadline(past), Ok((1, 1)));
        // Other faults are reported first, as by the kernel.
        let refused = queue.send_deadline(2, 40_000, past).unwrap_err();
        assert_eq!(refused.reason, SendRefused::BadPriority { priority: 40_000 });
        queue.close();
        assert_eq!(queue.receive_deadline(past), Err(ReceiveError::Closed));
        assert_eq!(queue.send_deadline(2, 2, past).unwrap_err().reason, SendRefused::Closed);
        let stats = queue.stats();
        assert_eq!((stats.timeouts, stats.waiting), (2, (0, 0)));
        queue.validate();
    }
}
