//! What is refused, and why; with what was to be done with it.

use std::error::Error;
use std::fmt;
use std::io;

/// Why [`synchronize`](super::synchronize) or [`barrier`](super::barrier) did not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SynchronizeError {
    /// It would wait for the calling thread: that holds a [`Guard`](super::Guard), or calls
    /// `barrier` from the drop of a retired object. Maps to `EDEADLK`.
    WouldDeadlock,
}

impl SynchronizeError {
    /// The error as C knows it.
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
            Self::WouldDeadlock => f.write_str("a wait for readers by one of them"),
        }
    }
}

impl Error for SynchronizeError {}

impl From<SynchronizeError> for io::Error {
    fn from(error: SynchronizeError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// There was no memory for a node; here is the value. Maps to `ENOMEM`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TryNewError<T>(pub T);

impl<T> TryNewError<T> {
    /// The error as C knows it: `ENOMEM`.
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
