//! The errors of a cache.

use std::io;

use thiserror::Error;

use crate::frames::MOST_FRAMES;
use crate::word::{MOST_PINS, SECTOR_BITS};

/// Returns the system's text of an errno.
pub(crate) fn system(errno: &i32) -> io::Error {
    io::Error::from_raw_os_error(*errno)
}

/// Why a get did not return a block.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GetError {
    /// The device has no such block. Nothing was allocated.
    #[error("block {block} is out of range: the device has {blocks} blocks")]
    OutOfRange {
        /// The block asked for.
        block: u64,
        /// The number of blocks of the device.
        blocks: u64,
    },
    /// The device failed. Nothing is cached, and the next get reads again.
    #[error("block {block}: {}", system(.errno))]
    Io {
        /// The errno of the device.
        errno: i32,
        /// The block asked for.
        block: u64,
    },
    /// The device ended inside the block, although it said that it is larger.
    #[error("block {block}: the device ended inside it")]
    ShortRead {
        /// The block asked for.
        block: u64,
    },
    /// The verifier refused what was read.
    #[error("block {block}: the verifier refused it")]
    Verify {
        /// The block asked for.
        block: u64,
    },
    /// The device or the verifier panicked in the thread that read the block.
    #[error("block {block}: reading it panicked")]
    Panicked {
        /// The block asked for.
        block: u64,
    },
    /// The call would have to wait, and was asked not to.
    #[error("the call would have to wait")]
    WouldBlock,
    /// No buffer became free for as long as the cache waits for one: each was in use,
    /// or dirty and could not be written.
    #[error("no buffer became free for as long as the cache waits")]
    NoFreeBuffers,
    /// Another thread wrote the block, or read the block that this call was to write, for as long
    /// as the cache waits.
    #[error("the block was in use for as long as the cache waits")]
    Busy,
    /// This thread would wait for itself: it has a guard of the block; or reads it, as a verifier or device that
    /// gets the block it is called for; or has [claimed](crate::Device::claim) it and not ended the load for as
    /// long as the cache waits; or has an operation in its [engine](crate::lend_engine) while the block is in
    /// an engine, too.
    #[error("this thread uses the block or its engine, so it would wait for itself")]
    WouldDeadlock,
    /// A sync of the device failed, and the device was not [reset](crate::Device::reset) since.
    /// Nothing is written to it, and blocks that it may have lost are not read from it.
    #[error("a sync of the device failed: {}", system(.errno))]
    Poisoned {
        /// The errno of the device.
        errno: i32,
    },
    /// The device was closed, or is [being closed](crate::Device::close), and the block was asked
    /// for to write it.
    #[error("the device was closed")]
    Closed,
    /// The device [cannot be written](crate::BlockDevice::is_read_only), and the block was asked
    /// for to write it.
    #[error("the device is read-only")]
    ReadOnly,
    /// The buffer has 65,535 pins.
    #[error("the buffer has {MOST_PINS} pins, the most possible")]
    TooManyPins,
    /// There is no memory for hazard slots of this thread, or for a task that waits.
    #[error("no memory for hazard slots of this thread, or for a task that waits")]
    NoMemory,
}

impl GetError {
    /// Returns whether the error is of a read of the device.
    pub(crate) fn is_of_a_read(&self) -> bool {
        use GetError::{Io, Panicked, ShortRead, Verify};
        matches!(self, Io { .. } | ShortRead { .. } | Verify { .. } | Panicked { .. })
    }

    /// Returns the errno that fits the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::OutOfRange { .. } => libc::EINVAL,
            Self::Io { errno, .. } | Self::Poisoned { errno } => *errno,
            Self::Busy => libc::ETIMEDOUT,
            Self::WouldDeadlock => libc::EDEADLK,
            Self::Closed => libc::EBADF,
            Self::ReadOnly => libc::EROFS,
            Self::ShortRead { .. } | Self::Panicked { .. } => libc::EIO,
            Self::Verify { .. } => libc::EUCLEAN,
            Self::WouldBlock => libc::EAGAIN,
            Self::NoFreeBuffers => libc::ENOBUFS,
            Self::TooManyPins => libc::EOVERFLOW,
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl From<GetError> for io::Error {
    fn from(error: GetError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}

impl From<offlock_percpu::AllocError> for GetError {
    fn from(_: offlock_percpu::AllocError) -> Self {
        Self::NoMemory
    }
}

/// Why a load failed: an errno, or one of the codes below. The header of the frame keeps it for the
/// threads that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure(pub(crate) i32);

impl Failure {
    pub(crate) const SHORT: Self = Self(-1);
    pub(crate) const VERIFY: Self = Self(-2);
    pub(crate) const PANICKED: Self = Self(-3);
    pub(crate) const NO_MEMORY: Self = Self(-4);
    pub(crate) const CLOSED: Self = Self(-5);

    pub(crate) fn of(self, block: u64) -> GetError {
        match self {
            Self::SHORT => GetError::ShortRead { block },
            Self::VERIFY => GetError::Verify { block },
            Self::PANICKED => GetError::Panicked { block },
            Self::NO_MEMORY => GetError::NoMemory,
            Self::CLOSED => GetError::Closed,
            Self(errno) => GetError::Io { errno, block },
        }
    }
}

/// Why a cache was not built, or why a device was not attached to it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The block size is not a power of two from 512 to 65,536.
    #[error("a block size of {0} bytes is not a power of two from 512 to 65,536")]
    BlockSize(usize),
    /// The capacity is less than one block, or more than 2^29 - 1 blocks.
    #[error("a capacity of {0} bytes is not possible: at least one block, at most {MOST_FRAMES}")]
    Capacity(usize),
    /// There is no memory for the cache.
    #[error("no memory for the cache")]
    NoMemory,
    /// The cache has 65,535 devices, the most possible.
    #[error("the cache has 65,535 devices, the most possible")]
    TooManyDevices,
    /// The device, of this many bytes, has more than 2^48 sectors of 512 bytes.
    #[error("a device of {0} bytes is too large: at most 2^{SECTOR_BITS} sectors of 512 bytes")]
    DeviceTooLarge(u64),
    /// The block size is not a multiple of the device's alignment.
    #[error(
        "a block size of {block_size} bytes is not a multiple of the device's alignment, {alignment} bytes"
    )]
    Misaligned {
        /// The block size of the cache in bytes.
        block_size: usize,
        /// The alignment of the device in bytes.
        alignment: usize,
    },
    /// [The same](crate::BlockDevice::identity) file or device is attached already, and its blocks
    /// would be cached twice: clone the existing handle. It is attached until its last handle, guard and pin is
    /// dropped or it is [closed](crate::Device::close), and none of its operations is in flight. The drop of the
    /// last handle waits for these as long as the cache waits for a buffer.
    #[error("the device is attached already")]
    Attached,
}

impl BuildError {
    /// Returns the errno that fits the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::BlockSize(_) | Self::Capacity(_) | Self::Misaligned { .. } => libc::EINVAL,
            Self::NoMemory => libc::ENOMEM,
            Self::TooManyDevices => libc::EMFILE,
            Self::DeviceTooLarge(_) => libc::EFBIG,
            Self::Attached => libc::EBUSY,
        }
    }
}

impl From<BuildError> for io::Error {
    fn from(error: BuildError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}
