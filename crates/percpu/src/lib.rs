//! Per-CPU state for 64-bit Linux, in user space: which CPU am I on, one slot for each, and the
//! structures that stay on their own CPU until somebody needs the whole.
//!
//! ```
//! use percpu::{PerCpuCounter, PerCpu, rcu};
//!
//! static REQUESTS: PerCpuCounter = PerCpuCounter::new();
//!
//! REQUESTS.increment(); // about 2 ns, no locked instruction, no shared cache line
//! assert_eq!(REQUESTS.sum(), 1);
//!
//! let buffers = PerCpu::new(|cpu| format!("buffer of {cpu}"));
//! println!("{}, {}", buffers.local(), percpu::capabilities());
//!
//! let config = rcu::Atomic::new(7);
//! assert_eq!(config.load(&rcu::pin()), Some(&7)); // a reader never waits, and writes its own line
//! ```
//!
//! | to | there is | cheap | dear |
//! |---|---|---|---|
//! | count | [`PerCpuCounter`], [`LimitedCounter`] | add | exact sum, last units below a limit |
//! | keep alive until the last user | [`PercpuRef`] | get, put | kill |
//! | own a part, sometimes the whole | [`LgLock`], [`BiasedLgLock`] | the own CPU's slot | all slots |
//! | read much, write seldom, in place | [`ReadWriteGate`] | read | write |
//! | read much, replace seldom | [`rcu`] | pin, load | waiting for readers |
//! | order two sides | [`fence`] | [`light`](fence::light) | [`heavy`](fence::heavy) |
//! | avoid allocation | [`cache`] | take, put | |
//! | spread anything else | [`PerCpu`], [`current_cpu`], [`topology()`] | the own slot | all slots |
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
//! Progress, unless an item says otherwise: wait-free, no allocation. The first use in a process
//! reads `/sys`, registers with `membarrier` and tests the sections; it allocates, and threads that
//! come at the same time wait for it.
//!
//! - *A guard is forgotten* (`mem::forget`): what it held stays held, for ever; nothing is unsound.
//! - *A thread ends inside a guard*: slots belong to CPUs, so nothing dangles; a guard in a
//!   thread-local variable releases when that is destroyed.
//! - *A callback or a closure panics*: no lock is left held; the item says who sees the panic.
//! - *The process forks*: counts and references go on in the child; who would have to wait there for
//!   a thread that does not exist gets [`Forked`] instead ([`fork`]). A `vfork` child must not call
//!   anything here.
//! - *A signal handler* may add to a counter that was used before, and get or put a reference of a
//!   live object; the rest takes locks.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("percpu supports 64-bit Linux only: it needs rseq, membarrier and sysfs");

pub mod cache;
mod capabilities;
mod counter;
mod cpu;
mod cpulist;
mod error;
pub mod fence;
pub mod fork;
mod gate;
pub mod lglock;
mod limited;
pub mod rcu;
mod refcount;
mod rseq;
pub mod slots;
mod starting;
#[doc(hidden)]
pub mod sync;
mod topology;
mod unwind;
mod words;

pub use self::capabilities::{Capabilities, RseqUnavailable, Sections, capabilities, require_rseq};
pub use self::counter::{PerCpuCounter, RevokedSlot};
pub use self::cpu::{Backend, CpuId, RseqState, Source, backend, current_cpu};
pub use self::cpulist::{CpuList, CpuListError, CpuListIter};
pub use self::error::{AllocError, Forked, NewError};
pub use self::gate::{GateError, ReadGuard, ReadWriteGate, WriteGuard};
pub use self::lglock::{BiasedLgLock, LgLock, LockError};
pub use self::limited::{LimitError, LimitedCounter};
pub use self::refcount::{
    KillError, PercpuRef, Reference, ReinitError, ReinitRefused, ResurrectError,
};
pub use self::slots::PerCpu;
pub use self::topology::{NodeId, Topology, online, topology};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
