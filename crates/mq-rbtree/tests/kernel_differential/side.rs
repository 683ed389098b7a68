//! One of the two queues, and its answers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use mq_rbtree::{Deadline, InvalidDeadline, Queue, Wait};

use super::asleep::asleep;

/// Longer than any step here takes.
pub(crate) const LONG: Duration = Duration::from_secs(5);
/// A deadline that is reached.
pub(crate) const SHORT: Duration = Duration::from_micros(200);

/// The wait of an operation. Only `Patient`, `Short` and `Long` really wait; the last in the threads of
/// the test alone.
#[derive(Clone, Copy, Debug)]
pub(crate) enum How {
    /// Does not wait.
    Now,
    /// Waits without a limit if the operation can complete at once, otherwise until a short
    /// deadline.
    Patient,
    /// Waits until a deadline in the past.
    Past { realtime: bool },
    /// Waits until a deadline that is reached.
    Short { realtime: bool },
    /// Waits until a deadline that is not reached.
    Long,
    /// Waits until the deadline of a C program. If it is far away and the operation would wait,
    /// there is none.
    Timespec { seconds: i64, nanoseconds: i64 },
}

impl How {
    /// Returns another wait if this one would not end.
    pub(crate) fn now_or(self, would_wait: bool) -> Self {
        match self {
            Self::Patient if would_wait => Self::Short { realtime: false },
            Self::Timespec { seconds, nanoseconds } if would_wait => {
                let end = Deadline::realtime(seconds, nanoseconds);
                if end.is_ok_and(|end| !end.is_over()) { Self::Now } else { self }
            }
            _ => self,
        }
    }
}

pub(crate) type Message = (Vec<u8>, u32);

/// What both queues offer. An error is the errno.
pub(crate) trait PosixQueue: Sync {
    fn send(&self, message: Vec<u8>, priority: u32, how: How) -> Result<(), (Vec<u8>, i32)>;
    fn receive(&self, how: How) -> Result<Message, i32>;
    fn len(&self) -> usize;
    fn is_full(&self) -> bool;
    fn notify(&mut self) -> Result<(), i32>;
    /// Ends the registration, if there is one, which was not called.
    fn cancel_notify(&mut self);
    /// Returns whether the registration was called and so has ended, once.
    fn was_called(&mut self) -> bool;
}

/// The queue of this crate.
pub(crate) struct Ours {
    queue: Queue<Vec<u8>>,
    /// Set by the registered callback.
    called: Arc<AtomicBool>,
}

impl Ours {
    pub(crate) fn new(max_messages: usize, message_bytes: usize) -> Self {
        let longest = message_bytes.try_into().unwrap();
        let builder = Queue::builder(max_messages).measure(Vec::len).max_message_bytes(longest);
        let queue = builder.build().unwrap();
        assert_eq!(
            (queue.max_messages(), queue.max_message_bytes()),
            (max_messages, message_bytes)
        );
        Self { queue, called: Arc::default() }
    }

    fn wait(how: How, would_wait: bool) -> Result<Wait, InvalidDeadline> {
        Ok(match how.now_or(would_wait) {
            How::Now => Wait::NO,
            How::Patient => Wait::FOREVER,
            How::Past { realtime: true } => Wait::until(SystemTime::UNIX_EPOCH),
            How::Past { realtime: false } => Wait::at_most(Duration::ZERO),
            How::Short { realtime: true } => Wait::until(SystemTime::now() + SHORT),
            How::Short { realtime: false } => Wait::until(Instant::now() + SHORT),
            How::Long => Wait::at_most(LONG),
            How::Timespec { seconds, nanoseconds } => {
                Wait::until(Deadline::realtime(seconds, nanoseconds)?)
            }
        })
    }
}

impl PosixQueue for Ours {
    fn send(&self, message: Vec<u8>, priority: u32, how: How) -> Result<(), (Vec<u8>, i32)> {
        match Self::wait(how, self.is_full()) {
            Ok(wait) => self.queue.send_with(message, priority, wait).map_err(|error| {
                let errno = error.errno();
                (error.value, errno)
            }),
            Err(invalid) => Err((message, invalid.errno())),
        }
    }

