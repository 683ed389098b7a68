//! Whether this process runs sections, on the architectures that have assembly.
//!
//! # Invariants
//!
//! 1. `LIMIT` is 0 until the offset of the area is known and the self-test has passed. It stays 0 if no
//!    sections run.

use offlock_sync::asymmetric::rseq_fence_works;
use offlock_sync::atomic::AtomicU64;
use offlock_sync::native::OnceLock;
use offlock_sync::native::atomic::{AtomicU32, Ordering};

pub use self::sections::Sections;
use self::self_test::self_test;
use super::Refused;
use crate::cpu::{possible_cpus, rseq_ids};
use crate::words::Words;

#[cfg(target_arch = "aarch64")]
#[path = "aarch64.rs"]
mod arch;
#[cfg(target_arch = "x86_64")]
#[path = "x86_64.rs"]
mod arch;
#[path = "area.rs"]
pub(crate) mod area;
#[path = "sections.rs"]
mod sections;
#[path = "self_test.rs"]
mod self_test;

/// The number of possible CPUs, or 0 if no section may run. Invariant 1.
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// Returns whether this process runs sections, and if not, why. The first call decides. Later calls cost a
/// load and a branch where sections run, and one more load elsewhere.
#[inline(always)]
pub(crate) fn state() -> Result<(), &'static str> {
    // Ordering: Relaxed; `sections` loads `LIMIT` again, with Acquire, before it uses the offset.
    if LIMIT.load(Ordering::Relaxed) != 0 { Ok(()) } else { decide() }
}

/// Sections also run if the first call is on a thread that cannot test them. A thread without a CPU id
/// is none of libc's, and its sections all refuse. A helper thread would have no id either: glibc gives
/// a thread an id only if its parent has one.
fn decide() -> Result<(), &'static str> {
    static STATE: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *STATE.get_or_init(|| {
        let found = usable()?;
        self_test(|gate, words, delta| found.add(gate, words, delta)).unwrap_or(Ok(()))?;
        // Ordering: Release pairs with the Acquire in `sections`; it carries the offset. No test
        // checks the pair: the tests run on x86-64, which orders it anyway, and a model has no area.
        LIMIT.store(found.limit, Ordering::Release);
        Ok(())
    })
}

/// Returns the sections if the process has an rseq area and a barrier that restarts them.
fn usable() -> Result<Sections, &'static str> {
    rseq_ids()?;
    if !rseq_fence_works() {
        return Err("membarrier cannot restart them");
    }
    Ok(Sections { area: area::find()?, limit: possible_cpus() as u32 })
}

/// Adds `delta` (wrapping) to this CPU's word. With a gate, commits only if the gate has the value beside it.
#[inline(always)]
pub(crate) fn add(
    gate: Option<(&AtomicU64, u64)>,
    words: &Words,
    delta: u64,
) -> Result<(), Refused> {
    sections().ok_or(Refused::WrongCpu)?.add(gate, words, delta)
}

/// Returns the sections if they run in this process.
#[inline(always)]
fn sections() -> Option<Sections> {
    // Ordering: Acquire pairs with the Release in `decide`; it carries the offset.
    let limit = LIMIT.load(Ordering::Acquire);
    (limit != 0).then(|| Sections { area: area::offset(), limit })
}

impl Sections {
    /// Returns the sections, if they run in this process. The first call decides.
    pub fn find() -> Option<Self> {
        state().ok()?;
        sections()
    }
}

#[cfg(test)]
#[path = "cells_stress.rs"]
mod cells_stress;
#[cfg(test)]
#[path = "stress.rs"]
mod stress;
