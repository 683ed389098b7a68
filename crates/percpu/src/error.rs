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
/// use offlock_percpu::{NewError, ReadWriteGate};
///
/// fn gate(routes: Vec<u32>) -> Result<ReadWriteGate<Vec<u32>>, Vec<u32>> {
///     ReadWriteGate::new(routes).map_err(|NewError(routes)| routes)
/// }
/// fn with_question_mark() -> std::io::Result<ReadWriteGate<u32>> {
///     Ok(ReadWriteGate::new(7)?)
/// }
/// # assert_eq!((gate(vec![1]).unwrap().into_inner(), with_question_mark()?.into_inner()), (vec![1], 7));
/// # Ok::<(), std::io::Error>(())
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
