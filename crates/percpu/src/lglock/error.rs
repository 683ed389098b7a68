//! The errors of an [`LgLock`](super::LgLock).

use crate::cpu::CpuId;
use crate::error::impl_error;

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
}

impl_error! {
    [] LockError {
        Self::WouldBlock => EAGAIN, "another thread holds the slot";
        Self::Deadlock => EDEADLK, "this thread holds the slot, or one that must be locked after it";
        Self::NoSuchCpu(cpu) => EINVAL, "no slot for {cpu}";
    }
}

#[cfg(test)]
mod tests;
