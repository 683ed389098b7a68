//! Why a lock was not given.

use std::error::Error;
use std::fmt;
use std::io;

use crate::cpu::CpuId;

/// Why a slot was not locked. Nothing stays locked of what the call had to lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread holds a slot that was asked for. Only the `try_` methods say so: the others
    /// wait. `EAGAIN`.
    WouldBlock,
    /// Waiting could last for ever, because of what this thread holds itself: the slot it asks for,
    /// or one that must be locked later. Or because of a guard that was forgotten, by this thread or
    /// by one that has ended and whose id it has. `EDEADLK`.
    Deadlock,
    /// No slot for this CPU: not below the lock's `capacity`. `EINVAL`.
    NoSuchCpu(CpuId),
    /// A pair is two slots, and this one was named twice. `EINVAL`.
    SameSlot(CpuId),
}

impl LockError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::WouldBlock => libc::EAGAIN,
            Self::Deadlock => libc::EDEADLK,
            Self::NoSuchCpu(_) | Self::SameSlot(_) => libc::EINVAL,
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WouldBlock => f.write_str("another thread holds the slot"),
            Self::Deadlock => {
                f.write_str("this thread holds the slot, or one that must be locked after it")
            }
            Self::NoSuchCpu(cpu) => write!(f, "no slot for {cpu}"),
            Self::SameSlot(cpu) => write!(f, "a pair of {cpu} and itself"),
        }
    }
}

impl Error for LockError {}

impl From<LockError> for io::Error {
    fn from(error: LockError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_its_errno_and_its_line() {
        let cpu = CpuId::new(9);
        for (error, errno, says) in [
            (LockError::WouldBlock, libc::EAGAIN, "another thread holds the slot"),
            (
                LockError::Deadlock,
                libc::EDEADLK,
                "this thread holds the slot, or one that must be locked after it",
            ),
            (LockError::NoSuchCpu(cpu), libc::EINVAL, "no slot for cpu 9"),
            (LockError::SameSlot(cpu), libc::EINVAL, "a pair of cpu 9 and itself"),
        ] {
            assert_eq!((error.errno(), error.to_string().as_str()), (errno, says));
            assert_eq!(io::Error::from(error).raw_os_error(), Some(errno));
        }
    }
}
