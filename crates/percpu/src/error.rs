//! Errors that more than one module returns.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;

#[doc(inline)]
pub use offlock_sync::AllocError;

pub(crate) use crate::sync::impl_error;

/// An allocation failed; the error returns the value. Maps to `ENOMEM`.
///
/// Converts into [`AllocError`]. If an error must be `Send + Sync` and the
/// value is not, use `.map_err(AllocError::from)?`.
///
/// ```
/// use offlock_percpu::{NewError, rcu::Owned};
///
/// let node: Result<Owned<u32>, u32> = Owned::try_new(7).map_err(|NewError(value)| value);
/// assert_eq!(node.map(Owned::into_inner), Ok(7));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NewError<T>(pub T);

impl<T> NewError<T> {
    /// Returns the value for which there was no memory.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl_error! { [T] NewError<T> { _ => ENOMEM, "out of memory"; } }

/// Omits the value, which need not be `Debug`.
impl<T> fmt::Debug for NewError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NewError").finish_non_exhaustive()
    }
}

impl<T> From<NewError<T>> for AllocError {
    fn from(_: NewError<T>) -> Self {
        Self::new()
    }
}

/// Ends like `Box::new` without memory: for a `new` whose `try_new` returned [`AllocError`].
///
/// `count` values of `T` are the refused allocation, or part of it.
#[cold]
pub(crate) fn out_of_memory<T>(count: usize) -> ! {
    handle_alloc_error(Layout::array::<T>(count).unwrap_or(Layout::new::<T>()))
}
