//! The errors of an [`LgLock`](super::LgLock).

use std::error::Error;
use std::fmt;
use std::io;

use crate::cpu::CpuId;

/// The error of a refused lock. The call leaves no slot locked that it has locked itself.
///
/// ```
/// use offlock_percpu::{CpuId, LgLock, LockError};
///
/// let lock = LgLock::new(|_cpu| 0);
/// let cpu = CpuId::new(0);
/// let guard = lock.local_on(cpu)?;
/// assert_eq!(lock.local_on(cpu).err(), Some(LockError::Deadlock)); // this thread holds the slot
/// std::thread::scope(|scope| {
///     scope.spawn(|| assert_eq!(lock.try_local_on(cpu).err(), Some(LockError::WouldBlock)));
/// });
/// drop(guard);
/// assert_eq!(lock.pair(cpu, cpu).err(), Some(LockError::SameSlot(cpu)));
/// # Ok::<(), LockError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread holds a slot that the call needs. Only the `try_` methods return this; the
    /// other methods wait. Maps to `EAGAIN`.
    WouldBlock,
    /// The wait could last for ever, because the calling thread holds the slot itself, or holds a
    /// slot that must be locked after it. Maps to `EDEADLK`.
    ///
    /// A forgotten guard counts as held. The kernel reuses thread ids, so a later thread with the
    /// id of the exited holder gets this error too.
    Deadlock,
    /// The CPU has no slot: its index is not below the lock's `capacity`. Maps to `EINVAL`.
    NoSuchCpu(CpuId),
    /// Both CPUs of a pair are this one. Maps to `EINVAL`.
    SameSlot(CpuId),
}

impl LockError {
    /// Returns the errno of this error: `EAGAIN`, `EDEADLK` or `EINVAL`.
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
            Self::SameSlot(cpu) => write!(f, "both slots of the pair are those of {cpu}"),
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
mod tests;
