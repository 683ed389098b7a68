//! Errors of opening a kernel queue.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;

use super::limits::{self, HARD_MESSAGE_BYTES, HARD_MESSAGES};
use crate::posix::Attributes;

/// A value above a limit, in an [`OpenError`].
///
/// ```
/// use mq_rbtree::{Attributes, Exceeded, KernelQueue, OpenError};
///
/// let wanted = Attributes { max_messages: 8, max_message_bytes: 1 << 30 };
/// match KernelQueue::new(wanted).map(drop).unwrap_err() {
///     OpenError::MessageTooLong(Exceeded { asked, limit, .. }) => {
///         assert_eq!((asked, limit), (1 << 30, 16 << 20));
///     }
///     other => panic!("{other}"),
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exceeded {
    /// The requested value.
    pub asked: u64,
    /// The limit at that moment.
    pub limit: u64,
}

/// A kernel queue was not made, opened or unlinked.
///
/// `mq_open` returns one errno for several limits. This error names the limit, and its text tells
/// how to raise it.
///
/// ```
/// use mq_rbtree::{Attributes, KernelQueue, OpenError};
///
/// let wanted = Attributes { max_messages: 100_000, max_message_bytes: 16 };
/// let error = KernelQueue::new(wanted).map(drop).unwrap_err();
/// let OpenError::TooManyMessages(exceeded) = error else { panic!("{error}") };
/// assert_eq!((exceeded.asked, exceeded.limit), (100_000, 65_536));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// More messages than `/proc/sys/fs/mqueue/msg_max`, or than the 65,536 that no setting raises.
    /// Maps to `EINVAL`.
    TooManyMessages(Exceeded),
    /// Longer messages than `/proc/sys/fs/mqueue/msgsize_max`, or than the 16 MiB that no setting
    /// raises. Maps to `EINVAL`.
    MessageTooLong(Exceeded),
    /// More bytes than this user may have in queues (`RLIMIT_MSGQUEUE`), or has left beside other
    /// queues. A queue counts with all that it may hold, and up to 96 bytes more for each message.
    /// Maps to `EMFILE`.
    TooManyBytes(Exceeded),
    /// The process has no descriptor left (`RLIMIT_NOFILE`); a queue takes two. Maps to `EMFILE`.
    TooManyDescriptors {
        /// The limit at that moment.
        limit: u64,
    },
    /// The system has as many queues as `/proc/sys/fs/mqueue/queues_max` allows. Maps to `ENOSPC`.
    TooManyQueues {
        /// The limit at that moment.
        limit: u64,
    },
    /// The queue would hold no messages, or only empty ones. Maps to `EINVAL`.
    NoRoom,
    /// The name is not a `/` and 1 to 255 bytes without `/` and NUL. Maps to `EINVAL`.
    BadName,
    /// A queue of that name exists. Maps to `EEXIST`.
    Exists,
    /// No queue of that name exists. Maps to `ENOENT`.
    NotFound,
    /// The queue belongs to another user. Maps to `EACCES`.
    Denied,
    /// Memory is exhausted. Maps to `ENOMEM`.
    NoMemory,
    /// Another errno. It is `ENOSYS` if the kernel was built without POSIX queues.
    System(i32),
}

impl OpenError {
    /// Converts an errno of `mq_open` that was to create a queue.
    pub(super) fn of_create(errno: i32, asked: Attributes) -> Self {
        let messages = asked.max_messages as u64;
        let bytes = asked.max_message_bytes as u64;
        match errno {
            libc::EINVAL => None
                .or_else(|| exceeds(messages, HARD_MESSAGES).map(Self::TooManyMessages))
                .or_else(|| exceeds(bytes, HARD_MESSAGE_BYTES).map(Self::MessageTooLong))
                .or_else(|| {
                    exceeds(messages, limits::setting("msg_max")?).map(Self::TooManyMessages)
                })
                .or_else(|| {
                    exceeds(bytes, limits::setting("msgsize_max")?).map(Self::MessageTooLong)
                })
                .unwrap_or(Self::System(errno)),
            libc::EMFILE if !limits::out_of_descriptors() => {
                let asked = limits::charge(asked);
                limits::rlimit(libc::RLIMIT_MSGQUEUE as i32).map_or(Self::System(errno), |limit| {
                    Self::TooManyBytes(Exceeded { asked, limit })
                })
            }
            libc::ENOSPC => limits::setting("queues_max")
                .map_or(Self::System(errno), |limit| Self::TooManyQueues { limit }),
            _ => Self::of_open(errno),
        }
    }

