//! One interface over the kernel's POSIX queue and the queue of this crate.

use std::io;

use crate::core::Bitmap;
use crate::deadline::Wait;
use crate::error::{NotifyError, ReceiveError, SendError};
use crate::queue::Queue;

/// A callback that is called once when a queue stops being empty.
///
/// [`Queue`] calls it on the sender's thread, after the send. `KernelQueue` calls it on a thread of
/// its own.
///
/// ```
/// use mq_rbtree::{Callback, MessageQueue, Queue};
///
/// let queue: Queue<Vec<u8>> = Queue::new(8)?;
/// let callback: Callback = Box::new(|| println!("a message came"));
/// MessageQueue::notify(&queue, callback).unwrap();
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub type Callback = Box<dyn FnOnce() + Send>;

/// The limits of a POSIX message queue.
///
/// ```
/// use mq_rbtree::{Attributes, MessageQueue, Queue};
///
/// let queue: Queue<Vec<u8>> =
///     Queue::builder(8).measure(Vec::len).max_message_bytes(256).build()?;
/// let Attributes { max_messages, max_message_bytes } = queue.attributes();
/// assert_eq!((max_messages, max_message_bytes), (8, 256));
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The most messages at one time.
    pub max_messages: usize,
    /// The most bytes in one message.
    pub max_message_bytes: usize,
}

/// A POSIX message queue: one of this process, or, with the feature `kernel`, one of the kernel.
///
/// If a send has several faults, the error names the first of this list: the priority, the length,
/// no room.
///
/// ```
/// use mq_rbtree::{MessageQueue, Queue, ReceiveError, Wait};
///
/// fn echo(queue: &dyn MessageQueue) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
///     queue.send_with(b"ping".to_vec(), 7, Wait::NO)?;
///     let (message, priority) = queue.receive_with(Wait::NO)?;
///     assert_eq!((priority, queue.is_empty()?), (7, true));
///     Ok(message)
/// }
///
/// let ours: Queue<Vec<u8>> = Queue::builder(8).measure(Vec::len).max_message_bytes(256).build()?;
/// assert_eq!(echo(&ours)?, b"ping"); // a `KernelQueue` works as well
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait MessageQueue: Send + Sync {
    /// Sends a message. It is received before messages of lower priority, and after older messages
    /// of equal priority.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason. `EAGAIN`
    /// ([`Full`](crate::SendRefused::Full)) occurs only with [`Wait::NO`].
    fn send_with(
        &self,
        message: Vec<u8>,
        priority: u32,
        wait: Wait,
    ) -> Result<(), SendError<Vec<u8>>>;

    /// Receives the oldest message of the highest priority, with its priority.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`]. `EAGAIN` ([`Empty`](ReceiveError::Empty)) occurs only with [`Wait::NO`].
    fn receive_with(&self, wait: Wait) -> Result<(Vec<u8>, u32), ReceiveError>;

    /// Returns the number of messages at some moment during the call.
    ///
    /// # Errors
    ///
    /// The error of the kernel. A [`Queue`](crate::Queue) has none.
    fn len(&self) -> io::Result<usize>;

    /// Returns whether there was no message at some moment during the call.
    ///
    /// # Errors
    ///
    /// As for [`len`](Self::len).
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Returns the limits of the queue.
    fn attributes(&self) -> Attributes;

    /// Registers a callback for the next send to an empty queue without a waiting receiver.
    ///
    /// The call ends the registration. Messages that are in the queue now do not count.
    ///
    /// # Errors
    ///
    /// [`NotifyError`] carries the callback and the reason; `EBUSY` if a callback is registered.
    fn notify(&self, callback: Callback) -> Result<(), NotifyError<Callback>>;

    /// Ends the registration, if there is one. It does not stop a callback that has been triggered.
    fn cancel_notify(&self);
}

/// The queue knows the length of its messages if it measures them: use a
/// [`Builder`](crate::Builder) with `measure(Vec::len)` and `max_message_bytes`.
impl MessageQueue for Queue<Vec<u8>, Bitmap> {
    fn send_with(
        &self,
        message: Vec<u8>,
        priority: u32,
        wait: Wait,
    ) -> Result<(), SendError<Vec<u8>>> {
        Queue::send_with(self, message, priority, wait)
    }

    fn receive_with(&self, wait: Wait) -> Result<(Vec<u8>, u32), ReceiveError> {
        Queue::receive_with(self, wait)
    }

    fn len(&self) -> io::Result<usize> {
        Ok(Queue::len(self))
    }

    fn attributes(&self) -> Attributes {
        Attributes {
            max_messages: self.max_messages(),
            max_message_bytes: self.max_message_bytes(),
        }
    }

    fn notify(&self, callback: Callback) -> Result<(), NotifyError<Callback>> {
        Queue::notify(self, callback)
    }

    fn cancel_notify(&self) {
        Queue::cancel_notify(self);
    }
}
