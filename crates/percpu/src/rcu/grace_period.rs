//! Waits for readers, and grace periods to ask about.

use super::domain::{domain, init_domain};
use super::error::SynchronizeError;
use super::guard::is_pinned;
use super::reclaim::{drain, is_freeing};

/// Waits until every reader that was inside is gone, of both kinds.
///
/// What was unlinked before is out of reach when it returns. Blocks: spins, yields, then sleeps for
/// up to a millisecond at a time (readers wake nobody up). Never allocates.
///
/// A [`SendGuard`] that the caller itself holds is waited for like any other: for ever.
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: this thread holds a [`Guard`].
///
/// # Examples
///
/// ```
/// use percpu::rcu::{self, SynchronizeError};
///
/// let guard = rcu::pin();
/// assert_eq!(rcu::synchronize(), Err(SynchronizeError::WouldDeadlock));
/// drop(guard);
/// assert_eq!(rcu::synchronize(), Ok(()));
/// ```
pub fn synchronize() -> Result<(), SynchronizeError> {
    if is_pinned() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    init_domain().wait();
    Ok(())
}

/// Waits until everything that was retired or deferred before, by any thread, is dropped.
///
/// Blocks like [`synchronize`], then runs drops on this thread, then waits for those that other
/// threads have begun. What is retired meanwhile is not waited for. Use it before unloading code, or
/// in a test before counting.
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: this thread holds a [`Guard`], or is in the drop of a retired
/// object.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// static RAN: AtomicBool = AtomicBool::new(false);
/// rcu::defer(0, || RAN.store(true, Ordering::Relaxed));
/// rcu::barrier()?;
/// assert!(RAN.load(Ordering::Relaxed));
/// # Ok::<(), rcu::SynchronizeError>(())
/// ```
pub fn barrier() -> Result<(), SynchronizeError> {
    if is_pinned() || is_freeing() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    drain(init_domain());
    Ok(())
}

/// A grace period that began at some moment: a cookie to be asked later. From
/// [`start_grace_period`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "ask it with `poll`"]
pub struct GracePeriod {
    target: u64,
}

/// Remembers this moment: once the cookie's [`poll`](GracePeriod::poll) is true, what was unlinked
/// before this call is out of reach of every reader.
///
/// Wait-free, without a shared write or a system call; nothing happens before somebody polls.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
///
/// let guard = rcu::pin();
/// let period = rcu::start_grace_period();
/// assert!(!period.poll(), "this thread is in the way");
/// drop(guard);
/// while !period.poll() { /* do something else */ }
/// ```
pub fn start_grace_period() -> GracePeriod {
    GracePeriod { target: domain().target() }
}

impl GracePeriod {
    /// Whether the grace period is over; moves it on if it is not.
    ///
    /// Never blocks. Costs up to two [`heavy`](crate::fence::heavy) the first time, none while a
    /// reader is in the way, and a load once it is over. Another thread that is at it makes this
    /// return `false`.
    pub fn poll(self) -> bool {
        domain().advance(self.target)
    }
}
