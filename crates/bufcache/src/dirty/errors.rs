//! The errors of writes, flushes and syncs.

use std::error::Error;
use std::fmt;
use std::io;

use crate::error::GetError;

/// Returns the errno of an error that a device or a log returned: that of the system, or that of an
/// error of this crate, which a device on another one passes on; otherwise `EIO`. An errno of a
/// failed call is positive: 0 would count as success.
pub(crate) fn errno_of(error: &io::Error) -> i32 {
    let ours = || {
        let ours = error.get_ref()?;
        let of_write = || ours.downcast_ref().map(WriteError::errno);
        ours.downcast_ref().map(GetError::errno).or_else(of_write)
    };
    error.raw_os_error().or_else(ours).filter(|&errno| errno > 0).unwrap_or(libc::EIO)
}

/// Why a write, a flush, a sync or a close failed. Blocks that could not be written stay dirty and
/// are never dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteError {
    /// The device refused a block. The block stays dirty, and the next flush tries again.
    Io {
        /// The errno of the device.
        errno: i32,
        /// The block.
        block: u64,
    },
    /// A write of any handle failed since this handle last asked.
    Earlier {
        /// The errno of the last failed write.
        errno: i32,
    },
    /// `before_write` refused the block. The block was not written and stays dirty.
    Verify {
        /// The block.
        block: u64,
    },
    /// The device or a callback panicked. The block stays dirty.
    Panicked {
        /// The block.
        block: u64,
    },
    /// The log could not be flushed up to the position of the block, which stays dirty.
    Wal {
        /// The errno of the log.
        errno: i32,
        /// The block.
        block: u64,
    },
    /// The block was written or read for as long as the cache waits. It stays dirty.
    Busy {
        /// The block.
        block: u64,
    },
    /// This thread has a guard of the block, or an operation in its [engine](crate::lend_engine) while
    /// a change of the device is in an engine, too: it would wait for itself.
    WouldDeadlock {
        /// The block of the guard.
        block: Option<u64>,
    },
    /// A sync or a durable write of the device failed, now or since the last
    /// [`reset`](crate::Device::reset). Writes since the last good sync may be lost.
    Poisoned {
        /// The errno of the device.
        errno: i32,
    },
    /// The device was closed, or is [being closed](crate::Device::close), and the call would change
    /// it.
    Closed,
    /// The device [cannot be written](crate::BlockDevice::is_read_only).
    ReadOnly,
    /// The range ends beyond the end of the device.
    OutOfRange,
    /// A block that is to be written in part could not be loaded.
    Get(GetError),
    /// There is no memory for the list of blocks to write.
    NoMemory,
}

impl WriteError {
    /// Converts the error of a wait for that block.
    pub(crate) fn of_wait(error: GetError, block: u64) -> Self {
        match error {
            GetError::Busy => Self::Busy { block },
            GetError::WouldDeadlock => Self::WouldDeadlock { block: Some(block) },
            other => other.into(),
        }
    }

    /// Returns the errno that fits the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Io { errno, .. }
            | Self::Earlier { errno }
            | Self::Wal { errno, .. }
            | Self::Poisoned { errno } => *errno,
            Self::Verify { .. } => libc::EUCLEAN,
            Self::Panicked { .. } => libc::EIO,
            Self::Busy { .. } => libc::ETIMEDOUT,
            Self::WouldDeadlock { .. } => libc::EDEADLK,
            Self::Closed => libc::EBADF,
            Self::ReadOnly => libc::EROFS,
            Self::OutOfRange => libc::EINVAL,
            Self::Get(error) => error.errno(),
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = |errno: &i32| io::Error::from_raw_os_error(*errno);
        match self {
            Self::Io { errno, block } => write!(f, "writing block {block}: {}", system(errno)),
            Self::Earlier { errno } => write!(f, "an earlier write failed: {}", system(errno)),
            Self::Verify { block } => write!(f, "`before_write` refused block {block}"),
            Self::Panicked { block } => write!(f, "writing block {block} panicked"),
            Self::Wal { errno, block } => {
                write!(f, "flushing the log for block {block}: {}", system(errno))
            }
            Self::Busy { block } => {
                write!(f, "block {block} was in use for as long as the cache waits")
            }
            Self::WouldDeadlock { block: Some(block) } => {
                write!(f, "this thread uses block {block}, so it would wait for itself")
            }
            Self::WouldDeadlock { block: None } => {
                f.write_str("an operation in this thread's engine would wait for the thread")
            }
            Self::Poisoned { errno } => {
                write!(f, "a sync failed, so earlier writes may be lost: {}", system(errno))
            }
            Self::Closed => f.write_str("the device was closed"),
            Self::ReadOnly => f.write_str("the device is read-only"),
            Self::OutOfRange => f.write_str("the range ends beyond the end of the device"),
            Self::Get(error) => error.fmt(f),
            Self::NoMemory => f.write_str("no memory for the list of blocks to write"),
        }
    }
}

impl Error for WriteError {}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}

impl From<GetError> for WriteError {
    fn from(error: GetError) -> Self {
        match error {
            GetError::Poisoned { errno } => Self::Poisoned { errno },
            GetError::Closed => Self::Closed,
            GetError::ReadOnly => Self::ReadOnly,
            GetError::OutOfRange { .. } => Self::OutOfRange,
            other => Self::Get(other),
        }
    }
}
