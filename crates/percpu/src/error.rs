//! Errors that more than one module returns.

use std::alloc::{Layout, handle_alloc_error};

#[doc(inline)]
pub use offlock_sync::AllocError;
pub(crate) use offlock_sync::impl_error;

/// Ends like `Box::new` without memory: for a `new` whose `try_new` returned [`AllocError`].
///
/// `count` values of `T` are the refused allocation, or part of it.
#[cold]
pub(crate) fn out_of_memory<T>(count: usize) -> ! {
    handle_alloc_error(Layout::array::<T>(count).unwrap_or(Layout::new::<T>()))
}
