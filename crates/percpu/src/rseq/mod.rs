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
//! word does not, so this crate calls a section wait-free.
//!
//! ```text
//!  default, x86_64         sections in assembly                 (x86_64.rs)
//!  every other build       none: `available()` is false         (below)
//!  model checkers          one mutex per virtual CPU            (model.rs)
//! ```
//!
//! # Invariants
//!
//! 1. [`available`] returns the same answer for the life of the process, and is called before any
//!    word is changed. So in one process every word is changed by sections alone, or by atomic
//!    operations alone.

#[cfg(all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))]
pub(crate) mod area;
#[cfg(offlock_model)]
#[path = "model.rs"]
mod imp;
#[cfg(all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))]
#[path = "x86_64.rs"]
mod imp;

pub mod cells;

pub(crate) use self::imp::{add, available, count, state};

/// The reason why a section did not commit. A refused section has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "without sections `NoCpu` is the only refusal")]
pub(crate) enum Refused {
    /// No section can run: the thread has no CPU id, the process runs no sections, or that is not
    /// decided yet. Where sections are [`available`], the caller must add to an atomic of its own,
    /// never to the word.
    NoCpu,
    /// The value of the gate was not `open_value`.
    Closed,
}

/// Builds without sections. The compiler removes the code behind these.
#[cfg(all(
    any(not(target_arch = "x86_64"), offlock_portable, offlock_virtual_cpu),
    not(offlock_model)
))]
mod imp {
    use offlock_sync::atomic::AtomicU64;

    use super::Refused;
    use crate::words::Words;

    pub(crate) fn state() -> Result<(), &'static str> {
        Err(if cfg!(offlock_virtual_cpu) { "the CPUs are virtual" } else { "not in this build" })
    }

    #[inline(always)]
    pub(crate) fn available() -> bool {
        false
    }

    #[inline(always)]
    pub(crate) fn add(_: &AtomicU64, _: u64, _: &Words, _: u64) -> Result<(), Refused> {
        Err(Refused::NoCpu)
    }

    #[inline(always)]
    pub(crate) fn count(_: &Words, _: u64) -> Result<(), Refused> {
        Err(Refused::NoCpu)
    }
}
