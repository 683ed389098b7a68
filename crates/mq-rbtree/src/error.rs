//! What is refused, and why; with what was to be done with it.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;

/// Why a message was not sent. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendRefused {
    /// There is no room, and the caller does not wait. Maps to `EAGAIN`.
    Full,
    /// There was no room until the deadline. Maps to `ETIMEDOUT`.
    Timeout,
    /// The queue is closed, or its last receiver was dropped. Maps to `ESHUTDOWN`.
    Closed,
    /// The message has more bytes than one may have. Maps to `EMSGSIZE`.
    TooLong,
    /// There is no such priority. Maps to `EINVAL`.
    BadPriority,
    /// Out of memory. Maps to `ENOMEM`.
    NoMemory,
    /// The kernel gave another error: that is its number.
    #[cfg(feature = "kernel")]
    System(i32),
}

/// Why no message was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReceiveError {
    /// There is no message, and the caller does not wait. Maps to `EAGAIN`.
    Empty,
    /// There was no message until the deadline. Maps to `ETIMEDOUT`.
    Timeout,
    /// There is no message, and none will come: the queue is closed, or its last sender was dropped.
    /// Maps to `ESHUTDOWN`.
    Closed,
    /// No memory for the longest message that may come. Maps to `ENOMEM`.
    #[cfg(feature = "kernel")]
    NoMemory,
    /// The kernel gave another error: that is its number.
    #[cfg(feature = "kernel")]
    System(i32),
}

/// Why a queue was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildError {
    /// No message would fit, or more than 2^32 - 64 were asked for; or the reserves leave no room to
    /// other messages. Maps to `EINVAL`.
    Limits,
    /// A reserve was asked for a priority that there is not. Maps to `EINVAL`.
    BadPriority,
    /// The quota has not so many bytes left. Maps to `EMFILE`.
    Quota {
        /// Bytes that the queue needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// Out of memory. Maps to `ENOMEM`.
    NoMemory,
}

impl SendRefused {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Full => libc::EAGAIN,
            Self::Timeout => libc::ETIMEDOUT,
            Self::Closed => libc::ESHUTDOWN,
            Self::TooLong => libc::EMSGSIZE,
            Self::BadPriority => libc::EINVAL,
            Self::NoMemory => libc::ENOMEM,
            #[cfg(feature = "kernel")]
            Self::System(errno) => *errno,
        }
    }
}

impl ReceiveError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Empty => libc::EAGAIN,
            Self::Timeout => libc::ETIMEDOUT,
            Self::Closed => libc::ESHUTDOWN,
            #[cfg(feature = "kernel")]
            Self::NoMemory => libc::ENOMEM,
            #[cfg(feature = "kernel")]
            Self::System(errno) => *errno,
        }
    }
}

impl NotifyRefused {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Busy => libc::EBUSY,
            Self::Closed => libc::ESHUTDOWN,
            #[cfg(feature = "kernel")]
            Self::System(errno) => *errno,
        }
    }
}

impl BuildError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Limits | Self::BadPriority => libc::EINVAL,
            Self::Quota { .. } => libc::EMFILE,
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl fmt::Display for SendRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the queue is full",
            Self::Timeout => "the queue was full until the deadline",
            Self::Closed => "the queue is closed",
            Self::TooLong => "the message is too long",
            Self::BadPriority => "there is no such priority",
            Self::NoMemory => "out of memory",
            #[cfg(feature = "kernel")]
            Self::System(errno) => return io::Error::from_raw_os_error(*errno).fmt(f),
        })
    }
}

impl fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the queue is empty",
            Self::Timeout => "the queue was empty until the deadline",
            Self::Closed => "the queue is empty and closed",
            #[cfg(feature = "kernel")]
            Self::NoMemory => "out of memory",
            #[cfg(feature = "kernel")]
            Self::System(errno) => return io::Error::from_raw_os_error(*errno).fmt(f),
        })
    }
}

impl fmt::Display for NotifyRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "a notification is registered already",
            Self::Closed => "the queue is closed",
            #[cfg(feature = "kernel")]
            Self::System(errno) => return io::Error::from_raw_os_error(*errno).fmt(f),
        })
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits => f.write_str("the limits leave no room for a message, or are too large"),
            Self::BadPriority => f.write_str("there is no such priority"),
            Self::Quota { needed, left } => {
                write!(f, "the queue needs {needed} bytes, and the quota has {left} left")
            }
            Self::NoMemory => f.write_str("out of memory"),
        }
    }
}

impl From<AllocError> for BuildError {
    fn from(_: AllocError) -> Self {
        Self::NoMemory
    }
}

macro_rules! impl_error {
    ($($name:ident)*) => {$(
        impl Error for $name {}

        impl From<$name> for io::Error {
            fn from(error: $name) -> Self {
                Self::from_raw_os_error(error.errno())
            }
        }
    )*};
}

impl_error!(SendRefused ReceiveError NotifyRefused BuildError BatchError);

/// A message that was not sent, and why.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SendError<T> {
    /// The message.
    pub value: T,
    /// Why it was not sent.
    pub reason: SendRefused,
}

/// Why a batch was not sent to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchError {
    /// Messages that were sent.
    pub sent: usize,
    /// Why the next one was not.
    pub reason: SendRefused,
}

impl BatchError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} messages", self.reason, self.sent)
    }
}

/// Why a notification was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotifyRefused {
    /// One is registered already. Maps to `EBUSY`.
    Busy,
    /// The queue is closed: no message will come. Maps to `ESHUTDOWN`.
    Closed,
    /// The system gave no thread or socket for it, or the kernel another error: that is its number.
    #[cfg(feature = "kernel")]
    System(i32),
}

/// A notification that was not registered, and why.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NotifyError<N> {
    /// What was to be called.
    pub callback: N,
    /// Why it will not be.
    pub reason: NotifyRefused,
}

impl<T> SendError<T> {
    /// The message that was not sent.
    pub fn into_inner(self) -> T {
        self.value
    }

    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }
}

impl<N> NotifyError<N> {
    /// The notification that was not registered.
    pub fn into_inner(self) -> N {
        self.callback
    }

    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }
}

/// Without what is given back, which need not be `Debug`.
impl<T> fmt::Debug for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<T> Error for SendError<T> {}

impl<T> From<SendError<T>> for io::Error {
    fn from(error: SendError<T>) -> Self {
        error.reason.into()
    }
}

/// Without what is given back, which need not be `Debug`.
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

impl<N> From<NotifyError<N>> for io::Error {
    fn from(error: NotifyError<N>) -> Self {
        error.reason.into()
    }
}
