//! Which CPU is this thread on?
//!
//! Three sources, tried in this order on every call:
//!
//! ```text
//!  rseq area: cpu_id < capacity? --no--> sched_getcpu() >= 0? --no--> a slot dealt to the thread
//!        | yes                                | yes: modulo capacity            |
//!        v                                    v                                 v
//!      CpuId                                CpuId                             CpuId
//! ```
//!
//! # Invariants
//!
//! 1. A `CpuId` made here is below [`Topology::capacity`](crate::Topology::capacity).
//! 2. `LIMIT` is 0 until `OFFSET` is written, and for ever where libc registered no rseq area.

use std::fmt;

pub use crate::cpu_id::CpuId;
use crate::starting::starting;
use crate::sync::native::OnceLock;
#[cfg(any(test, not(offlock_virtual_cpu)))]
use crate::sync::native::atomic::{AtomicU32, Ordering};
use crate::topology::topology;

/// Tells which CPU the calling thread runs on.
///
/// The thread may move before the caller looks at the answer, so it is a hint: use it to choose a
/// slot, and let the slot's own lock or atomic decide. Its index is always below
/// [`Topology::capacity`](crate::Topology::capacity).
///
/// Where neither rseq nor `sched_getcpu` has an answer, the thread gets a slot of its own, dealt
/// in turn, and keeps it: right, but blind to where it runs ([`Source::ThreadSlot`]).
///
/// Wait-free, except for the first call in a process (see the crate's page). Never allocates
/// after it.
#[inline]
#[must_use]
pub fn current_cpu() -> CpuId {
    #[cfg(offlock_virtual_cpu)]
    return crate::sync::virtual_cpu::current();
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
    use crate::sync::native::atomic::{AtomicIsize, AtomicU32, Ordering};

    /// The capacity, or 0 where there is no area to read. Invariant 2.
    static LIMIT: AtomicU32 = AtomicU32::new(0);
    static OFFSET: AtomicIsize = AtomicIsize::new(0);

    /// Lets `current` read the area from now on.
    pub(super) fn publish(area: Offset, capacity: u32) {
        // Ordering: Relaxed; the store of `LIMIT` publishes it.
        OFFSET.store(area.to_raw(), Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire loads in `area` and `current`; it carries
        // `OFFSET`.
        LIMIT.store(capacity, Ordering::Release);
    }

    /// The id in the calling thread's area, if there is one.
    ///
    /// One branch: a limit of 0 refuses every id, so the id is read before the limit is looked at.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(super) fn current() -> Option<CpuId> {
        // Ordering: Acquire pairs with the Release in `publish`; it carries `OFFSET`.
        let limit = LIMIT.load(Ordering::Acquire);
        // Ordering: Relaxed; ordered by the load of `LIMIT`.
        let raw = OFFSET.load(Ordering::Relaxed);
        // SAFETY: by invariant 2 either what `to_raw` gave, or still 0, which may be read as well.
        let area = unsafe { Offset::from_raw(raw) };
        below(crate::rseq::cpu_id(area), limit)
    }

    /// One compare rejects -1, -2 (as `u32`) and whatever is too large for the slots.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(super) fn below(id: u32, limit: u32) -> Option<CpuId> {
        (id < limit).then_some(CpuId::new(id))
    }
}

/// How often [`recent_cpu`] gives an answer before it asks again. A guess: the question is 1/32 of
/// what it was, and a thread that moved shares a slot for 32 operations at most.
#[cfg(not(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu)))]
const RECENT: u32 = 32;

/// A CPU that this thread was on lately, for slots that any CPU may change by atomics.
///
/// As [`current_cpu`] where rseq keeps the id. Elsewhere `sched_getcpu` would cost as much as the
/// atomic that follows, so it is asked once in [`RECENT`] times.
#[cfg(not(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu)))]
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
            (_, 0) => (current_cpu_slow(), RECENT),
            known => known,
        };
        last.set((cpu, left - 1));
        cpu
    })
}

/// Everything but the rseq area: the first call, a thread without an id, a process without rseq.
#[cfg(not(offlock_virtual_cpu))]
#[cold]
#[inline(never)]
fn current_cpu_slow() -> CpuId {
    let source = backend().source();
    #[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
    if source == Source::Rseq {
        // The first call of the process comes here although the area is good.
        if let Some(cpu) = fast::current() {
            return cpu;
        }
    }
    let getcpu = if source == Source::ThreadSlot { -1 } else { getcpu() };
    without_rseq(getcpu, dealt, topology().capacity_u32())
}

