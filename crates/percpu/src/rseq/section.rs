//! The sections: what a thread can do to its CPU's word with one plain store.
//!
//! Every section tests a gate first and commits only while it reads 0, or in [`add_while`] what the
//! caller says, so that whoever closes the gate and then calls
//! [`heavy_rseq`](crate::fence::heavy_rseq) knows that no section begun before can still commit.
//!
//! A section is restarted at each interruption of its thread (preemption, migration, signal, the
//! barrier above) and by nothing that another thread does to the word, so it counts as wait-free.
//!
//! # Invariants
//!
//! 1. [`available`] gives the same answer for the life of the process, and is asked before any
//!    word is touched: a word is changed by sections and by nobody else, or by atomics only.

pub(crate) use super::operations::Refused;
use super::state::Sections;
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

/// True if this process runs sections. Decided once; a load and a branch after that.
#[inline(always)]
pub(crate) fn available() -> bool {
    imp::available()
}

/// Whether this process runs sections, and why not. Decided once.
pub(crate) fn state() -> Sections {
    *imp::state()
}

/// Adds `delta` (wrapping) to this CPU's word and tells which CPU that was.
#[inline(always)]
pub(crate) fn add(gate: &AtomicU64, words: &Words, delta: u64) -> Result<CpuId, Refused> {
    imp::add(gate, words, delta)
}

/// [`add`], but the gate is open while it reads `open`.
#[inline(always)]
pub(crate) fn add_while(
    gate: &AtomicU64,
    open: u64,
    words: &Words,
    delta: u64,
) -> Result<CpuId, Refused> {
    imp::add_while(gate, open, words, delta)
}

/// Adds `delta` to this CPU's word if the result is strictly between `-bound` and `bound`.
#[inline(always)]
pub(crate) fn add_within(
    gate: &AtomicU64,
    words: &Words,
    delta: i64,
    bound: i64,
) -> Result<CpuId, Refused> {
    imp::add_within(gate, words, delta, bound)
}

/// Stores `new` in this CPU's word and returns what was there.
#[inline(always)]
pub(crate) fn swap(gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
    imp::swap(gate, words, new)
}
