//! Errors: each tells what was refused and why, and returns what was passed in.

use std::error::Error;
use std::fmt;
use std::io;

use offlock_sync::AllocError;

use crate::core::{MAX_MESSAGES, PRIORITIES};

/// The reason why a message was not sent. The queue is unchanged.
///
/// ```
/// use mq_rbtree::{Queue, SendRefused};
///
/// let queue: Queue<&str> = Queue::new(1)?;
/// let refused = queue.try_send("a message", 40_000).unwrap_err();
/// assert_eq!(refused.reason, SendRefused::BadPriority { priority: 40_000 });
/// assert_eq!(refused.to_string(), "the priority is 40000; the highest is 32767");
/// queue.try_send(refused.value, 7)?;
/// assert_eq!(queue.try_send("another", 7).unwrap_err().reason, SendRefused::Full);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendRefused {
    /// There is no room, and the caller does not wait. Maps to `EAGAIN`.
    Full,
    /// There was no room until the deadline. Maps to `ETIMEDOUT`.
    Timeout,
    /// The queue is closed, or its last receiver was dropped. Maps to `ESHUTDOWN`.
    Closed,
    /// The priority is above 32,767. Maps to `EINVAL`.
    BadPriority {
        /// The priority of the message.
        priority: u32,
    },
    /// Memory is exhausted. Maps to `ENOMEM`.
    NoMemory,
}

// With a `u64` message, `Result<(), SendError>` fits in two registers. Measured: with a larger
// reason a send to a full queue takes 13 ns in place of 9.
const _: () = assert!(size_of::<SendRefused>() <= 8);

/// The reason why no message was received.
///
/// ```
/// use mq_rbtree::{Queue, ReceiveError};
///
/// let queue: Queue<&str> = Queue::new(1)?;
/// assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
/// queue.close();
/// assert_eq!(queue.receive(), Err(ReceiveError::Closed));
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReceiveError {
    /// There is no message, and the caller does not wait. Maps to `EAGAIN`.
    Empty,
    /// There was no message until the deadline. Maps to `ETIMEDOUT`.
    Timeout,
    /// There is no message and none will come: the queue is closed, or its last sender was dropped,
    /// and no message is in a guard. Maps to `ESHUTDOWN`.
    Closed,
    /// There is no memory for a [`MessageGuard`](crate::MessageGuard) of a queue with an
    /// [`RbTree`](crate::RbTree), or for the vector of a batch. Maps to `ENOMEM`.
    NoMemory,
}

/// The reason why a queue was not made.
///
/// ```
/// use mq_rbtree::{BuildError, Queue};
///
/// let error = Queue::<u8>::builder(10).reserve(100, 10).build().unwrap_err();
/// assert_eq!(error, BuildError::Limits { messages: 10, reserved: 10 });
/// assert_eq!(error.to_string(), "10 of 10 places are reserved; the others need at least 1");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildError {
    /// The most messages are 0 or above 2^32 - 64, or the reserves leave no place for other
    /// messages. Maps to `EINVAL`.
    Limits {
        /// The most messages, as configured.
        messages: usize,
        /// The places that all reserves take.
        reserved: usize,
    },
    /// A reserve is for a priority above 32,767. Maps to `EINVAL`.
    BadPriority {
        /// The priority of the reserve.
        priority: u32,
    },
    /// Memory is exhausted. Maps to `ENOMEM`.
    NoMemory,
}

/// Writes the errno and the text of each reason, and the conversion to an [`io::Error`].
macro_rules! reasons {
    ($name:ident: $f:ident; $(
        $reason:ident $({ $($field:ident),* })? => $errno:ident, $text:expr;
    )*) => {
        impl $name {
            /// Returns the errno.
            #[must_use]
            pub fn errno(&self) -> i32 {
                match self {
                    $(Self::$reason { .. } => libc::$errno,)*
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, $f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$reason $({ $($field),* })? => $text,)*
                }
            }
        }

        to_io_error!($name);
    };
}

