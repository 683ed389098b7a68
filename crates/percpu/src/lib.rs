//! Per-CPU state for user space on 64-bit Linux: the current CPU, one slot for each CPU, and
//! counters, references and locks whose common operations touch only the memory of the current CPU.
//!
//! ```
//! use offlock_percpu::{PerCpuCounter, PerCpu, rcu};
//!
//! static REQUESTS: PerCpuCounter = PerCpuCounter::new();
//!
//! REQUESTS.increment(); // no locked instruction, no shared cache line
//! assert_eq!(REQUESTS.sum(), 1);
//!
//! let buffers = PerCpu::new(|cpu| format!("buffer of {cpu}"));
//! println!("{}, {}", buffers.local(), offlock_percpu::capabilities());
//!
//! let config = rcu::Atomic::new(7);
//! assert_eq!(config.load(&rcu::pin()), &7); // a reader never waits, and writes its own cache line
//! ```
//!
//! The chapters of the [`guide`] explain sections, asymmetric fences and RCU with a picture each.
//!
//! | purpose | item | cheap | expensive |
//! |---|---|---|---|
//! | count events | [`PerCpuCounter`] | add | sum, which is exact when no add runs |
//! | keep an object alive until its last user | [`PercpuRef`] | get, put | kill |
//! | own one part, sometimes all parts | [`LgLock`] | the slot of the current CPU | all slots |
//! | read often, replace rarely | [`rcu`] | pin, load | waiting for readers |
//! | order two sides | [`fence`] | [`light`](fence::light) | [`heavy`](fence::heavy) |
//! | spread anything else over CPUs | [`PerCpu`], [`current_cpu`] | the slot of the current CPU | all slots |
//!
//! An add or a pin takes some nanoseconds or less, on one CPU and on two at once; for up to 64 threads a
//! simulation counts no cache-line transfer. A heavy fence takes microseconds. `cargo bench --bench percpu`
//! measures both beside the usual alternatives.
//!
//! # Requirements
//!
//! On x86_64 with glibc 2.35 or later, a *restartable sequence* changes a per-CPU word: a few
//! instructions that the kernel restarts if it takes the CPU away before the last one. So they need
//! no lock prefix. A thread that must stop these sections closes a gate and makes the kernel
//! (`membarrier`) restart those that run. If rseq or this `membarrier` command is missing, or
//! `GLIBC_TUNABLES=glibc.pthread.rseq=0` is set (as for programs that link tcmalloc), atomics
//! change the words: slower, with the same results. [`capabilities()`] returns what is in use, and
//! why the rest is not.
//!
//! Build switches, each `--cfg` in `RUSTFLAGS`: `offlock_portable` omits the assembly, as on every
//! other architecture. `offlock_no_membarrier` uses full fences on both sides.
//! `offlock_virtual_cpu` gives threads virtual CPUs, to simulate more CPUs than the machine has.
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
//! | the first [`rcu::pin`] of a thread, the first retired object | ends like `Box::new` |
//! | [`PerCpuCounter`] | allocates nothing; if the first add finds no memory, the counter works slowly; [`reserve`](PerCpuCounter::reserve) returns [`AllocError`] |
//!
//! - *A guard is forgotten* (`mem::forget`): its slot, lock or pin stays held for ever. Nothing is
//!   unsound.
//! - *A thread ends inside a guard*: slots belong to CPUs, so nothing dangles. A guard in a
//!   thread-local variable releases when the variable is destroyed.
//! - *A callback or a closure panics*: no lock stays held. The item says which thread sees the
//!   panic.
//! - *The process forks*: the child may only exec or exit.
//! - *A signal handler* may add to a counter that was used before, and get or put a reference of a
//!   live object. Other operations take locks.

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
mod starting;
mod words;

pub use self::capabilities::{Capabilities, capabilities};
pub use self::counter::PerCpuCounter;
pub use self::cpu::{CpuId, current_cpu, node_of, possible_cpus};
pub use self::lglock::{LgLock, LockError};
#[doc(hidden)]
pub use self::refcount::RefBlock;
pub use self::refcount::{KillError, PercpuRef, Reference};
#[doc(hidden)] // for percpu-list
pub use self::rseq::cells;
pub use self::slots::PerCpu;
#[doc(inline)]
pub use offlock_sync::AllocError;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
