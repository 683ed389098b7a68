//! Asymmetric fences: almost nothing on the frequent side, a system call on the rare side.
//!
//! Two threads each store to one place and then load the other's. With a full fence in between on
//! both sides at least one of them sees the other's store. [`light`] and [`heavy`] give the same
//! between a `light` and a `heavy` and between two `heavy`, at other prices: `light` only keeps the
//! compiler from moving the load before the store; `heavy` asks the kernel (`membarrier`, private
//! and expedited) to run a full fence on every CPU that runs a thread of this process right now.
//!
//! ```text
//!   reader                          writer
//!   store(active, 1)                store(pointer, new)
//!   light()                         heavy()
//!   load(pointer)                   load(active)          never old pointer and inactive both
//! ```
//!
//! Two `light` order nothing between them, and neither is an Acquire or a Release: what one side
//! reads through the pointer is ordered by the orderings of the accesses themselves.
//!
//! Where the kernel refuses membarrier, both are `fence(SeqCst)`; [`strategy`] tells, and is
//! decided once, at the first call of `heavy` or `strategy`.

use std::fmt;

use crate::sync::atomic::{Ordering, fence};

#[cfg(all(
    target_arch = "x86_64",
    not(any(offlock_loom, offlock_shuttle, offlock_portable, offlock_virtual_cpu))
))]
pub(crate) use self::imp::rseq_fence_works;
pub use self::imp::strategy;

/// How the pair is made in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strategy {
    /// `light` is a compiler fence, `heavy` a `membarrier` system call.
    Membarrier,
    /// Both are sequentially consistent fences: membarrier is missing or refused, or a model
    /// checker runs the code.
    Fences,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Membarrier => "membarrier",
            Self::Fences => "a fence on both sides",
        })
    }
}

/// The frequent side. Wait-free: no instruction but a load and a branch that is always predicted.
#[inline(always)]
pub fn light() {
    imp::light();
}

/// What [`light`] is where `heavy` is a membarrier: for a path that knows it is.
#[inline(always)]
pub(crate) fn compiler_fence() {
    // No checker reorders plain accesses of one thread, so none needs it in a model.
    crate::sync::native::atomic::compiler_fence(Ordering::SeqCst);
}

/// The rare side. Wait-free in user space; the kernel interrupts each CPU that runs a thread of
/// this process. If there is none it costs a system call, else some microseconds, tens of them in a
/// virtual machine (`cargo bench --bench percpu`, rows P7).
///
/// # Aborts
///
/// Aborts the process if membarrier works at the first call and fails at a later one: readers have
/// skipped their fences by then.
#[inline]
pub fn heavy() {
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    CALLS.set(CALLS.get() + 1);
    imp::heavy();
}

