//! Fallible allocation, until `Box::try_new` is stable.

use std::alloc::{Layout, alloc, handle_alloc_error};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use crate::impl_error;

/// An allocation failed. Maps to `ENOMEM`.
///
/// ```
/// # use offlock_sync::AllocError;
/// fn buffer(bytes: usize) -> Result<Vec<u8>, AllocError> {
///     let mut buffer = Vec::new();
///     buffer.try_reserve_exact(bytes).map_err(|_| AllocError::new())?;
///     Ok(buffer)
/// }
/// assert_eq!(buffer(usize::MAX).unwrap_err().errno(), 12); // ENOMEM
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocError {}

impl AllocError {
    /// Makes the error.
    #[allow(clippy::new_without_default, reason = "an error is not made by default")]
    #[must_use]
    pub fn new() -> Self {
        Self {}
    }
}

impl_error! { AllocError { _ => ENOMEM, "out of memory"; } }

/// Allocates uninitialised memory for one `T`. A zero-sized `T` does not compile.
///
/// # Errors
///
/// [`AllocError`] if the allocation fails.
pub fn try_alloc<T>() -> Result<NonNull<T>, AllocError> {
    let layout = const {
        assert!(size_of::<T>() != 0);
        Layout::new::<T>()
    };
    // SAFETY: by the assertion above the size is not 0.
    let at = unsafe { alloc(layout) };
    NonNull::new(at.cast()).ok_or_else(AllocError::new)
}

/// Moves `value` into a box.
///
/// # Errors
///
/// Returns `value` if the allocation fails.
pub fn try_box<T>(value: T) -> Result<Box<T>, T> {
    let layout = Layout::new::<T>();
    if layout.size() == 0 {
        return Ok(Box::new(value)); // does not allocate
    }
    // SAFETY: the size is not 0, for which the function returned above.
    let at = unsafe { alloc(layout) }.cast::<MaybeUninit<T>>();
    if at.is_null() {
        return Err(value);
    }
    // SAFETY: new memory of the global allocator with the layout of a `T`, which may be uninitialised.
    let boxed = unsafe { Box::from_raw(at) };
    Ok(Box::write(boxed, value))
}

/// Ends like `Box::new` without memory, for a constructor that allocates by other means.
///
/// `count` values of `T` are the refused allocation, or part of it.
#[cold]
pub fn out_of_memory<T>(count: usize) -> ! {
    handle_alloc_error(Layout::array::<T>(count).unwrap_or(Layout::new::<T>()))
}