    fn receive(&self, how: How) -> Result<Message, i32> {
        let wait = Self::wait(how, self.len() == 0).map_err(|invalid| invalid.errno())?;
        self.queue.receive_with(wait).map_err(|error| error.errno())
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn is_full(&self) -> bool {
        self.queue.len() == self.queue.max_messages()
    }

    fn notify(&mut self) -> Result<(), i32> {
        let called = Arc::clone(&self.called);
        let notified = self.queue.notify(move || called.store(true, SeqCst));
        notified.map_err(|error| error.errno())
    }

    fn cancel_notify(&mut self) {
        self.queue.cancel_notify();
        assert_eq!(Arc::strong_count(&self.called), 1, "the callback is dropped");
    }

    fn was_called(&mut self) -> bool {
        self.called.swap(false, SeqCst)
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Send(Vec<u8>, u32, How),
    Receive(How),
    Notify,
    CancelNotify,
    /// Sends without waiting until a message is refused, or none is left.
    Fill(Vec<Message>),
    /// Receives so many times without waiting.
    Drain(usize),
    /// If the queue is empty: so many threads wait to receive, then these messages are sent.
    WaitingReceivers(Vec<Message>),
    /// If the queue is full: a waiting thread sends each of these, then as many messages are
    /// received.
    WaitingSenders(Vec<Message>),
}

/// One reply: a refused message, a received message, or neither.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Sent,
    Refused(Vec<u8>, i32),
    Received(Message),
    Nothing(i32),
    Registered(Result<(), i32>),
    /// A callback ran.
    Called,
}

/// The result of an operation: the replies, and the number of messages after it.
pub(crate) type Answer = (Vec<Reply>, usize);

/// Runs an operation.
pub(crate) fn run(queue: &mut dyn PosixQueue, op: &Op) -> Answer {
    let mut replies = Vec::new();
    match op {
        Op::Send(message, priority, how) => {
            replies.push(send(queue, message.clone(), *priority, *how));
        }
        Op::Receive(how) => replies.push(receive(queue, *how)),
        Op::Notify => replies.push(Reply::Registered(queue.notify())),
        Op::CancelNotify => queue.cancel_notify(),
        Op::Fill(messages) => {
            for (message, priority) in messages {
                replies.push(send(queue, message.clone(), *priority, How::Now));
                if replies.last() != Some(&Reply::Sent) {
                    break;
                }
            }
        }
        Op::Drain(count) => replies.extend((0..*count).map(|_| receive(queue, How::Now))),
        Op::WaitingReceivers(messages) if queue.len() == 0 => {
            hand_over(queue, messages, &mut replies);
        }
        Op::WaitingSenders(messages) if queue.is_full() => {
            take_over(queue, messages, &mut replies);
        }
        Op::WaitingReceivers(_) | Op::WaitingSenders(_) => {}
    }
    if queue.was_called() {
        replies.push(Reply::Called);
    }
    (replies, queue.len())
}

fn send(queue: &dyn PosixQueue, message: Vec<u8>, priority: u32, how: How) -> Reply {
    match queue.send(message, priority, how) {
        Ok(()) => Reply::Sent,
        Err((message, errno)) => Reply::Refused(message, errno),
    }
}

fn receive(queue: &dyn PosixQueue, how: How) -> Reply {
    match queue.receive(how) {
        Ok(message) => Reply::Received(message),
        Err(errno) => Reply::Nothing(errno),
    }
}

/// Each waiting receiver gets one message, in the order of arrival.
fn hand_over(queue: &dyn PosixQueue, messages: &[Message], replies: &mut Vec<Reply>) {
    thread::scope(|scope| {
        let start = |_: &Message| asleep(scope, move || receive(queue, How::Long));
        let mut waiting: VecDeque<_> = messages.iter().map(start).collect();
        for (message, priority) in messages {
            replies.push(send(queue, message.clone(), *priority, How::Now));
            replies.push(waiting.pop_front().unwrap().join().unwrap());
        }
    });
}

/// Each waiting sender sends in its turn, as messages are received.
fn take_over(queue: &dyn PosixQueue, messages: &[Message], replies: &mut Vec<Reply>) {
    thread::scope(|scope| {
        let start = |(message, priority): &Message| {
            let (message, priority) = (message.clone(), *priority);
            asleep(scope, move || send(queue, message, priority, How::Long))
        };
        let mut waiting: VecDeque<_> = messages.iter().map(start).collect();
        for _ in messages {
            replies.push(receive(queue, How::Now));
            replies.push(waiting.pop_front().unwrap().join().unwrap());
        }
    });
}