/// [`heavy`], after which no restartable section of this crate that tested its gate before can
/// commit any more: it has, and the caller sees what it stored, or it starts again and finds the
/// gate as the caller left it.
///
/// For whoever closes a gate of [`RefBlock`](crate::RefBlock). The progress and the price are those
/// of `heavy`, which is all it is where no sections run.
///
/// # Aborts
///
/// As [`heavy`].
#[doc(hidden)] // as is the only gate of a user's making
#[inline]
pub fn heavy_rseq() {
    #[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
    CALLS.set(CALLS.get() + 1);
    imp::heavy_rseq();
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
thread_local! {
    static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How many heavy fences this thread has asked for.
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
pub(crate) fn calls() -> u64 {
    CALLS.get()
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::io;
    use std::process;

    use super::{Ordering, Strategy, fence};
    use crate::sync::native::atomic::{AtomicU8, compiler_fence};

    /// One of the constants below.
    static STATE: AtomicU8 = AtomicU8::new(UNDECIDED);
    const UNDECIDED: u8 = 0;
    const FENCES: u8 = 1;
    const MEMBARRIER: u8 = 2;
    const MEMBARRIER_RSEQ: u8 = 3;

    #[inline(always)]
    pub(super) fn light() {
        // Ordering: Relaxed; it publishes nothing. A thread that still reads UNDECIDED runs the
        // fence, which is right beside either `heavy`.
        if STATE.load(Ordering::Relaxed) >= MEMBARRIER {
            compiler_fence(Ordering::SeqCst);
        } else {
            rare();
            fence(Ordering::SeqCst);
        }
    }

    /// Tells the compiler to keep what follows out of the way.
    #[cold]
    #[inline]
    fn rare() {}

    #[inline]
    pub(super) fn heavy() {
        match state() {
            // Ordering: SeqCst, against the same fence in `light`; whichever is first in the order
            // of all such fences, the stores before it are seen by the loads after the other.
            FENCES => fence(Ordering::SeqCst),
            _ => membarrier_or_abort(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED),
        }
    }

    /// Where sections run the command works: see `usable` in `rseq::section`.
    #[inline]
    pub(super) fn heavy_rseq() {
        match state() {
            MEMBARRIER_RSEQ => membarrier_or_abort(PRIVATE_EXPEDITED_RSEQ),
            _ => heavy(),
        }
    }

    /// Whether [`heavy_rseq`] restarts sections.
    #[cfg(all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))]
    pub(crate) fn rseq_fence_works() -> bool {
        state() == MEMBARRIER_RSEQ
    }

    /// Tells how [`light`](super::light) and [`heavy`](super::heavy) work in this process.
    pub fn strategy() -> Strategy {
        if state() == FENCES { Strategy::Fences } else { Strategy::Membarrier }
    }

    // Not in libc: `linux/membarrier.h`, Linux 5.10.
    const PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 7;
    const REGISTER_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 8;

    #[inline]
    fn state() -> u8 {
        // Ordering: Relaxed; the state is the whole message.
        match STATE.load(Ordering::Relaxed) {
            UNDECIDED => decide(),
            decided => decided,
        }
    }

    /// Registers this process with the kernel; every thread that decides finds the same.
    #[cold]
    fn decide() -> u8 {
        let works = |register, command| membarrier(register).is_ok() && membarrier(command).is_ok();
        let plain = !cfg!(offlock_no_membarrier)
            && works(
                libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED,
                libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED,
            );
        let rseq = plain && works(REGISTER_PRIVATE_EXPEDITED_RSEQ, PRIVATE_EXPEDITED_RSEQ);
        let found = match (plain, rseq) {
            (false, _) => FENCES,
            (true, false) => MEMBARRIER,
            (true, true) => MEMBARRIER_RSEQ,
        };
        // The first to decide wins, should a seccomp filter come up between two.
        // Ordering: Relaxed, both; as in `state`.
        match STATE.compare_exchange(UNDECIDED, found, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => found,
            Err(first) => first,
        }
    }

    fn membarrier(command: libc::c_int) -> io::Result<()> {
        // SAFETY: takes numbers and touches no memory of ours.
        let rc = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[inline]
    fn membarrier_or_abort(command: libc::c_int) {
        if let Err(error) = membarrier(command) {
            eprintln!("percpu: membarrier {command} worked before and fails now: {error}");
            process::abort();
        }
    }
}

/// The model checkers know no asymmetric fence: both sides are full ones.
#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    use super::{Ordering, Strategy, fence};
    use crate::sync::{cpu, mutant, virtual_cpu};

    pub(super) fn light() {
        // Ordering: SeqCst, against the fence in `heavy`.
        fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        if mutant("fence-heavy-is-nothing") {
            return;
        }
        // Ordering: SeqCst, against the fence in `light`.
        fence(Ordering::SeqCst);
    }

    /// `heavy`, and every section begun before has committed.
    pub(super) fn heavy_rseq() {
        heavy();
        for cpu in 0..cpu::possible() {
            drop(virtual_cpu::alone_on(crate::CpuId::new(cpu as u32)));
        }
        heavy();
    }

    /// Tells how `light` and `heavy` work: a model has fences on both sides.
    pub fn strategy() -> Strategy {
        Strategy::Fences
    }
}
