//! One interface over the kernel's POSIX queue and ours.

use std::error::Error;
use std::fmt;
use std::io;

use crate::core::Bitmap;
use crate::deadline::Wait;
use crate::error::{Busy, ReceiveError, SendError};
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
    /// What the kernel says; `EOWNERDEAD` in a fork child whose parent waited on a queue of ours.
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
    /// [`NotifyError`] has the callback; `EBUSY` if one is registered.
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
        Ok(Queue::len(self)?)
    }

    fn attributes(&self) -> Attributes {
        Attributes {
            max_messages: self.max_messages(),
            max_message_bytes: self.max_message_bytes(),
        }
    }

    fn notify(&self, callback: Callback) -> Result<(), NotifyError<Callback>> {
        Ok(Queue::notify(self, callback)?)
    }

    fn cancel_notify(&self) {
        Queue::cancel_notify(self);
    }
}

/// Why a callback was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotifyRefused {
    /// One is registered already. Maps to `EBUSY`.
    Busy,
    /// The system gave no thread or socket for it, or the kernel another error: that is its number.
    #[cfg(feature = "kernel")]
    System(i32),
}

impl NotifyRefused {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Busy => libc::EBUSY,
            #[cfg(feature = "kernel")]
            Self::System(errno) => *errno,
        }
    }
}

impl fmt::Display for NotifyRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => Busy(()).fmt(f),
            #[cfg(feature = "kernel")]
            Self::System(errno) => io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}

impl Error for NotifyRefused {}

/// A callback that was not registered, and why.
pub struct NotifyError<N> {
    /// What was to be called.
    pub callback: N,
    /// Why it will not be.
    pub reason: NotifyRefused,
}

impl<N> NotifyError<N> {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }
}

/// Without the callback, which need not be `Debug`.
impl<N> fmt::Debug for NotifyError<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotifyError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<N> fmt::Display for NotifyError<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<N> Error for NotifyError<N> {}

impl<N> From<Busy<N>> for NotifyError<N> {
    fn from(Busy(callback): Busy<N>) -> Self {
        Self { callback, reason: NotifyRefused::Busy }
    }
}

impl<N> From<NotifyError<N>> for io::Error {
    fn from(error: NotifyError<N>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
