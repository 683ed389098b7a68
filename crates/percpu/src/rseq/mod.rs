//! Restartable sequences: the area that libc registers, and the sections that run on it.
//!
//! A section is a few instructions that end in one store. If the thread migrates, is preempted or
//! takes a signal before that store, the kernel restarts the section. So no other thread runs on
//! this CPU between the first instruction and the store, and the store needs no lock prefix.
//!
//! ```text
//!  default, x86_64         sections in assembly                 (x86_64.rs)
//!  every other build       none: `available()` is false         (portable.rs)
//!  model checkers          one mutex per virtual CPU            (model.rs)
//! ```

#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
mod area;

#[cfg(all(
    target_arch = "x86_64",
    not(offlock_portable),
    any(test, not(offlock_virtual_cpu))
))]
pub(crate) use self::area::cpu_id;
#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
pub(crate) use self::area::{Offset, find};

pub mod cells;
mod operations;
pub(crate) mod section;
#[cfg(all(
    any(test, all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu)))),
    not(any(offlock_loom, offlock_shuttle))
))]
mod self_test;