macro_rules! to_io_error {
    ($name:ident $(: $field:ident)?) => {
        impl Error for $name {}

        impl From<$name> for io::Error {
            fn from(error: $name) -> Self {
                Self::from_raw_os_error(error$(.$field)?.errno())
            }
        }
    };
}

reasons! { SendRefused: f;
    Full => EAGAIN, f.write_str("the queue is full");
    Timeout => ETIMEDOUT, f.write_str("the queue was full until the deadline");
    Closed => ESHUTDOWN, f.write_str("the queue is closed");
    BadPriority { priority } => EINVAL, write_bad_priority(f, *priority);
    NoMemory => ENOMEM, AllocError::new().fmt(f);
}

reasons! { ReceiveError: f;
    Empty => EAGAIN, f.write_str("the queue is empty");
    Timeout => ETIMEDOUT, f.write_str("the queue was empty until the deadline");
    Closed => ESHUTDOWN, f.write_str("the queue is empty and closed");
    NoMemory => ENOMEM, AllocError::new().fmt(f);
}

reasons! { BuildError: f;
    Limits { messages, reserved } => EINVAL, match *messages {
        0 => f.write_str("the queue would hold 0 messages; it needs room for at least 1"),
        1..=MAX_MESSAGES => {
            write!(f, "{reserved} of {messages} places are reserved; the others need at least 1")
        }
        _ => write!(f, "the queue would hold {messages} messages; the most are {MAX_MESSAGES}"),
    };
    BadPriority { priority } => EINVAL, write_bad_priority(f, *priority);
    NoMemory => ENOMEM, AllocError::new().fmt(f);
}

fn write_bad_priority(f: &mut fmt::Formatter<'_>, priority: u32) -> fmt::Result {
    write!(f, "the priority is {priority}; the highest is {}", PRIORITIES - 1)
}

impl From<AllocError> for BuildError {
    fn from(_: AllocError) -> Self {
        Self::NoMemory
    }
}

to_io_error!(BatchError: reason);

/// A message that was not sent, and the reason.
///
/// ```
/// use mq_rbtree::{Queue, SendError, SendRefused};
///
/// let queue: Queue<String> = Queue::new(1)?;
/// queue.close();
/// let SendError { value, reason, .. } = queue.send("a message".to_string(), 7).unwrap_err();
/// assert_eq!((value.as_str(), reason), ("a message", SendRefused::Closed));
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SendError<T> {
    /// The message.
    pub value: T,
    /// The reason.
    pub reason: SendRefused,
}

/// A batch was not sent to its end: the messages that were not sent are still in it.
///
/// ```
/// use mq_rbtree::{BatchError, Queue, SendRefused};
///
/// let queue: Queue<&str> = Queue::new(1)?;
/// let mut batch = [("one", 1), ("two", 2)].into();
/// let BatchError { sent, reason, .. } = queue.try_send_batch(&mut batch).unwrap_err();
/// assert_eq!((sent, reason), (1, SendRefused::Full));
/// assert_eq!(batch, [("two", 2)]);
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchError {
    /// The number of messages that were sent.
    pub sent: usize,
    /// The reason why the next message was not sent.
    pub reason: SendRefused,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} messages", self.reason, self.sent)
    }
}

/// Writes the methods and traits of an error that gives back what was passed in.
macro_rules! gives_back {
    ($name:ident, $field:ident, $what:literal) => {
        impl<T> $name<T> {
            #[doc = concat!("Returns the ", $what, ".")]
            pub fn into_inner(self) -> T {
                self.$field
            }
        }

        #[doc = concat!("Omits the ", $what, ", which need not be `Debug`.")]
        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut debug = f.debug_struct(stringify!($name));
                debug.field("reason", &self.reason).finish_non_exhaustive()
            }
        }

        impl<T> fmt::Display for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.reason.fmt(f)
            }
        }

        impl<T> Error for $name<T> {}

        impl<T> From<$name<T>> for io::Error {
            fn from(error: $name<T>) -> Self {
                error.reason.into()
            }
        }
    };
}

pub(crate) use gives_back;

gives_back!(SendError, value, "message that was not sent");
