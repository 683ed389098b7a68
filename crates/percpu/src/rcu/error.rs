//! Why a wait was refused.

use std::error::Error;
use std::fmt;
use std::io;

use super::Forked;

/// Why [`synchronize`](super::synchronize) or [`barrier`](super::barrier) did not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SynchronizeError {
    /// It would wait for the calling thread: that holds a [`Guard`](super::Guard), or calls
    /// `barrier` from the drop of a retired object. Maps to `EDEADLK`.
    WouldDeadlock,
    /// It would wait for what a thread of the parent process left behind. Maps to `EOWNERDEAD`.
    Forked(Forked),
}

impl SynchronizeError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::WouldDeadlock => libc::EDEADLK,
            Self::Forked(forked) => forked.errno(),
        }
    }
}

impl fmt::Display for SynchronizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WouldDeadlock => f.write_str("a wait for readers by one of them"),
            Self::Forked(forked) => forked.fmt(f),
        }
    }
}

impl Error for SynchronizeError {}

impl From<Forked> for SynchronizeError {
    fn from(forked: Forked) -> Self {
        Self::Forked(forked)
    }
}

impl From<SynchronizeError> for io::Error {
    fn from(error: SynchronizeError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
