//! Per-CPU building blocks for 64-bit Linux: which CPU am I on, which CPUs and memory nodes are
//! there.
//!
//! ```
//! use percpu::{current_cpu, topology};
//!
//! // One slot for every CPU that this machine may ever have.
//! let mut hits = vec![0_u64; topology().capacity()];
//! let cpu = current_cpu();
//! hits[cpu.index()] += 1; // in bounds, whatever the kernel says
//! println!("{cpu} on {}: {}", topology().node_of(cpu), percpu::backend());
//! ```
//!
//! [`current_cpu`] costs about as much as a thread-local read where the kernel's restartable
//! sequences (rseq) keep the id up to date, and a call of `sched_getcpu` elsewhere; [`backend`]
//! tells which, and why. The answer may be out of date before the caller looks at it: it is a
//! hint that spreads work, and a lock or an atomic still guards the slot.
//!
//! Progress, unless an item says otherwise: wait-free, no allocation. The first call of
//! [`topology()`], [`backend`] or [`current_cpu`] in a process reads `/sys` and allocates; threads
//! that call at the same time wait for it.
//!
//! `--cfg offlock_portable` builds without the x86_64 assembly, as for every other architecture.

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
#[doc(hidden)]
pub mod sync;
mod topology;
mod words;

pub use self::capabilities::{Capabilities, RseqUnavailable, Sections, capabilities, require_rseq};
pub use self::counter::{PerCpuCounter, RevokedSlot};
pub use self::cpu::{Backend, CpuId, RseqState, Source, backend, current_cpu};
pub use self::cpulist::{CpuList, CpuListError};
pub use self::error::{AllocError, Forked};
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
