//! Asymmetric fences: the frequent side costs almost nothing, the rare side costs a system call.
//!
//! Two threads each store to one place and then load the other's place. If both run a full fence in
//! between, at least one thread sees the other's store. [`light`] and [`heavy`] give the same
//! guarantee, for a `light` and a `heavy` and for two `heavy`, at other prices. `light` only keeps
//! the compiler from moving the load before the store. `heavy` makes the kernel (`membarrier`,
//! private and expedited) run a full fence on every CPU that runs a thread of this process at that
//! moment.
//!
//! ```text
//!   reader                          writer
//!   store(active, 1)                store(pointer, new)
//!   light()                         heavy()
//!   load(pointer)                   load(active)          never the old pointer and inactive both
//! ```
//!
//! Two `light` order nothing between them, and neither side is an Acquire or a Release. The
//! orderings of the accesses themselves order the reads through the pointer.
//!
//! If the kernel refuses membarrier, both sides are `fence(SeqCst)`. The first call of `heavy` or
//! [`has_membarrier`] decides this for the process.

#[cfg(not(offlock_model))]
use crate::atomic::{Ordering, fence};

pub use self::imp::has_membarrier;
#[cfg(not(offlock_model))]
pub use self::imp::rseq_fence_works;

/// Orders accesses on the frequent side, against a [`heavy`] fence on the rare side: see the
/// [module](self). A load and a well-predicted branch are the only instructions.
#[inline(always)]
pub fn light() {
    imp::light();
}

/// The compiler fence that [`light`] is if `heavy` is a membarrier: for a path where it is known to
/// be one.
#[inline(always)]
pub fn compiler_fence() {
    #[cfg(offlock_model)]
    crate::virtual_fence::compiler_fence();
    #[cfg(not(offlock_model))]
    crate::native::atomic::compiler_fence(Ordering::SeqCst);
}

/// Orders accesses on the rare side, against the [`light`] fences of every thread: see the
/// [module](self).
///
/// Wait-free in user space: a system call. The kernel interrupts each other CPU that runs a thread of
/// this process, which takes some microseconds, and tens of them in a virtual machine.
///
/// # Aborts
///
/// Aborts the process if membarrier works at the first call and fails at a later one, because
/// readers have skipped their fences by then.
#[inline]
pub fn heavy() {
    imp::heavy();
}

/// Runs [`heavy`] and ends or restarts every restartable section of this crate.
///
/// A section that tested its gate before this call has committed, and the calling thread sees its
/// store. Or it starts again, and sees the gate as the calling thread left it. For a thread that
/// closes the gate of a `RefBlock`. Everything else is as for `heavy`.
#[inline]
pub fn heavy_rseq() {
    imp::heavy_rseq();
}

#[cfg(not(offlock_model))]
mod imp {
    use std::io;
    use std::process;

    use super::{Ordering, fence};
    use crate::native::atomic::{AtomicU8, compiler_fence};

    /// One of the constants below.
    static STATE: AtomicU8 = AtomicU8::new(UNDECIDED);
    const UNDECIDED: u8 = 0;
    const FENCES: u8 = 1;
    const MEMBARRIER: u8 = 2;
    const MEMBARRIER_RSEQ: u8 = 3;

    #[inline(always)]
    pub(super) fn light() {
        // Ordering: Relaxed; it publishes nothing. A thread that still reads UNDECIDED runs the
        // fence, which is correct with either `heavy`.
        if STATE.load(Ordering::Relaxed) >= MEMBARRIER {
            // No test checks it: today's compiler moves no atomic access that the tests make.
            compiler_fence(Ordering::SeqCst);
        } else {
            cold_path();
            fence(Ordering::SeqCst);
        }
    }

    /// Marks the branch that calls it as unlikely.
    #[cold]
    #[inline]
    fn cold_path() {}

    #[inline]
    pub(super) fn heavy() {
        match state() {
            // Ordering: SeqCst fence, against the fences in `light` and in this function: the loads
            // after the later of two fences see the stores before the earlier.
            FENCES => fence(Ordering::SeqCst),
            _ => membarrier_or_abort(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED),
        }
    }

    /// Sections run only if this command works: see `usable` in `rseq/x86_64.rs` of percpu.
    #[inline]
    pub(super) fn heavy_rseq() {
        match state() {
            MEMBARRIER_RSEQ => membarrier_or_abort(PRIVATE_EXPEDITED_RSEQ),
            _ => heavy(),
        }
    }

    /// Returns whether [`heavy_rseq`](super::heavy_rseq) restarts sections.
    pub fn rseq_fence_works() -> bool {
        state() == MEMBARRIER_RSEQ
    }

    /// Returns whether [`heavy`](super::heavy) is a membarrier in this process, and
    /// [`light`](super::light) a compiler fence. Otherwise both are sequentially consistent fences.
    ///
    /// Decided once, by the first call of this function or of `heavy`.
    pub fn has_membarrier() -> bool {
        state() != FENCES
    }

    // Not in libc: `linux/membarrier.h`, Linux 5.10.
    const PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 7;
    const REGISTER_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 8;

    #[inline]
    fn state() -> u8 {
        // Ordering: Relaxed; the state publishes nothing else.
        match STATE.load(Ordering::Relaxed) {
            UNDECIDED => decide(),
            decided => decided,
        }
    }

    /// Registers this process with the kernel and tests the commands.
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
        // If a seccomp filter is installed meanwhile, two threads may find different states. The
        // first one stays.
        // Ordering: Relaxed, both; the state publishes nothing else.
        match STATE.compare_exchange(UNDECIDED, found, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => found,
            Err(first) => first,
        }
    }

    fn membarrier(command: libc::c_int) -> io::Result<()> {
        // SAFETY: takes numbers and writes no memory of this program.
        let rc = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[inline]
    fn membarrier_or_abort(command: libc::c_int) {
        if let Err(error) = membarrier(command) {
            eprintln!("offlock: membarrier {command} worked before and fails now: {error}");
            process::abort();
        }
    }
}

/// The model checkers have no asymmetric fence: see [`virtual_fence`].
#[cfg(offlock_model)]
mod imp {
    pub(super) use crate::virtual_fence::light;
    use crate::{step, virtual_cpu, virtual_fence};

    pub(super) fn heavy() {
        step!("heavy: a full fence", virtual_fence::heavy());
    }

    /// `heavy`, after which every section that began before the call has committed.
    pub(super) fn heavy_rseq() {
        heavy();
        for cpu in 0..virtual_cpu::possible() {
            drop(virtual_cpu::alone_on(crate::CpuId::new(cpu as u32)));
        }
        heavy();
    }

    /// Returns whether `heavy` is a membarrier: as the model chose.
    pub fn has_membarrier() -> bool {
        virtual_fence::membarrier()
    }
}
