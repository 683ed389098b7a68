//! Functions that are `const`, except in a build for a model checker.

/// Declares a function that is `const` in a normal build.
///
/// The atomics of a model checker have no `const` constructors, so its build drops the `const`.
macro_rules! const_fn {
    ($(#[$meta:meta])* $vis:vis const unsafe fn $($rest:tt)*) => {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        $(#[$meta])* $vis const unsafe fn $($rest)*
        #[cfg(any(offlock_loom, offlock_shuttle))]
        $(#[$meta])* $vis unsafe fn $($rest)*
    };
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        $(#[$meta])* $vis const fn $($rest)*
        #[cfg(any(offlock_loom, offlock_shuttle))]
        $(#[$meta])* $vis fn $($rest)*
    };
}
pub(crate) use const_fn;
