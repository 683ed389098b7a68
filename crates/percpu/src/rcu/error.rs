//! The error of a wait for readers.

use crate::error::impl_error;

/// The reason why [`synchronize`](super::synchronize) or [`barrier`](super::barrier) did not wait.
///
/// ```
/// use offlock_percpu::rcu::{self, SynchronizeError};
///
/// let _guard = rcu::pin();
/// assert_eq!(rcu::barrier(), Err(SynchronizeError::WouldDeadlock));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SynchronizeError {
    /// The wait would never end, because the calling thread holds a [`Guard`](super::Guard), or
    /// calls `barrier` from the drop of a retired object. Maps to `EDEADLK`.
    WouldDeadlock,
}

impl_error! {
    [] SynchronizeError {
        Self::WouldDeadlock => EDEADLK, "the calling thread would wait for itself";
    }
}
