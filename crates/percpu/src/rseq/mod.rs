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
//!  every other build       none: `available()` is false         (portable.rs)
//!  model checkers          one mutex per virtual CPU            (model.rs)
//! ```
//!
//! # Invariants
//!
//! 1. [`available`] returns the same answer for the life of the process, and is called before any
//!    word is changed. So in one process every word is changed by sections alone, or by atomic
//!    operations alone.

use offlock_sync::atomic::AtomicU64;

use crate::words::Words;

#[cfg(all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))]
pub(crate) mod area;
#[cfg(offlock_model)]
#[path = "model.rs"]
mod imp;
#[cfg(all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))]
#[path = "x86_64.rs"]
mod imp;
#[cfg(all(
    any(not(target_arch = "x86_64"), offlock_portable, offlock_virtual_cpu),
    not(offlock_model)
))]
#[path = "portable.rs"]
mod imp;

pub mod cells;
mod operations;

pub(crate) use self::operations::Refused;
use self::operations::{Added, Operations};

/// Returns whether this process runs sections. The first call decides. Later calls cost a load and a
/// branch where sections run, and one more load elsewhere.
#[inline(always)]
pub(crate) fn available() -> bool {
    imp::available()
}

/// Returns whether this process runs sections, and if not, why. The first call decides.
pub(crate) fn state() -> Result<(), &'static str> {
    imp::state()
}

/// Adds `delta` (wrapping) to this CPU's word and returns the CPU. It commits
/// only if the value of `gate` is `open_value`.
#[inline(always)]
pub(crate) fn add(gate: &AtomicU64, open_value: u64, words: &Words, delta: u64) -> Added {
    imp::operations().ok_or(Refused::NoCpu)?.add(gate, open_value, words, delta)
}

/// Adds `delta` (wrapping) to this CPU's word, which has no gate, and returns the CPU.
#[inline(always)]
pub(crate) fn count(words: &Words, delta: u64) -> Added {
    imp::operations().ok_or(Refused::NoCpu)?.count(words, delta)
}
