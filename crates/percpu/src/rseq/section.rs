//! Restartable sequences (rseq critical sections) that change the word of the calling thread's CPU by
//! one plain store, without a lock prefix.
//!
//! Every section tests a gate first, and commits only if the gate is open. After a thread has closed
//! the gate and called [`heavy_rseq`](crate::fence::heavy_rseq), no section that began before can
//! commit.
//!
//! Preemption, migration, a signal and `heavy_rseq` restart a section. Another thread's access to the
//! word does not, so this crate calls a section wait-free.
//!
//! # Invariants
//!
//! 1. [`available`] returns the same answer for the life of the process, and is called before any
//!    word is changed. So in one process every word is changed by sections alone, or by atomic
//!    operations alone.

pub(crate) use super::operations::Refused;
use super::operations::{Added, Operations};
use crate::cpu::CpuId;
use crate::sync::atomic::AtomicU64;
use crate::words::Words;

#[cfg(any(offlock_loom, offlock_shuttle))]
#[path = "model.rs"]
mod imp;
#[cfg(all(
    target_arch = "x86_64",
    not(any(offlock_loom, offlock_shuttle, offlock_portable, offlock_virtual_cpu))
))]
#[path = "x86_64.rs"]
mod imp;
#[cfg(all(
    not(any(offlock_loom, offlock_shuttle)),
    any(not(target_arch = "x86_64"), offlock_portable, offlock_virtual_cpu)
))]
#[path = "portable.rs"]
mod imp;

/// Returns whether this process runs sections. The first call decides. Later calls cost a load and a
/// branch where sections run, and one more load elsewhere.
#[inline(always)]
pub(crate) fn available() -> bool {
    imp::available()
}

/// Returns the offset of the rseq area and the number of possible CPUs, if sections run in this
/// process.
#[cfg(all(
    target_arch = "x86_64",
    not(any(offlock_loom, offlock_shuttle, offlock_portable, offlock_virtual_cpu))
))]
pub(crate) fn area() -> Option<(isize, u32)> {
    imp::operations().map(imp::RseqOperations::area)
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

/// Adds `delta` to this CPU's word if the sum is strictly between `-bound` and `bound`. It
/// commits only if the value of `gate` is 0.
#[inline(always)]
pub(crate) fn add_within(gate: &AtomicU64, words: &Words, delta: i64, bound: i64) -> Added {
    imp::operations().ok_or(Refused::NoCpu)?.add_within(gate, words, delta, bound)
}

/// Stores `new` in this CPU's word and returns the CPU and the old value. It commits only if the
/// value of `gate` is 0.
#[inline(always)]
pub(crate) fn swap(gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
    imp::operations().ok_or(Refused::NoCpu)?.swap(gate, words, new)
}
