//! `UnwindSafe` and `RefUnwindSafe` for the structures of this crate: each stays usable after a
//! panic was caught.
//!
//! A panic can come only from code of the user: a closure, a drop, or code that runs while a guard
//! is held. None of that code runs while this crate changes a structure:
//!
//! - Counters call no code of the user.
//! - [`PercpuRef`] calls its closures with no lock held and the count consistent.
//! - Guards of [`LgLock`] unlock during unwinding. There is no poison: the
//!   value stays as the panicking code left it, and other threads see that value even without
//!   `catch_unwind`. So there is no bound on `T`, as for the locks of `std`.

use std::panic::{RefUnwindSafe, UnwindSafe};

use crate::{LgLock, PerCpuCounter, PercpuRef};

macro_rules! unwind_safe {
    ($([$($generics:tt)*] $type:ty;)*) => {$(
        impl<$($generics)*> UnwindSafe for $type {}
        impl<$($generics)*> RefUnwindSafe for $type {}
    )*};
}

unwind_safe! {
    [] PerCpuCounter;
    [] PercpuRef;
    [T] LgLock<T>;
}
