//! Per-CPU state for 64-bit Linux, in user space: which CPU am I on, one slot for each, and the
//! structures that stay on their own CPU until somebody needs the whole.
//!
//! ```
//! use percpu::{PerCpuCounter, PerCpu, rcu};
//!
//! static REQUESTS: PerCpuCounter = PerCpuCounter::new();
//!
//! REQUESTS.increment(); // no locked instruction, no shared cache line
//! assert_eq!(REQUESTS.sum(), 1);
//!
//! let buffers = PerCpu::new(|cpu| format!("buffer of {cpu}"));
//! println!("{}, {}", buffers.local(), percpu::capabilities());
//!
//! let config = rcu::Atomic::new(7);
//! assert_eq!(config.load(&rcu::pin()), &7); // a reader never waits, and writes its own line
//! ```
//!
//! | to | there is | cheap | dear |
//! |---|---|---|---|
//! | count | [`PerCpuCounter`] | add | exact sum |
//! | keep alive until the last user | [`PercpuRef`] | get, put | kill |
//! | own a part, sometimes the whole | [`LgLock`] | the own CPU's slot | all slots |
//! | read much, write seldom, in place | [`ReadWriteGate`] | read | write |
//! | read much, replace seldom | [`rcu`] | pin, load | waiting for readers |
//! | order two sides | [`fence`] | [`light`](fence::light) | [`heavy`](fence::heavy) |
//! | spread anything else | [`PerCpu`], [`current_cpu`], [`topology()`] | the own slot | all slots |
//!
//! What that costs, against what a program would use instead: `cargo bench --bench percpu` (rows P2
//! for the counter, P3 for references, P4 for locks, P5 and P6 for RCU, P8 for all of them without
//! rseq). An add or a pin is some nanoseconds or less, on as many CPUs as there are; a heavy fence is
//! microseconds.
//!
//! # What it runs on
//!
//! On x86_64 with glibc 2.35 or later, a per-CPU word is changed by a *restartable sequence*: a few
//! instructions that the kernel starts again if it takes the CPU away before the last, so they need
//! no lock prefix. Whoever must stop them closes a gate and asks the kernel (`membarrier`) to restart
//! what is running. Where one of the two is missing, or `GLIBC_TUNABLES=glibc.pthread.rseq=0` says so
//! (as programs that link tcmalloc do), words are changed by atomics: slower, with the same results.
//! [`capabilities`] tells what is in use and why, [`require_rseq`] insists.
//!
//! Build switches, each `--cfg` in `RUSTFLAGS`: `offlock_portable` leaves the assembly out, as on
//! every other architecture; `offlock_no_membarrier` fences on both sides; `offlock_virtual_cpu` gives
//! threads made-up CPUs, to simulate more than there are.
//!
//! # What holds everywhere
//!
//! Progress, unless an item says otherwise: wait-free, no allocation. *Wait-free* includes sections: a
//! thread starts one again only because the kernel interrupted it, never because of what another
//! thread does; who is interrupted every few nanoseconds makes no progress anywhere.
//!
//! The first use in a process reads `/sys`, registers with `membarrier` and tests the sections; it
//! allocates (and ends like `Box::new` if it cannot), and threads that come at the same time wait for
//! it. [`capabilities`] does it at a moment of your choice.
//!
//! Memory is 8 bytes per CPU for what counts, in chunks of 8,192 words per CPU. A chunk is address
//! space until it is used: its first word takes one page (4 KiB) for each possible CPU, the next 511
//! words no more. Words go back to the pool, chunks never to the system.
//!
//! | out of memory | `new` | `try_new` |
//! |---|---|---|
//! | [`PerCpu`], [`LgLock`] | ends like `Box::new` ([`handle_alloc_error`](std::alloc::handle_alloc_error)) | [`AllocError`] |
//! | [`PercpuRef`], [`ReadWriteGate`] | [`NewError`] with what it was given | |
//! | [`PerCpuCounter`] | allocates nothing; its first add may find nothing and works, slowly | [`reserve`](PerCpuCounter::reserve): [`AllocError`] |
//!
//! - *A guard is forgotten* (`mem::forget`): what it held stays held, for ever; nothing is unsound.
//! - *A thread ends inside a guard*: slots belong to CPUs, so nothing dangles; a guard in a
//!   thread-local variable releases when that is destroyed.
//! - *A callback or a closure panics*: no lock is left held; the item says who sees the panic.
//! - *The process forks*: the child may only exec or exit.
//! - *A signal handler* may add to a counter that was used before, get or put a reference of a live
//!   object, and use the `try_` methods of an [`LgLock`] that was used before ([`lglock`]); the rest
//!   takes locks.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("percpu supports 64-bit Linux only: it needs rseq, membarrier and sysfs");

// For the tests' shared files, which name the crate as its users do.
#[cfg(test)]
extern crate self as percpu;

#[doc(hidden)]
pub mod alloc;
mod capabilities;
mod counter;
mod cpu;
mod cpu_id;
mod cpulist;
mod error;
pub mod fence;
mod gate;
pub mod lglock;
mod park;
pub mod rcu;
mod refcount;
mod rseq;
pub mod slots;
mod starting;
#[doc(hidden)]
pub mod sync;
mod topology;
mod unwind;
mod word_lock;
mod words;

pub use self::capabilities::{Capabilities, RseqUnavailable, capabilities, require_rseq};
pub use self::counter::PerCpuCounter;
pub use self::cpu::{Backend, CpuId, RseqState, Source, backend, current_cpu};
pub use self::cpulist::{CpuList, CpuListError, CpuListIter};
pub use self::error::{AllocError, NewError};
pub use self::gate::{GateError, ReadGuard, ReadWriteGate, WriteGuard};
pub use self::lglock::{LgLock, LockError};
#[doc(hidden)]
pub use self::refcount::RefBlock;
pub use self::refcount::{
    ArcReference, KillError, PercpuRef, Reference, ReinitError, ReinitRefused, ResurrectError,
};
pub use self::rseq::state::Sections;
pub use self::slots::PerCpu;
pub use self::topology::{NodeId, Topology, online, topology};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
