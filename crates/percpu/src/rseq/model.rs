//! Sections for the model checkers: plain loads and stores under the virtual CPU's mutex.
//!
//! The mutex stands for a guarantee of the kernel: two sections on one CPU never overlap, and the
//! second sees the store of the first. [`heavy_rseq`](crate::fence::heavy_rseq) takes every mutex
//! in turn. So a section that began before it has committed, and a section that begins later sees
//! the stores that the calling thread of `heavy_rseq` made before.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{check, virtual_cpu};

use crate::cpu::CpuId;
use crate::rseq::operations::{Added, Operations, Refused};
use crate::words::Words;

pub(super) fn state() -> Result<(), &'static str> {
    available().then_some(()).ok_or("not in this model")
}

pub(super) fn available() -> bool {
    virtual_cpu::sections()
}

/// Returns the operations if sections run in this model and the calling thread has a CPU id.
pub(super) fn operations() -> Option<VirtualCpus> {
    (available() && virtual_cpu::has_id()).then_some(VirtualCpus)
}

/// The operations on the virtual CPUs.
pub(super) struct VirtualCpus;

/// Runs `f` on this CPU's word under the mutex of the CPU, if the value of the gate is `open_value`.
fn section<R>(
    gate: &AtomicU64,
    open_value: u64,
    words: &Words,
    f: impl FnOnce(CpuId, &AtomicU64) -> Result<R, Refused>,
) -> Result<R, Refused> {
    let cpu = virtual_cpu::current();
    let _alone = virtual_cpu::alone_on(cpu);
    // Ordering: Acquire, as every load is on x86_64. It pairs with the Release store that opens the
    // gate again, and carries the changes made while the gate was closed. The store that closes the
    // gate needs no partner here: `heavy_rseq` follows it.
    if !check!("section: its gate is open", gate.load(Ordering::Acquire) == open_value) {
        return Err(Refused::Closed);
    }
    f(cpu, words.slot(cpu))
}

impl Operations for VirtualCpus {
    fn add(&self, gate: &AtomicU64, open_value: u64, words: &Words, delta: u64) -> Added {
        section(gate, open_value, words, |cpu, word| {
            word.store(word.load(Ordering::Relaxed).wrapping_add(delta), Ordering::Release);
            Ok(cpu)
        })
    }

    fn add_within(&self, gate: &AtomicU64, words: &Words, delta: i64, bound: i64) -> Added {
        section(gate, 0, words, |cpu, word| {
            let sum = (word.load(Ordering::Relaxed) as i64).wrapping_add(delta);
            if sum <= -bound || sum >= bound {
                return Err(Refused::OutOfRange);
            }
            word.store(sum as u64, Ordering::Release);
            Ok(cpu)
        })
    }

    fn swap(&self, gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
        section(gate, 0, words, |cpu, word| {
            let old = word.load(Ordering::Relaxed);
            word.store(new, Ordering::Release);
            Ok((cpu, old))
        })
    }
}
