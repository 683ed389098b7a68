//! The CPU of the calling thread.
//!
//! Every call tries three sources in this order:
//!
//! ```text
//!  rseq area: cpu_id < capacity? --no--> sched_getcpu() >= 0? --no--> the thread's own slot
//!        | yes                                | yes: modulo capacity     | modulo capacity
//!        v                                    v                          v
//!      CpuId                                CpuId                      CpuId
//! ```
//!
//! # Invariants
//!
//! 1. A `CpuId` made here is below [`Topology::capacity`](crate::Topology::capacity).
//! 2. `LIMIT` is 0 until `OFFSET` is written. It stays 0 if libc registered no rseq area.

#[doc(inline)]
pub use offlock_sync::CpuId;
use offlock_sync::native::OnceLock;
#[cfg(any(test, not(offlock_virtual_cpu)))]
use offlock_sync::native::atomic::{AtomicU32, Ordering};

use crate::starting::starting;
use crate::topology::topology;

/// Returns the CPU that the calling thread runs on.
///
/// The answer is a hint, since the thread may migrate before it is used. Choose a slot by it, and
/// let the slot's own lock or atomic decide. The index is always below
/// [`Topology::capacity`](crate::Topology::capacity).
///
/// If neither rseq nor `sched_getcpu` has an answer, each thread gets a slot number in turn and
/// keeps it. That is correct, but says nothing about the CPU.
///
/// ```
/// let cpu = offlock_percpu::current_cpu();
/// assert!(cpu.index() < offlock_percpu::topology().capacity());
/// ```
#[inline]
#[must_use]
pub fn current_cpu() -> CpuId {
    #[cfg(offlock_virtual_cpu)]
    return offlock_sync::virtual_cpu::current();
    #[cfg(not(offlock_virtual_cpu))]
    real_cpu()
}

#[cfg(not(offlock_virtual_cpu))]
#[inline(always)]
fn real_cpu() -> CpuId {
    #[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
    if let Some(cpu) = fast::current() {
        return cpu;
    }
    current_cpu_slow()
}

#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
mod fast {
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    use super::CpuId;
    use crate::rseq::Offset;
    use offlock_sync::native::atomic::{AtomicIsize, AtomicU32, Ordering};

    /// The capacity, or 0 if there is no area to read. Invariant 2.
    static LIMIT: AtomicU32 = AtomicU32::new(0);
    static OFFSET: AtomicIsize = AtomicIsize::new(0);

    /// Lets `current` read the area from now on.
    pub(super) fn publish(area: Offset, capacity: u32) {
        // Ordering: Relaxed; the store of `LIMIT` publishes it.
        OFFSET.store(area.to_raw(), Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire load in `current`; it carries `OFFSET`. No test
        // checks the pair: x86-64 orders two stores and two loads anyway, and a model has no area.
        LIMIT.store(capacity, Ordering::Release);
    }

    /// Returns the id in the calling thread's rseq area, if there is one.
    ///
    /// One branch: a limit of 0 refuses every id, so the id is read even before `publish`.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(super) fn current() -> Option<CpuId> {
        // Ordering: Acquire pairs with the Release in `publish`; it carries `OFFSET`.
        let limit = LIMIT.load(Ordering::Acquire);
        // Ordering: Relaxed; ordered by the load of `LIMIT`.
        let raw = OFFSET.load(Ordering::Relaxed);
        // SAFETY: `raw` is a value of `to_raw`, or still 0. In the second case `LIMIT` was read as
        // 0 (invariant 2), so `below` discards the id.
        let area = unsafe { Offset::from_raw(raw) };
        below(crate::rseq::cpu_id(area), limit)
    }

    /// Returns `id` if it is below `limit`. The ids -1 and -2 (as `u32`) never are.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(super) fn below(id: u32, limit: u32) -> Option<CpuId> {
        (id < limit).then_some(CpuId::new(id))
    }
}

#[cfg(offlock_virtual_cpu)]
pub(crate) use self::current_cpu as recent_cpu;
pub(crate) use crate::topology::capacity as possible;

/// The number of answers that [`recent_cpu`] gives for one call of `sched_getcpu`. A guess.
#[cfg(not(offlock_virtual_cpu))]
const REUSE_LIMIT: u32 = 32;

