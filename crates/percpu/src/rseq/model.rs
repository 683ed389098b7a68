//! Sections for the model checkers: plain loads and stores under the virtual CPU's mutex.
//!
//! The mutex stands for a guarantee of the kernel: two sections on one CPU never overlap, and the
//! second sees the store of the first. [`heavy_rseq`](crate::fence::heavy_rseq) takes every mutex
//! in turn. So a section that began before it has committed, and a section that begins later sees
//! the stores that the calling thread of `heavy_rseq` made before.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{check, virtual_cpu};

use super::Refused;
use crate::words::Words;

/// Returns whether this model runs sections.
pub(crate) fn state() -> Result<(), &'static str> {
    virtual_cpu::sections().then_some(()).ok_or("not in this model")
}

/// Adds `delta` (wrapping) to this CPU's word. With a gate, commits only if the gate has the value beside it.
pub(crate) fn add(
    gate: Option<(&AtomicU64, u64)>,
    words: &Words,
    delta: u64,
) -> Result<(), Refused> {
    if state().is_err() || !virtual_cpu::has_id() {
        return Err(Refused::WrongCpu);
    }
    let cpu = virtual_cpu::current();
    let _alone = virtual_cpu::alone_on(cpu);
    // Ordering: Acquire, as in the assembly. It pairs with the Release store that opens the
    // gate again, and carries the changes made while the gate was closed. The store that closes the
    // gate needs no partner here: `heavy_rseq` follows it.
    let is_open = |(gate, open): (&AtomicU64, u64)| {
        check!("section: its gate is open", gate.load(Ordering::Acquire) == open)
    };
    if !gate.is_none_or(is_open) {
        return Err(Refused::Closed);
    }
    let word = words.slot(cpu);
    // Ordering: as in the assembly. With a gate, Release pairs with the Acquire loads of a fold. Without, Relaxed:
    // a counter publishes no other memory.
    let order = if gate.is_some() { Ordering::Release } else { Ordering::Relaxed };
    word.store(word.load(Ordering::Relaxed).wrapping_add(delta), order);
    Ok(())
}
