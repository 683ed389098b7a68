//! Memory that may be refused: what `Box::try_new` will be.

use std::alloc::{Layout, alloc};
use std::ptr::NonNull;

use crate::error::AllocError;

/// Memory for one `T`, not initialised. `T` is not zero-sized.
///
/// # Errors
///
/// [`AllocError`] if there is none.
pub fn try_alloc<T>() -> Result<NonNull<T>, AllocError> {
    let layout = const {
        assert!(size_of::<T>() != 0);
        Layout::new::<T>()
    };
    // SAFETY: the size is not 0, as was just asserted.
    let at = unsafe { alloc(layout) };
    NonNull::new(at.cast()).ok_or_else(AllocError::new)
}

/// A box, or the value back if there is no memory for one.
///
/// # Errors
///
/// The value.
pub fn try_box<T>(value: T) -> Result<Box<T>, T> {
    let layout = Layout::new::<T>();
    if layout.size() == 0 {
        return Ok(Box::new(value)); // allocates nothing
    }
    // SAFETY: the size is not 0.
    let at = unsafe { alloc(layout) }.cast::<T>();
    if at.is_null() {
        return Err(value);
    }
    // SAFETY: fresh memory of the layout of a `T`.
    unsafe { at.write(value) };
    // SAFETY: allocated by the global allocator with the layout of a `T`, and initialised.
    Ok(unsafe { Box::from_raw(at) })
}
