//! Restartable sequences (rseq): the CPU id that the kernel keeps for each thread, and sections that
//! change the word of that CPU by one plain store, without a lock prefix.
//!
//! A section is a few instructions that end in one store. If the thread migrates, is preempted or
//! takes a signal before that store, the kernel restarts the section. So no other thread runs on
//! this CPU between the first instruction and the store, and the store needs no lock prefix. A
//! section with a gate tests it first, and commits only if the gate is open. After a thread has
//! closed the gate and called [`heavy_rseq`](crate::fence::heavy_rseq), no section that began before
//! can commit.
//!
//! Preemption, migration, a signal and `heavy_rseq` restart a section. Another thread's access to the
//! word does not, so this crate calls a section wait-free. The sections of percpu-list on aarch64 that end in a
//! store-exclusive also restart when another CPU writes to that cache line.
//!
//! ```text
//!  x86_64, aarch64         sections in assembly                 (native.rs, x86_64.rs, aarch64.rs)
//!  every other build       none: `available()` is false         (portable.rs)
//!  model checkers          one mutex per virtual CPU            (model.rs)
//! ```
//!
//! # Invariants
//!
//! 1. [`available`] returns the same answer for the life of the process, and is called before any
//!    word is changed. So in one process every word is changed by sections alone, or by atomic
//!    operations alone.

pub mod cells;
#[cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(offlock_portable, offlock_virtual_cpu))
))]
#[path = "native.rs"]
mod imp;
#[cfg(all(
    not(offlock_model),
    any(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        offlock_portable,
        offlock_virtual_cpu
    )
))]
#[path = "portable.rs"]
mod imp;
#[cfg(offlock_model)]
#[path = "model.rs"]
mod imp;

#[cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(offlock_portable, offlock_virtual_cpu))
))]
pub(crate) use self::imp::area;
pub(crate) use self::imp::{add, state};

/// Returns whether this process runs sections. The first call decides.
#[inline(always)]
pub(crate) fn available() -> bool {
    state().is_ok()
}

/// The reason why a section did not commit. It has changed nothing that another thread may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The section must run on another CPU. Or none can run: the thread has no CPU id, the process runs no
    /// sections, or that is not decided yet. Where sections are `available`, the caller must then add to an
    /// atomic of its own, never to a word.
    WrongCpu,
    /// The gate is closed. In a list: there is a snapshot, the list is closed, or a walk has marked the entry.
    Closed,
    /// The current block of a list seems full.
    NoRoom,
}
