#![doc = include_str!("../README.md")]
//!
//! # Guarantees of all items
//!
//! Operations are wait-free and allocate nothing, unless the item says otherwise. *Wait-free*
//! includes sections: a section restarts only when its thread is preempted, migrated or signalled, or
//! when a fold or a kill calls `membarrier`. Under an endless stream of such
//! events the number of restarts is not bounded.
//!
//! The first use in a process reads `/sys`, registers with `membarrier` and tests the sections. It
//! allocates, and ends like `Box::new` if it cannot. Threads that call at the same time wait for
//! it. [`capabilities()`] runs the first use at a moment that the program chooses.
//!
//! A word of a counter or a reference takes 8 bytes per CPU, from a pool of pages: the first
//! word takes one page (4 KiB) for each possible CPU, and the next 511 words take no more. Words
//! return to the pool, pages never return to the system.
//!
//! | out of memory | |
//! |---|---|
//! | a constructor | ends like `Box::new` ([`handle_alloc_error`](std::alloc::handle_alloc_error)); [`PerCpu::try_new`] returns [`AllocError`] |
//! | the first [`rcu::pin`] of a thread, the first retired object, [`rcu::poll`] or [`rcu::stats`] | ends like `Box::new` |
//! | [`PerCpuCounter`] | allocates nothing; until an add finds memory, the counter works slowly; [`reserve`](PerCpuCounter::reserve) returns [`AllocError`] |
//!
//! - *A guard is forgotten* (`mem::forget`): its slot, lock or pin stays held for ever. Nothing is
//!   unsound.
//! - *A thread ends inside a guard*: slots belong to CPUs, so nothing dangles. A guard in a
//!   thread-local variable releases when the variable is destroyed.
//! - *A callback or a closure panics*: no lock stays held. The item says which thread sees the
//!   panic.
//! - *The process forks*: the child may only exec or exit.
//! - *A signal handler* may add to a counter that is [reserved](PerCpuCounter::reserve), and get or put a
//!   reference of a live object. Other operations take locks.

mod capabilities;
mod counter;
mod cpu;
pub mod fence;
#[cfg(doc)]
pub mod guide;
pub mod lglock;
pub mod rcu;
mod refcount;
mod rseq;
mod slots;
mod words;

pub use self::capabilities::{Capabilities, capabilities};
pub use self::counter::PerCpuCounter;
pub use self::cpu::{CpuId, current_cpu, possible_cpus};
pub use self::lglock::{LgLock, LockError};
#[doc(hidden)]
pub use self::refcount::RefBlock;
pub use self::refcount::{KillError, PercpuRef, Reference};
#[doc(hidden)] // for percpu-list
pub use self::rseq::cells;
pub use self::slots::PerCpu;
#[doc(inline)]
pub use offlock_sync::AllocError;