/// Returns a CPU that the calling thread was on lately, for slots that any CPU may change by
/// atomics.
///
/// The same as [`current_cpu`] if rseq keeps the id. Otherwise `sched_getcpu` would cost as much as
/// the atomic that follows, so one call serves [`REUSE_LIMIT`] answers.
#[cfg(not(offlock_virtual_cpu))]
#[inline]
pub(crate) fn recent_cpu() -> CpuId {
    use std::cell::Cell;

    std::thread_local! {
        // Nothing to drop, so it can be read at any point of a thread's exit.
        static LAST: Cell<(CpuId, u32)> = const { Cell::new((CpuId::new(0), 0)) };
    }
    #[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
    if let Some(cpu) = fast::current() {
        return cpu;
    }
    LAST.with(|last| {
        let (cpu, left) = match last.get() {
            (_, 0) => (current_cpu_slow(), REUSE_LIMIT),
            known => known,
        };
        last.set((cpu, left - 1));
        cpu
    })
}

/// Handles the first call of the process, a thread without an rseq id, and a process without rseq.
#[cfg(not(offlock_virtual_cpu))]
#[cold]
#[inline(never)]
fn current_cpu_slow() -> CpuId {
    let (source, _) = backend();
    #[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
    if source == Source::Rseq {
        // The first call of the process comes here although the area has an id.
        if let Some(cpu) = fast::current() {
            return cpu;
        }
    }
    let getcpu = if source == Source::ThreadSlot { -1 } else { getcpu() };
    without_rseq(getcpu, thread_slot, topology().capacity_u32())
}

/// Returns the slot of a thread whose rseq area has no id. `getcpu` is the result of
/// `sched_getcpu`.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn without_rseq(getcpu: i32, thread_slot: impl FnOnce() -> u32, capacity: u32) -> CpuId {
    let id = u32::try_from(getcpu).unwrap_or_else(|_| thread_slot());
    // A CPU that `/sys` did not list shares the slot of another CPU: slower, never out of bounds.
    CpuId::new(if id < capacity { id } else { id % capacity })
}

/// Returns the CPU as libc knows it, or a negative number.
pub(crate) fn getcpu() -> i32 {
    // SAFETY: takes no arguments and writes no memory of this program; it reports errors by -1.
    unsafe { libc::sched_getcpu() }
}

/// Returns the slot number of the calling thread, which never changes. Threads get their numbers in
/// turn, so that they spread evenly over the slots.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn thread_slot() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    std::thread_local! {
        // Ordering: Relaxed; only the values must differ, and they publish nothing.
        static SLOT: u32 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // Nothing to drop, so it can be read at any point of a thread's exit.
    SLOT.with(|slot| *slot)
}

/// The source of the ids that [`current_cpu`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The calling thread's rseq area. A thread without one uses `sched_getcpu`.
    Rseq,
    /// `sched_getcpu`.
    GetCpu,
    /// Neither works: each thread keeps a slot number of its own, given out in turn.
    ThreadSlot,
}

/// Returns whether this process reads rseq ids, and if not, why.
pub(crate) fn rseq_ids() -> Result<(), &'static str> {
    backend().1
}

/// Returns the source of CPU ids, and whether rseq is in use. The first call decides.
fn backend() -> (Source, Result<(), &'static str>) {
    static BACKEND: OnceLock<(Source, Result<(), &'static str>)> = OnceLock::new();
    let detect = || {
        let rseq = start_rseq();
        let source = match rseq {
            Ok(()) => Source::Rseq,
            _ if getcpu() >= 0 => Source::GetCpu,
            _ => Source::ThreadSlot,
        };
        (source, rseq)
    };
    *BACKEND.get().unwrap_or_else(|| starting(|| BACKEND.get_or_init(detect)))
}

/// Publishes the rseq area to `fast::current`, if there is one.
#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
fn start_rseq() -> Result<(), &'static str> {
    let area = crate::rseq::find()?;
    fast::publish(area, topology().capacity_u32());
    Ok(())
}

#[cfg(not(all(target_arch = "x86_64", not(offlock_portable))))]
fn start_rseq() -> Result<(), &'static str> {
    Err("not in this build")
}

#[cfg(test)]
mod tests;
