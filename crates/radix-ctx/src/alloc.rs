//! Memory that may be refused.

use std::alloc::{Layout, alloc};
use std::ptr::NonNull;

use percpu::AllocError;

/// Memory for one `T`, not initialised. `T` is not zero-sized.
pub(crate) fn try_alloc<T>() -> Result<NonNull<T>, AllocError> {
    let layout = const {
        assert!(size_of::<T>() != 0);
        Layout::new::<T>()
    };
    // SAFETY: the size is not 0, as was just asserted.
    let at = unsafe { alloc(layout) };
    NonNull::new(at.cast()).ok_or_else(AllocError::new)
}

/// A box, or the value back if there is no memory for one.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, T> {
    let Ok(at) = try_alloc::<T>() else { return Err(value) };
    // SAFETY: fresh memory of the layout of a `T`.
    unsafe { at.write(value) };
    // SAFETY: allocated by the global allocator with the layout of a `T`, and initialised.
    Ok(unsafe { Box::from_raw(at.as_ptr()) })
}
