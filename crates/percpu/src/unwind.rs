//! What may be used again after a panic was caught (`UnwindSafe`, `RefUnwindSafe`).
//!
//! A panic can come only from code of the caller's: a closure, a drop, or what is done inside a
//! guard. None of it runs in the middle of a change of ours:
//!
//! - Counters run no code of the caller's.
//! - [`PercpuRef`] runs its closures with nothing locked and the count settled.
//! - Guards of [`ReadWriteGate`] and [`LgLock`] unlock when they unwind. There is no poison: what a value looks like that was being changed is up to whoever changed it, as it
//!   is for the other threads, which no `catch_unwind` asks. So there is no bound on `T`, as for
//!   the locks of `std`.

use std::panic::{RefUnwindSafe, UnwindSafe};

use crate::{LgLock, PerCpuCounter, PercpuRef, ReadWriteGate};

macro_rules! unwind_safe {
    ($([$($generics:tt)*] $type:ty;)*) => {$(
        impl<$($generics)*> UnwindSafe for $type {}
        impl<$($generics)*> RefUnwindSafe for $type {}
    )*};
}

unwind_safe! {
    [] PerCpuCounter;
    [] PercpuRef;
    [T] ReadWriteGate<T>;
    [T] LgLock<T>;
}

/// The rest follows: references to what is above, and what is made of it.
const _: () = {
    const fn unwind_safe<T: UnwindSafe + RefUnwindSafe>() {}
    unwind_safe::<crate::PerCpu<PerCpuCounter>>();
    unwind_safe::<crate::Reference<'_>>();
    unwind_safe::<crate::ReadGuard<'_, u32>>();
    unwind_safe::<&LgLock<std::cell::Cell<u32>>>();
};
