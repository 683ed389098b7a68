//! Errors that more than one module returns.

use std::alloc::{Layout, handle_alloc_error};
use std::error::Error;
use std::fmt;
use std::io;

/// Memory could not be had. Maps to `ENOMEM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocError {}

impl AllocError {
    /// For the other crates of the workspace, which return it too.
    #[doc(hidden)]
    #[must_use]
    pub fn new() -> Self {
        Self {}
    }

    /// The error as C knows it: `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::ENOMEM
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory")
    }
}

impl Error for AllocError {}

impl From<AllocError> for io::Error {
    fn from(error: AllocError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// Memory for what was to hold a value could not be had; the value comes back. Maps to `ENOMEM`.
///
/// Reads, and converts, as the [`AllocError`] that it is beside the value. Where an error must be
/// `Send + Sync` and the value is not: `.map_err(AllocError::from)?`.
///
/// ```
/// use percpu::{NewError, ReadWriteGate};
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
    /// The value that was not taken.
    pub fn into_inner(self) -> T {
        self.0
    }

    /// The error as C knows it: `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::ENOMEM
    }
}

impl<T> fmt::Display for NewError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        AllocError::new().fmt(f)
    }
}

/// Without the value, which need not be `Debug`.
impl<T> fmt::Debug for NewError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NewError").finish_non_exhaustive()
    }
}

impl<T> Error for NewError<T> {}

impl<T> From<NewError<T>> for AllocError {
    fn from(_: NewError<T>) -> Self {
        Self::new()
    }
}

impl<T> From<NewError<T>> for io::Error {
    fn from(error: NewError<T>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// What a `new` does where its `try_new` returns [`AllocError`]: it ends as `Box::new` does. `count`
/// of `T` is what it wanted, or part of that.
#[cold]
pub(crate) fn out_of_memory<T>(count: usize) -> ! {
    handle_alloc_error(Layout::array::<T>(count).unwrap_or(Layout::new::<T>()))
}
