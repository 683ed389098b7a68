//! The functions that wait for readers, and the cookies that poll for the end of a grace period.

use super::domain::{domain, init_domain};
use super::error::SynchronizeError;
use super::guard::is_pinned;
use super::reclaim::{drain, is_freeing};

/// Waits until every current reader has left, which is until each [`Guard`](super::Guard) of now has
/// been dropped.
///
/// When it returns, no reader can reach an object that was unlinked before the call. Blocks: spins,
/// yields, then sleeps for up to a millisecond at a time, because readers do not wake waiters.
/// Never allocates.
///
/// ```
/// use offlock_percpu::rcu::{self, SynchronizeError};
///
/// let guard = rcu::pin();
/// assert_eq!(rcu::synchronize(), Err(SynchronizeError::WouldDeadlock));
/// drop(guard);
/// assert_eq!(rcu::synchronize(), Ok(()));
/// ```
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: the calling thread holds a [`Guard`](super::Guard).
pub fn synchronize() -> Result<(), SynchronizeError> {
    if is_pinned() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    init_domain().wait();
    Ok(())
}

/// Waits until every object that any thread retired before is dropped.
///
/// Blocks like [`synchronize`], then runs drops on this thread, then waits for the drops that other
/// threads have begun. It does not wait for objects retired during the call. Use it before code is
/// unloaded, or in a test before drops are counted.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned};
/// use std::sync::Arc;
///
/// let value = Arc::new(7);
/// Atomic::new(Arc::clone(&value)).store(Owned::new(Arc::new(8))); // retires the clone
/// rcu::barrier()?;
/// assert_eq!(Arc::strong_count(&value), 1);
/// # Ok::<(), rcu::SynchronizeError>(())
/// ```
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: the calling thread holds a [`Guard`](super::Guard), or runs
/// the drop of a retired object.
pub fn barrier() -> Result<(), SynchronizeError> {
    if is_pinned() || is_freeing() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    drain(init_domain());
    Ok(())
}

/// A cookie that tells whether a grace period is over. Returned by [`start_grace_period`].
///
/// ```
/// use offlock_percpu::rcu::{self, GracePeriod};
///
/// let period: GracePeriod = rcu::start_grace_period();
/// while !period.poll() {
///     std::thread::yield_now();
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "call `poll` to learn whether it is over"]
pub struct GracePeriod {
    target: u64,
}

/// Returns a cookie for the grace period of the objects that were unlinked before this call.
///
/// Once [`poll`](GracePeriod::poll) of the cookie returns true, no reader can reach those objects.
/// Wait-free, without a shared write or a system call. The grace period advances only when a thread
/// polls, retires objects or waits.
///
/// ```
/// use offlock_percpu::rcu;
///
/// let guard = rcu::pin();
/// let period = rcu::start_grace_period();
/// assert!(!period.poll(), "this thread still reads");
/// drop(guard);
/// while !period.poll() { /* do something else */ }
/// ```
pub fn start_grace_period() -> GracePeriod {
    GracePeriod { target: domain().target() }
}

impl GracePeriod {
    /// Returns whether the grace period is over; advances it if it is not.
    ///
    /// Never blocks. Costs up to two [`heavy`](crate::fence::heavy) the first time, none while it
    /// waits for a reader, and a load once it is over. Returns `false` while another thread
    /// advances grace periods.
    pub fn poll(self) -> bool {
        domain().advance(self.target)
    }
}