    /// Converts an errno of `mq_open` or `mq_unlink` for an existing queue.
    pub(super) fn of_open(errno: i32) -> Self {
        match errno {
            libc::EMFILE => limits::rlimit(libc::RLIMIT_NOFILE as i32)
                .map_or(Self::System(errno), |limit| Self::TooManyDescriptors { limit }),
            libc::EEXIST => Self::Exists,
            libc::ENOENT => Self::NotFound,
            libc::EACCES | libc::EPERM => Self::Denied,
            libc::ENOMEM => Self::NoMemory,
            _ => Self::System(errno),
        }
    }

    /// Returns the errno.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::TooManyMessages(_) | Self::MessageTooLong(_) | Self::NoRoom | Self::BadName => {
                libc::EINVAL
            }
            Self::TooManyBytes(_) | Self::TooManyDescriptors { .. } => libc::EMFILE,
            Self::TooManyQueues { .. } => libc::ENOSPC,
            Self::Exists => libc::EEXIST,
            Self::NotFound => libc::ENOENT,
            Self::Denied => libc::EACCES,
            Self::NoMemory => libc::ENOMEM,
            Self::System(errno) => *errno,
        }
    }
}

fn exceeds(asked: u64, limit: u64) -> Option<Exceeded> {
    (asked > limit).then_some(Exceeded { asked, limit })
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TooManyMessages(Exceeded { asked, limit: HARD_MESSAGES }) => write!(
                f,
                "{asked} messages were asked for; the kernel allows {HARD_MESSAGES} at most, and \
                 no setting raises that"
            ),
            Self::TooManyMessages(Exceeded { asked, limit }) => write!(
                f,
                "{asked} messages were asked for, and /proc/sys/fs/mqueue/msg_max is {limit}: \
                 raise it, as root, with `sysctl fs.mqueue.msg_max={asked}`"
            ),
            Self::MessageTooLong(Exceeded { asked, limit: HARD_MESSAGE_BYTES }) => write!(
                f,
                "messages of {asked} bytes were asked for; the kernel allows {HARD_MESSAGE_BYTES} \
                 at most, and no setting raises that"
            ),
            Self::MessageTooLong(Exceeded { asked, limit }) => write!(
                f,
                "messages of {asked} bytes were asked for, and /proc/sys/fs/mqueue/msgsize_max is \
                 {limit}: raise it, as root, with `sysctl fs.mqueue.msgsize_max={asked}`"
            ),
            Self::TooManyBytes(Exceeded { asked, limit }) => write!(
                f,
                "the queue counts as {asked} bytes, and RLIMIT_MSGQUEUE is {limit} for all queues \
                 of this user: raise it with `ulimit -q` (bash), `prlimit --msgqueue=` or, in a \
                 service, `LimitMSGQUEUE=`"
            ),
            Self::TooManyDescriptors { limit } => write!(
                f,
                "a queue takes two descriptors, and RLIMIT_NOFILE is {limit} for this process: \
                 raise it with `ulimit -n`, `prlimit --nofile=` or, in a service, `LimitNOFILE=`"
            ),
            Self::TooManyQueues { limit } => write!(
                f,
                "there are as many queues as /proc/sys/fs/mqueue/queues_max allows, {limit}: raise \
                 it, as root, with `sysctl fs.mqueue.queues_max=`, or remove some in /dev/mqueue"
            ),
            Self::NoRoom => {
                f.write_str("a queue needs room for at least 1 message of at least 1 byte")
            }
            Self::BadName => f.write_str(
                "a queue's name must be a slash and 1 to 255 bytes without slash and NUL",
            ),
            Self::Exists => f.write_str("there is a queue of that name"),
            Self::NotFound => f.write_str("there is no queue of that name"),
            Self::Denied => f.write_str("that is another user's queue"),
            Self::NoMemory => AllocError::new().fmt(f),
            Self::System(libc::ENOSYS) => f.write_str("this kernel was built without POSIX queues"),
            Self::System(errno) => io::Error::from_raw_os_error(errno).fmt(f),
        }
    }
}

impl Error for OpenError {}

impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
