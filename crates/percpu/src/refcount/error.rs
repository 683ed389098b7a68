//! The error of a [`PercpuRef`](crate::PercpuRef).

use crate::error::impl_error;

/// The error of [`PercpuRef::kill`](crate::PercpuRef::kill). The call changed nothing.
///
/// ```
/// use offlock_percpu::{KillError, PercpuRef};
///
/// let refs = PercpuRef::new(|| ());
/// refs.kill()?;
/// assert_eq!(refs.kill(), Err(KillError::AlreadyDying));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KillError {
    /// Another call has killed the count, or is about to. Maps to `EINVAL`.
    AlreadyDying,
}

impl_error! {
    [] KillError {
        Self::AlreadyDying => EINVAL, "the reference count was already killed";
    }
}
