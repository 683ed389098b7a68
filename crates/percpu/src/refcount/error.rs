//! The errors of a [`PercpuRef`](crate::PercpuRef).

use std::fmt;

use crate::error::impl_error;

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

/// The error of [`PercpuRef::reinit`](crate::PercpuRef::reinit), which returns the release closure.
/// The call changed nothing.
///
/// ```
/// use offlock_percpu::{PercpuRef, ReinitError};
///
/// let refs = PercpuRef::new(|| ())?;
/// let error = refs.reinit(|| ()).unwrap_err();
/// assert!(matches!(error, ReinitError::InUse(_)), "the count is live");
/// refs.kill()?;
/// refs.reinit(error.into_release())?;
/// assert!(refs.try_get().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[non_exhaustive]
pub enum ReinitError<F> {
    /// The count has not reached zero. Maps to `EBUSY`.
    InUse(F),
    /// There is no memory for the release closure. Maps to `ENOMEM`.
    Alloc(F),
}

impl<F> ReinitError<F> {
    /// Returns the release closure.
    pub fn into_release(self) -> F {
        match self {
            Self::InUse(release) | Self::Alloc(release) => release,
        }
    }
}

/// Omits the closure, which is not `Debug`.
impl<F> fmt::Debug for ReinitError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InUse(_) => "InUse(..)",
            Self::Alloc(_) => "Alloc(..)",
        })
    }
}

impl_error! {
    [] KillError {
        Self::AlreadyDying => EINVAL, "the reference count was already killed";
    }
}

impl_error! {
    [] ResurrectError {
        Self::NotDying => EINVAL, "the reference count is live";
        Self::Released => ESRCH, "the reference count has reached zero";
    }
}

impl_error! {
    [F] ReinitError<F> {
        Self::InUse(_) => EBUSY, "the reference count has not reached zero";
        Self::Alloc(_) => ENOMEM, "no memory for the release closure";
    }
}
