//! One interface over the kernel's POSIX queue and ours.

use std::io;

use crate::core::Bitmap;
use crate::deadline::Wait;
use crate::error::{NotifyError, ReceiveError, SendError};
use crate::queue::Queue;

/// Called once when a queue stops being empty. It runs on whatever thread the queue has for it: the
/// sender's, behind the send, or one of its own.
pub type Callback = Box<dyn FnOnce() + Send>;

/// What a queue was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The most messages at one time.
    pub max_messages: usize,
    /// The most bytes in one message.
    pub max_message_bytes: usize,
}

/// A POSIX message queue: this process's own, or, with the feature `kernel`, the kernel's.
///
/// Of what is wrong with a send the first of this list is told: the priority, the length, no room.
pub trait MessageQueue: Send + Sync {
    /// Sends a message: it is received before those of a lower priority, after older ones of the
    /// same.
    ///
    /// # Errors
    ///
    /// [`SendError`] has the message, and says why; `EAGAIN` ([`Full`](crate::SendRefused::Full))
    /// only with [`Wait::NO`].
    fn send_with(
        &self,
        message: Vec<u8>,
        priority: u32,
        wait: Wait,
    ) -> Result<(), SendError<Vec<u8>>>;

    /// Receives the oldest message of the highest priority, and that.
    ///
    /// # Errors
    ///
    /// `EAGAIN` ([`Empty`](ReceiveError::Empty)) only with [`Wait::NO`].
    fn receive_with(&self, wait: Wait) -> Result<(Vec<u8>, u32), ReceiveError>;

    /// The number of messages, of a moment ago.
    ///
    /// # Errors
    ///
    /// What the kernel says; a [`Queue`](crate::Queue) has none.
    fn len(&self) -> io::Result<usize>;

    /// Whether there was no message a moment ago.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// What the queue was made for.
    fn attributes(&self) -> Attributes;

    /// Registers a callback for the next send to an empty queue for which nobody waits. That ends
    /// the registration. What is in the queue now does not count.
    ///
    /// # Errors
    ///
    /// [`NotifyError`] has the callback, and says why; `EBUSY` if one is registered.
    fn notify(&self, callback: Callback) -> Result<(), NotifyError<Callback>>;

    /// Ends the registration, if there is one. A callback that was called for is not stopped.
    fn cancel_notify(&self);
}

/// Messages have a length if the queue measures them: a [`Builder`](crate::Builder) with
/// `measure(Vec::len)` and `max_message_bytes`.
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