/// The slot for a thread whose rseq area has no id, given what `sched_getcpu` returned.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn without_rseq(getcpu: i32, dealt: impl FnOnce() -> u32, capacity: u32) -> CpuId {
    let id = u32::try_from(getcpu).unwrap_or_else(|_| dealt());
    // A CPU beyond what `/sys` promised shares the slot of another: slower, never out of bounds.
    CpuId::new(if id < capacity { id } else { id % capacity })
}

/// The CPU from libc, or a negative number.
pub(crate) fn getcpu() -> i32 {
    // SAFETY: takes no arguments and touches no memory of ours; it reports errors by -1.
    unsafe { libc::sched_getcpu() }
}

/// A number that this thread keeps; threads get them in turn, so that they spread evenly.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn dealt() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    std::thread_local! {
        // Ordering: Relaxed; only the values must differ, and they publish nothing.
        static MINE: u32 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // Nothing to drop, so it can be read at any point of a thread's exit.
    MINE.with(|mine| *mine)
}

/// Where [`current_cpu`] gets its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The calling thread's rseq area; a thread that has none asks `sched_getcpu`.
    Rseq,
    /// `sched_getcpu`.
    GetCpu,
    /// Neither works: each thread keeps a slot dealt to it in turn.
    ThreadSlot,
}

/// Whether restartable sequences are in use, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RseqState {
    /// libc registered an area for its threads, and we read it.
    InUse,
    /// This build has no assembly for it: another architecture, or `--cfg offlock_portable`.
    NotBuilt,
    /// libc does not offer it: glibc before 2.35, or another libc.
    NoSymbols,
    /// libc offers it and registered nothing: `GLIBC_TUNABLES=glibc.pthread.rseq=0`, or the kernel
    /// refused.
    NotRegistered,
    /// libc registered an area too small to hold a CPU id: its size in bytes.
    TooSmall(u32),
}

impl fmt::Display for RseqState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("in use"),
            Self::NotBuilt => f.write_str("not in this build"),
            Self::NoSymbols => f.write_str("not offered by libc"),
            Self::NotRegistered => f.write_str("not registered by libc (switched off or refused)"),
            Self::TooSmall(size) => write!(f, "libc's area is too small ({size} bytes)"),
        }
    }
}

/// What [`current_cpu`] uses in this process, and why; `Display` gives one line for a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    source: Source,
    rseq: RseqState,
}

impl Backend {
    /// Where the answer comes from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// Whether rseq is in use, and why not.
    #[must_use]
    pub fn rseq(&self) -> RseqState {
        self.rseq
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            Source::Rseq => "rseq",
            Source::GetCpu => "sched_getcpu",
            Source::ThreadSlot => "a slot per thread, since sched_getcpu fails",
        };
        write!(f, "CPU id from {source}; rseq {}", self.rseq)
    }
}

/// Tells where [`current_cpu`] gets its answer in this process, and why.
///
/// Decided once. The first call reads `/sys`, allocates, and makes callers of the same moment wait.
pub fn backend() -> Backend {
    static BACKEND: OnceLock<Backend> = OnceLock::new();
    *BACKEND.get().unwrap_or_else(|| starting(|| BACKEND.get_or_init(detect)))
}

fn detect() -> Backend {
    let rseq = start_rseq();
    let source = match rseq {
        RseqState::InUse => Source::Rseq,
        _ if getcpu() >= 0 => Source::GetCpu,
        _ => Source::ThreadSlot,
    };
    Backend { source, rseq }
}

/// Makes `fast::current` answer, where it can.
#[cfg(all(target_arch = "x86_64", not(offlock_portable)))]
fn start_rseq() -> RseqState {
    use crate::rseq::{Absent, find};

    match find() {
        Ok(area) => {
            fast::publish(area, topology().capacity_u32());
            RseqState::InUse
        }
        Err(Absent::NoSymbols) => RseqState::NoSymbols,
        Err(Absent::Size(0)) => RseqState::NotRegistered,
        Err(Absent::Size(size)) => RseqState::TooSmall(size),
    }
}

#[cfg(not(all(target_arch = "x86_64", not(offlock_portable))))]
fn start_rseq() -> RseqState {
    RseqState::NotBuilt
}

#[cfg(test)]
mod tests;
