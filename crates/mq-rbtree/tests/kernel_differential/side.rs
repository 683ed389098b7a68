//! One of the two queues, and its answers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::asleep::asleep;
use mq_rbtree::{Deadline, KernelQueue, MessageQueue, Wait};

/// Longer than any step here takes.
const LONG: Duration = Duration::from_secs(5);
/// A deadline that is reached.
const SHORT: Duration = Duration::from_micros(200);

/// The wait of an operation. Only `Patient` and `Short` really wait, for a moment.
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
    /// Waits until the deadline of a C program. If it is far away and the operation would wait,
    /// there is none.
    Timespec { seconds: i64, nanoseconds: i64 },
}

type Message = (Vec<u8>, u32);

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

pub(crate) struct Side<'q> {
    queue: &'q (dyn MessageQueue + 'q),
    /// The kernel's queue: a call of a C program is made as by one.
    kernel: Option<BorrowedFd<'q>>,
    /// Receives from the registered callback when it runs.
    called: Option<Receiver<()>>,
}

impl<'q> Side<'q> {
    pub(crate) fn kernel(queue: &'q KernelQueue) -> Self {
        Self { queue, kernel: Some(queue.as_fd()), called: None }
    }

    pub(crate) fn ours(queue: &'q dyn MessageQueue) -> Self {
        Self { queue, kernel: None, called: None }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len().unwrap()
    }

    fn is_full(&self) -> bool {
        self.len() == self.queue.attributes().max_messages
    }

    /// Runs an operation. With `calls` a callback must run, because it did on the other side.
    pub(crate) fn run(&mut self, op: &Op, calls: bool) -> Answer {
        let mut replies = Vec::new();
        match op {
            Op::Send(message, priority, how) => {
                replies.push(self.send(message.clone(), *priority, *how));
            }
            Op::Receive(how) => replies.push(self.receive(*how)),
            Op::Notify => {
                let (tell, called) = mpsc::channel();
                let registered = self.queue.notify(Box::new(move || tell.send(()).unwrap()));
                if registered.is_ok() {
                    self.called = Some(called);
                }
                replies.push(Reply::Registered(registered.map_err(|error| error.errno())));
            }
            Op::CancelNotify => {
                self.queue.cancel_notify();
                if let Some(called) = self.called.take() {
                    let end = called.recv_timeout(LONG);
                    assert_eq!(end, Err(RecvTimeoutError::Disconnected), "dropped uncalled");
                }
            }
            Op::Fill(messages) => {
                for (message, priority) in messages {
                    replies.push(self.send(message.clone(), *priority, How::Now));
                    if replies.last() != Some(&Reply::Sent) {
                        break;
                    }
                }
            }
            Op::Drain(count) => replies.extend((0..*count).map(|_| self.receive(How::Now))),
            Op::WaitingReceivers(messages) if self.len() == 0 => {
                self.hand_over(messages, &mut replies)
            }
            Op::WaitingSenders(messages) if self.is_full() => {
                self.take_over(messages, &mut replies)
            }
            Op::WaitingReceivers(_) | Op::WaitingSenders(_) => {}
        }
        if self.was_called(calls) {
            replies.push(Reply::Called);
        }
        (replies, self.len())
    }

    /// Returns whether the callback ran. Our queue calls it on the sender's thread, so that is
    /// known now; the kernel's callback may come later. An unexpected call has ended the
    /// registration, which the next `Notify` shows at the latest.
    fn was_called(&mut self, must_be: bool) -> bool {
        let Some(called) = &self.called else { return false };
        let patience = if must_be { LONG } else { Duration::ZERO };
        let came = called.recv_timeout(patience).is_ok();
        if came {
            self.called = None;
        }
        came
    }

    fn send(&self, message: Vec<u8>, priority: u32, how: How) -> Reply {
        let sent = match self.wait(how, self.is_full()) {
            Ok(wait) => self.queue.send_with(message, priority, wait),
            Err(refused) => {
                let errno = match self.kernel {
                    Some(queue) => refused.send(queue, &message, priority),
                    None => refused.errno,
                };
                return Reply::Refused(message, errno);
            }
        };
        match sent {
            Ok(()) => Reply::Sent,
            Err(error) => {
                let errno = error.errno();
                Reply::Refused(error.value, errno)
            }
        }
    }

