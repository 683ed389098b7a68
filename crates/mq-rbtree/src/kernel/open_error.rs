//! Errors of opening a kernel queue.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;

use super::limits::{self, HARD_MESSAGE_BYTES, HARD_MESSAGES};
use crate::error::{reasons, to_io_error};
use crate::posix::Attributes;

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
/// assert_eq!(error, OpenError::TooManyMessages { asked: 100_000, limit: 65_536 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// More messages than `/proc/sys/fs/mqueue/msg_max`, or than the 65,536 that no setting raises.
    /// Maps to `EINVAL`.
    TooManyMessages {
        /// The requested value.
        asked: u64,
        /// The limit at that moment.
        limit: u64,
    },
    /// Longer messages than `/proc/sys/fs/mqueue/msgsize_max`, or than the 16 MiB that no setting
    /// raises. Maps to `EINVAL`.
    MessageTooLong {
        /// The requested value.
        asked: u64,
        /// The limit at that moment.
        limit: u64,
    },
    /// More bytes than this user may have in queues (`RLIMIT_MSGQUEUE`), or has left beside other
    /// queues. A queue counts with all that it may hold, and up to 96 bytes more for each message.
    /// Maps to `EMFILE`.
    TooManyBytes {
        /// The requested value.
        asked: u64,
        /// The limit at that moment.
        limit: u64,
    },
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
    /// The kernel was built without POSIX queues. Maps to `ENOSYS`.
    Unsupported,
    /// Another errno.
    System(i32),
}

impl OpenError {
    /// Converts an errno of `mq_open` that was to create a queue.
    pub(super) fn of_create(errno: i32, asked: Attributes) -> Self {
        let messages = asked.max_messages as u64;
        let bytes = asked.max_message_bytes as u64;
        match errno {
            libc::EINVAL => {
                if let Some(limit) = exceeded(messages, HARD_MESSAGES, "msg_max") {
                    Self::TooManyMessages { asked: messages, limit }
                } else if let Some(limit) = exceeded(bytes, HARD_MESSAGE_BYTES, "msgsize_max") {
                    Self::MessageTooLong { asked: bytes, limit }
                } else {
                    Self::System(errno)
                }
            }
            libc::EMFILE if !limits::out_of_descriptors() => {
                let asked = limits::charge(asked);
                limits::rlimit(libc::RLIMIT_MSGQUEUE as i32)
                    .map_or(Self::System(errno), |limit| Self::TooManyBytes { asked, limit })
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
            libc::ENOSYS => Self::Unsupported,
            _ => Self::System(errno),
        }
    }
}

/// Returns the limit that a value is above: one that no setting raises, or the setting.
fn exceeded(asked: u64, hard: u64, setting: &str) -> Option<u64> {
    let limit = if asked > hard { hard } else { limits::setting(setting)? };
    (asked > limit).then_some(limit)
}

fn write_exceeded(
    f: &mut fmt::Formatter<'_>,
    what: fmt::Arguments<'_>,
    (asked, limit): (u64, u64),
    (hard, setting): (u64, &str),
) -> fmt::Result {
    if limit == hard {
        write!(
            f,
            "{what} were asked for; the kernel allows {hard} at most, and no setting raises that"
        )
    } else {
        write!(
            f,
            "{what} were asked for, and /proc/sys/fs/mqueue/{setting} is {limit}: raise it, as root, \
             with `sysctl fs.mqueue.{setting}={asked}`"
        )
    }
}

reasons! { OpenError(System): f;
    TooManyMessages { asked, limit } => EINVAL, write_exceeded(
        f, format_args!("{asked} messages"), (*asked, *limit), (HARD_MESSAGES, "msg_max"),
    );
    MessageTooLong { asked, limit } => EINVAL, write_exceeded(
        f, format_args!("messages of {asked} bytes"), (*asked, *limit),
        (HARD_MESSAGE_BYTES, "msgsize_max"),
    );
    TooManyBytes { asked, limit } => EMFILE, write!(
        f,
        "the queue counts as {asked} bytes, and RLIMIT_MSGQUEUE is {limit} for all queues of this \
         user: raise it with `ulimit -q` (bash), `prlimit --msgqueue=` or, in a service, \
         `LimitMSGQUEUE=`"
    );
    TooManyDescriptors { limit } => EMFILE, write!(
        f,
        "a queue takes two descriptors, and RLIMIT_NOFILE is {limit} for this process: raise it with \
         `ulimit -n`, `prlimit --nofile=` or, in a service, `LimitNOFILE=`"
    );
    TooManyQueues { limit } => ENOSPC, write!(
        f,
        "there are as many queues as /proc/sys/fs/mqueue/queues_max allows, {limit}: raise it, as \
         root, with `sysctl fs.mqueue.queues_max=`, or remove some in /dev/mqueue"
    );
    NoRoom => EINVAL, f.write_str("a queue needs room for at least 1 message of at least 1 byte");
    BadName => EINVAL,
        f.write_str("a queue's name must be a slash and 1 to 255 bytes without slash and NUL");
    Exists => EEXIST, f.write_str("there is a queue of that name");
    NotFound => ENOENT, f.write_str("there is no queue of that name");
    Denied => EACCES, f.write_str("that is another user's queue");
    NoMemory => ENOMEM, AllocError::new().fmt(f);
    Unsupported => ENOSYS, f.write_str("this kernel was built without POSIX queues");
}
