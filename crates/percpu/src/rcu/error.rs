//! What is refused, and why; with what was to be done with it.

use std::error::Error;
use std::fmt;
use std::io;

use super::pointer::{Owned, Unlinked};

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

/// What [`Atomic::compare_exchange`](super::Atomic::compare_exchange) found, and what it was given.
#[non_exhaustive]
pub struct CompareExchangeError<'g, T> {
    /// What the pointer leads to.
    pub current: &'g T,
    /// The refused node.
    pub new: Owned<T>,
}

impl<T> CompareExchangeError<'_, T> {
    /// The error as C knows it: `EAGAIN`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EAGAIN
    }
}

impl<T> fmt::Debug for CompareExchangeError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompareExchangeError").finish_non_exhaustive()
    }
}

impl<T> fmt::Display for CompareExchangeError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pointer leads to something else")
    }
}

impl<T> Error for CompareExchangeError<'_, T> {}

impl<T> From<CompareExchangeError<'_, T>> for io::Error {
    fn from(error: CompareExchangeError<'_, T>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// Why [`Unlinked::reclaim`] did not wait; and the value.
#[non_exhaustive]
pub struct ReclaimError<T: Send + Sync + 'static> {
    /// What [`synchronize`](super::synchronize) said.
    pub why: SynchronizeError,
    /// The value, still waiting for its grace period.
    pub unlinked: Unlinked<T>,
}

impl<T: Send + Sync + 'static> ReclaimError<T> {
    /// The error as C knows it: that of `why`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.why.errno()
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for ReclaimError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReclaimError").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> fmt::Display for ReclaimError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the wait for readers was refused")
    }
}

impl<T: Send + Sync + 'static> Error for ReclaimError<T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.why)
    }
}

impl<T: Send + Sync + 'static> From<ReclaimError<T>> for io::Error {
    fn from(error: ReclaimError<T>) -> Self {
        error.why.into()
    }
}
