//! The errors that do not hold a pointer of this module.

use std::error::Error;
use std::fmt;
use std::io;

/// The reason why [`synchronize`](super::synchronize) or [`barrier`](super::barrier) did not wait.
///
/// # Examples
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

impl SynchronizeError {
    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::WouldDeadlock => libc::EDEADLK,
        }
    }
}

impl fmt::Display for SynchronizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WouldDeadlock => f.write_str("the calling thread would wait for itself"),
        }
    }
}

impl Error for SynchronizeError {}

impl From<SynchronizeError> for io::Error {
    fn from(error: SynchronizeError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// There is no memory for a node. Contains the refused value. Maps to `ENOMEM`.
///
/// # Examples
///
/// ```
/// use offlock_percpu::rcu::Owned;
///
/// fn node(name: String) -> Result<Owned<String>, String> {
///     Owned::try_new(name).map_err(|error| error.0)
/// }
/// assert_eq!(*node("eth0".into())?, "eth0");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TryNewError<T>(pub T);

impl<T> TryNewError<T> {
    /// Returns the matching errno value: `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::ENOMEM
    }
}

impl<T> fmt::Debug for TryNewError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryNewError").finish_non_exhaustive()
    }
}

impl<T> fmt::Display for TryNewError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory for a node")
    }
}

impl<T> Error for TryNewError<T> {}

impl<T> From<TryNewError<T>> for io::Error {
    fn from(error: TryNewError<T>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
