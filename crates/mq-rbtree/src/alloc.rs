//! Memory that may be refused.

use std::alloc::{Layout, alloc};

/// A box, or the value back if there is no memory for one.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, T> {
    let layout = const {
        assert!(size_of::<T>() != 0);
        Layout::new::<T>()
    };
    // SAFETY: the size is not 0, as was just asserted.
    let at = unsafe { alloc(layout) }.cast::<T>();
    if at.is_null() {
        return Err(value);
    }
    // SAFETY: fresh memory of the layout of a `T`.
    unsafe { at.write(value) };
    // SAFETY: allocated by the global allocator with the layout of a `T`, and initialised.
    Ok(unsafe { Box::from_raw(at) })
}
