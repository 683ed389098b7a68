//! Why a kill, a resurrection or a new start was refused.

use std::error::Error;
use std::fmt;
use std::io;

use crate::error::AllocError;

/// Why [`PercpuRef::kill`](crate::PercpuRef::kill) did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KillError {
    /// It was killed before, and not resurrected. Maps to `EINVAL`.
    AlreadyDying,
}

/// Why [`PercpuRef::resurrect`](crate::PercpuRef::resurrect) did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResurrectError {
    /// It is live. Maps to `EINVAL`.
    NotDying,
    /// The count has reached zero: too late. Maps to `ESRCH`.
    Released,
}

/// Why [`PercpuRef::reinit`](crate::PercpuRef::reinit) did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReinitRefused {
    /// It is live, or there are references. Maps to `EBUSY`.
    InUse,
    /// No memory for the closure. Maps to `ENOMEM`.
    Alloc(AllocError),
}

/// The refusal of [`PercpuRef::reinit`](crate::PercpuRef::reinit), with the closure.
pub struct ReinitError<F> {
    why: ReinitRefused,
    release: F,
}

impl<F> ReinitError<F> {
    pub(super) fn new(why: ReinitRefused, release: F) -> Self {
        Self { why, release }
    }

    /// Why.
    #[must_use]
    pub fn why(&self) -> ReinitRefused {
        self.why
    }

    /// Gives back the closure that was not taken.
    pub fn into_release(self) -> F {
        self.release
    }

    /// The error as C knows it: `EBUSY` or `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.why.errno()
    }
}

impl KillError {
    /// The error as C knows it: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::AlreadyDying => libc::EINVAL,
        }
    }
}

impl ResurrectError {
    /// The error as C knows it: `EINVAL` or `ESRCH`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotDying => libc::EINVAL,
            Self::Released => libc::ESRCH,
        }
    }
}

impl ReinitRefused {
    /// The error as C knows it: `EBUSY` or `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::InUse => libc::EBUSY,
            Self::Alloc(alloc) => alloc.errno(),
        }
    }
}

impl fmt::Display for KillError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyDying => f.write_str("the reference count was killed before"),
        }
    }
}

impl fmt::Display for ResurrectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotDying => f.write_str("the reference count is live"),
            Self::Released => f.write_str("the reference count has reached zero"),
        }
    }
}

impl fmt::Display for ReinitRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("the reference count has not reached zero"),
            Self::Alloc(_) => f.write_str("no memory for the release closure"),
        }
    }
}

impl<F> fmt::Display for ReinitError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl<F> fmt::Debug for ReinitError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReinitError").field("why", &self.why).finish_non_exhaustive()
    }
}

impl Error for KillError {}

impl Error for ResurrectError {}

impl Error for ReinitRefused {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Alloc(alloc) => Some(alloc),
            Self::InUse => None,
        }
    }
}

/// Reads as its reason does, so the source is that of the reason.
impl<F> Error for ReinitError<F> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.why.source()
    }
}

impl From<AllocError> for ReinitRefused {
    fn from(alloc: AllocError) -> Self {
        Self::Alloc(alloc)
    }
}

impl From<KillError> for io::Error {
    fn from(error: KillError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl From<ResurrectError> for io::Error {
    fn from(error: ResurrectError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl From<ReinitRefused> for io::Error {
    fn from(error: ReinitRefused) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl<F> From<ReinitError<F>> for io::Error {
    fn from(error: ReinitError<F>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