    fn receive(&self, how: How) -> Reply {
        let received = match self.wait(how, self.len() == 0) {
            Ok(wait) => self.queue.receive_with(wait).map_err(|error| error.errno()),
            Err(refused) => Err(match self.kernel {
                Some(queue) => refused.receive(queue, self.queue.attributes().max_message_bytes),
                None => refused.errno,
            }),
        };
        match received {
            Ok(message) => Reply::Received(message),
            Err(errno) => Reply::Nothing(errno),
        }
    }

    fn wait(&self, how: How, would_wait: bool) -> Result<Wait, RefusedTime> {
        let short = |realtime| match realtime {
            true => Wait::until(SystemTime::now() + SHORT),
            false => Wait::until(Instant::now() + SHORT),
        };
        Ok(match how {
            How::Now => Wait::NO,
            How::Patient if would_wait => short(false),
            How::Patient => Wait::FOREVER,
            How::Past { realtime: true } => Wait::until(SystemTime::UNIX_EPOCH),
            How::Past { realtime: false } => Wait::at_most(Duration::ZERO),
            How::Short { realtime } => short(realtime),
            How::Timespec { seconds, nanoseconds } => {
                let deadline = Deadline::realtime(seconds, nanoseconds).map_err(|error| {
                    let time = libc::timespec { tv_sec: seconds, tv_nsec: nanoseconds };
                    RefusedTime { time, errno: error.errno() }
                })?;
                if would_wait && !deadline.is_over() { Wait::NO } else { Wait::until(deadline) }
            }
        })
    }

    /// Each waiting receiver gets one message, in the order of arrival.
    fn hand_over(&self, messages: &[Message], replies: &mut Vec<Reply>) {
        let queue = self.queue;
        thread::scope(|scope| {
            let mut waiting: VecDeque<_> = messages
                .iter()
                .map(|_| {
                    asleep(scope, move || match queue.receive_with(Wait::at_most(LONG)) {
                        Ok(message) => Reply::Received(message),
                        Err(error) => Reply::Nothing(error.errno()),
                    })
                })
                .collect();
            for (message, priority) in messages {
                replies.push(self.send(message.clone(), *priority, How::Now));
                replies.push(waiting.pop_front().unwrap().join().unwrap());
            }
        });
    }

    /// Each waiting sender sends in its turn, as messages are received.
    fn take_over(&self, messages: &[Message], replies: &mut Vec<Reply>) {
        let queue = self.queue;
        thread::scope(|scope| {
            let mut waiting: VecDeque<_> = messages
                .iter()
                .map(|(message, priority)| {
                    let message = message.clone();
                    asleep(scope, move || {
                        match queue.send_with(message, *priority, Wait::at_most(LONG)) {
                            Ok(()) => Reply::Sent,
                            Err(error) => Reply::Refused(Vec::new(), error.errno()),
                        }
                    })
                })
                .collect();
            for _ in messages {
                replies.push(self.receive(How::Now));
                replies.push(waiting.pop_front().unwrap().join().unwrap());
            }
        });
    }
}

/// A deadline that our queue refuses as invalid, and the reason. The kernel must refuse it as well.
struct RefusedTime {
    time: libc::timespec,
    errno: i32,
}

impl RefusedTime {
    fn send(&self, queue: BorrowedFd<'_>, message: &[u8], priority: u32) -> i32 {
        let (bytes, len) = (message.as_ptr().cast(), message.len());
        // SAFETY: the message and the time outlive the call.
        errno(
            unsafe { libc::mq_timedsend(queue.as_raw_fd(), bytes, len, priority, &self.time) } == 0,
        )
    }

    fn receive(&self, queue: BorrowedFd<'_>, len: usize) -> i32 {
        let mut message = vec![0_u8; len];
        let (bytes, none) = (message.as_mut_ptr().cast(), ptr::null_mut());
        // SAFETY: the buffer has `len` bytes; it and the time outlive the call.
        errno(
            unsafe { libc::mq_timedreceive(queue.as_raw_fd(), bytes, len, none, &self.time) } >= 0,
        )
    }
}

/// Returns the errno of the preceding call; 0 if it succeeded.
fn errno(done: bool) -> i32 {
    if done { 0 } else { io::Error::last_os_error().raw_os_error().unwrap() }
}
