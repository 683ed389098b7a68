//! The errors of a [`PercpuRef`](crate::PercpuRef).

use std::error::Error;
use std::fmt;
use std::io;

use crate::error::AllocError;

/// The error of [`PercpuRef::kill`](crate::PercpuRef::kill). The call changed nothing.
///
/// ```
/// use offlock_percpu::{KillError, PercpuRef};
///
/// let refs = PercpuRef::new(|| ())?;
/// refs.kill()?;
/// assert_eq!(refs.kill(), Err(KillError::AlreadyDying));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KillError {
    /// The count was killed before and not resurrected. Maps to `EINVAL`.
    AlreadyDying,
}

/// The error of [`PercpuRef::resurrect`](crate::PercpuRef::resurrect). The call changed nothing.
///
/// ```
/// use offlock_percpu::{PercpuRef, ResurrectError};
///
/// let refs = PercpuRef::new(|| ())?;
/// assert_eq!(refs.resurrect(), Err(ResurrectError::NotDying));
/// refs.kill()?;
/// assert_eq!(refs.resurrect(), Err(ResurrectError::Released)); // no reference was left
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResurrectError {
    /// The count is live. Maps to `EINVAL`.
    NotDying,
    /// The count has reached zero. Maps to `ESRCH`.
    Released,
}

/// The reason in a [`ReinitError`]. The call changed nothing.
///
/// ```
/// use offlock_percpu::{PercpuRef, ReinitRefused};
///
/// let refs = PercpuRef::new(|| ())?;
/// let error = refs.reinit(|| ()).unwrap_err();
/// assert_eq!(error.why(), ReinitRefused::InUse); // live
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReinitRefused {
    /// The count has not reached zero. Maps to `EBUSY`.
    InUse,
    /// There is no memory for the release closure. Maps to `ENOMEM`.
    Alloc(AllocError),
}

/// The error of [`PercpuRef::reinit`](crate::PercpuRef::reinit), which returns the release closure.
///
/// ```
/// use offlock_percpu::PercpuRef;
///
/// let refs = PercpuRef::new(|| ())?;
/// let release = refs.reinit(|| ()).unwrap_err().into_release(); // the count is live
/// refs.kill()?;
/// refs.reinit(release)?;
/// assert!(refs.try_get().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReinitError<F> {
    why: ReinitRefused,
    release: F,
}

impl<F> ReinitError<F> {
    pub(super) fn new(why: ReinitRefused, release: F) -> Self {
        Self { why, release }
    }

    /// Returns the reason of the error.
    #[must_use]
    pub fn why(&self) -> ReinitRefused {
        self.why
    }

    /// Returns the release closure.
    pub fn into_release(self) -> F {
        self.release
    }

    /// Returns the errno of this error: `EBUSY` or `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.why.errno()
    }
}

impl KillError {
    /// Returns the errno of this error: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::AlreadyDying => libc::EINVAL,
        }
    }
}

impl ResurrectError {
    /// Returns the errno of this error: `EINVAL` or `ESRCH`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotDying => libc::EINVAL,
            Self::Released => libc::ESRCH,
        }
    }
}

impl ReinitRefused {
    /// Returns the errno of this error: `EBUSY` or `ENOMEM`.
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
            Self::AlreadyDying => f.write_str("the reference count was already killed"),
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

/// The message is that of the reason, and so is the source.
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
