//! Macros for declarations that differ between a normal build and one for a model checker, and for
//! error types.
//!
//! A `macro_rules!` with `macro_export` stands at the root of the crate, so each has a long name
//! there and a short one in the re-exports.

/// Declares a static that each run of a model creates anew: `global! { static NAME: T = value; }`.
#[cfg(not(offlock_model))]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_global {
    ($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $(#[$meta])* static $name: $type = $value;
    };
}

#[cfg(offlock_model)]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_global {
    ($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $crate::lazy_static! { $(#[$meta])* static ref $name: $type = $value; }
    };
}

/// Declares thread-local variables with constant values. Those of the model checkers, whose macro
/// does not accept `const`, are new in each run and one per thread of the model.
#[cfg(not(offlock_model))]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_const_thread_local {
    ($($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;)*) => {$(
        $crate::thread_local! { $(#[$meta])* static $name: $type = const { $value }; }
    )*};
}

#[cfg(offlock_model)]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_const_thread_local {
    ($($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;)*) => {$(
        $crate::thread_local! { $(#[$meta])* static $name: $type = $value; }
    )*};
}

/// Declares a function that is `const` in a normal build.
///
/// The atomics of a model checker have no `const` constructors, so its build drops the `const`.
#[cfg(not(offlock_model))]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_const_fn {
    ($($function:tt)*) => { $($function)* };
}

#[cfg(offlock_model)]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_const_fn {
    ($(#[$meta:meta])* $vis:vis const unsafe fn $($rest:tt)*) => {
        $(#[$meta])* $vis unsafe fn $($rest)*
    };
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => {
        $(#[$meta])* $vis fn $($rest)*
    };
}

/// Implements `errno`, `Display`, `Error` and the conversion into `io::Error` for an error type.
///
/// Each line has a pattern for `self`, its errno, and its message with the bindings of the pattern.
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_impl_error {
    ($type:ty { $($pattern:pat => $errno:ident, $message:literal;)+ }) => {
        impl $type {
            /// Returns the matching errno value.
            #[must_use]
            #[allow(unused_variables, reason = "bindings of the patterns are for the messages")]
            pub fn errno(&self) -> i32 {
                match self { $($pattern => $crate::libc::$errno,)+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self { $($pattern => write!(f, $message),)+ }
            }
        }

        impl std::error::Error for $type {}

        impl From<$type> for std::io::Error {
            fn from(error: $type) -> Self {
                Self::from_raw_os_error(error.errno())
            }
        }
    };
}

pub use crate::{
    offlock_const_fn as const_fn, offlock_const_thread_local as const_thread_local,
    offlock_global as global, offlock_impl_error as impl_error,
};
