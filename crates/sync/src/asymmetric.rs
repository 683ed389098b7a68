//! Asymmetric fences: the frequent side costs almost nothing, the rare side costs a system call.
//! The documentation of `offlock_percpu::fence`, which exports them, has the guarantee and a picture.

#[cfg(not(offlock_model))]
use crate::atomic::{Ordering, fence};

#[cfg(not(offlock_model))]
pub use self::imp::rseq_fence_works;
pub use self::imp::{has_membarrier, heavy, heavy_rseq, light};

/// The compiler fence that [`light`] is if `heavy` is a membarrier: for a path where it is known to
/// be one.
#[inline(always)]
pub fn compiler_fence() {
    #[cfg(offlock_model)]
    crate::virtual_fence::compiler_fence();
    #[cfg(not(offlock_model))]
    crate::native::atomic::compiler_fence(Ordering::SeqCst);
}

#[cfg(not(offlock_model))]
mod imp {
    use std::io::{self, Write};
    use std::process;

    use super::{Ordering, fence};
    use crate::native::atomic::{AtomicU8, compiler_fence};

    /// One of the constants below.
    static STATE: AtomicU8 = AtomicU8::new(UNDECIDED);
    const UNDECIDED: u8 = 0;
    const FENCES: u8 = 1;
    const MEMBARRIER: u8 = 2;
    const MEMBARRIER_RSEQ: u8 = 3;

    /// Orders accesses on the frequent side, against a [`heavy`] fence on the rare side: see the
    /// [module](super). A load and a well-predicted branch are the only instructions.
    #[inline(always)]
    pub fn light() {
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

    /// Orders accesses on the rare side, against the [`light`] fences of every thread: see the
    /// [module](super).
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
        match state() {
            // Ordering: SeqCst fence, against the fences in `light` and in this function: the loads
            // after the later of two fences see the stores before the earlier.
            FENCES => fence(Ordering::SeqCst),
            _ => membarrier_or_abort(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED),
        }
    }

    /// Runs [`heavy`] and ends or restarts every restartable section of this crate.
    ///
    /// A section that tested its gate before this call has committed, and the calling thread sees its
    /// store. Or it starts again, and sees the gate as the calling thread left it. For a thread that
    /// closes the gate of a `RefBlock`. Everything else is as for `heavy`. Sections run only if this
    /// command works.
    #[inline]
    pub fn heavy_rseq() {
        match state() {
            MEMBARRIER_RSEQ => membarrier_or_abort(PRIVATE_EXPEDITED_RSEQ),
            _ => heavy(),
        }
    }

    /// Returns whether [`heavy_rseq`] restarts sections.
    pub fn rseq_fence_works() -> bool {
        state() == MEMBARRIER_RSEQ
    }

    /// Returns whether [`heavy`] is a membarrier in this process, and [`light`] a compiler fence.
    /// Otherwise both are sequentially consistent fences.
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
            // Not by `eprintln!`, which unwinds if the message cannot be written.
            let _ = writeln!(
                io::stderr(),
                "offlock: membarrier {command} worked before and fails now: {error}"
            );
            process::abort();
        }
    }
}

/// The model checkers have no asymmetric fence.
#[cfg(offlock_model)]
mod imp {
    use super::virtual_fence;
    pub use super::virtual_fence::light;
    use crate::{step, virtual_cpu};

    /// As in a normal build.
    pub fn heavy() {
        step!("heavy: a full fence", virtual_fence::heavy());
    }

    /// `heavy`, after which every section that began before the call has committed.
    pub fn heavy_rseq() {
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

#[cfg(offlock_model)]
pub mod virtual_fence {
    //! Asymmetric fences for models.
    //!
    //! A model runs with one of the two strategies of [`asymmetric`](super):
    //!
    //! - Membarrier, like most programs, in [`with_membarrier`]. Each thread has a *token*, an atomic. [`light`] is a
    //!   read-modify-write of the calling thread's token, and [`heavy`] one of every token. So a `light`
    //!   and a `heavy` are ordered by the token of the thread that calls `light`, and two `heavy` by the
    //!   tokens of all threads. Two `light` of different threads have no token in common, so nothing
    //!   orders them.
    //! - Fences on both sides, elsewhere: both are `fence(SeqCst)`. loom orders any two such fences, and whatever
    //!   precedes the first happens before whatever follows the second. A fence of loom is also not a
    //!   point at which the schedule may change: no thread runs between a fence and the access before
    //!   it. So a model with this strategy cannot fail for some bugs that a program with it has.
    //!
    //! A read-modify-write of a token also synchronises, which a compiler fence and a membarrier do not.
    //! So a model may miss that an access beside a fence must be a Release or an Acquire, if each of its
    //! runs orders the two threads by a token. Sometimes a token also orders two `light` with a `heavy`
    //! between them, which is more than the kernel promises.
    //!
    //! shuttle is sequentially consistent. There the strategies differ only in the paths that a program
    //! takes because of the strategy.

    use std::cell::Cell;

    std::thread_local! {
        // One per model, because both checkers run all threads of a model on one OS thread.
        static MEMBARRIER: Cell<bool> = const { Cell::new(false) };
    }

    /// Returns whether this model runs with membarrier, and not with fences on both sides.
    pub(crate) fn membarrier() -> bool {
        MEMBARRIER.get()
    }

    /// Runs the models in `run` with membarrier.
    pub fn with_membarrier(run: impl FnOnce()) {
        MEMBARRIER.set(true);
        run();
        MEMBARRIER.set(false);
    }

    /// Runs the models in `run` with each of the two strategies.
    pub fn both_strategies(run: impl Fn()) {
        with_membarrier(&run);
        run();
    }

    pub(crate) use self::imp::begin_run;
    pub use self::imp::light;
    pub(crate) use self::imp::{compiler_fence, heavy};

    #[cfg(offlock_shuttle)]
    mod imp {
        use shuttle::sync::atomic::{Ordering, fence};

        pub(crate) fn begin_run() {}

        pub(crate) fn compiler_fence() {}

        /// As in a normal build.
        pub fn light() {
            fence(Ordering::SeqCst);
        }

        pub(crate) fn heavy() {
            fence(Ordering::SeqCst);
        }
    }

    #[cfg(offlock_loom)]
    mod imp {
        use std::cell::Cell;

        use loom::sync::atomic::{AtomicU64, Ordering, fence};
        use loom::{lazy_static, thread_local};

        use super::membarrier;

        /// The most threads of a model.
        const THREADS: usize = loom::MAX_THREADS;

        struct Tokens {
            /// Changed by every `heavy`, for threads that take their token later.
            heavy: AtomicU64,
            of_threads: [AtomicU64; THREADS],
        }

        lazy_static! {
            static ref TOKENS: Tokens = Tokens {
                heavy: AtomicU64::new(0),
                of_threads: [(); THREADS].map(|()| AtomicU64::new(0)),
            };
        }

        std::thread_local! {
            // Not loom's: the number of tokens that the threads of this run have taken. A run takes them
            // in an order that its schedule decides, like everything else in it.
            static TAKEN: Cell<usize> = const { Cell::new(0) };
        }

        thread_local! {
            /// The number of this thread's token, if it has one.
            static MINE: Cell<Option<usize>> = Cell::new(None);
        }

        /// Begins a run: no thread has a token.
        pub(crate) fn begin_run() {
            TAKEN.set(0);
            if membarrier() {
                // Made here, because the first access to a `lazy_static` happens before every later one.
                let _ = &*TOKENS;
            }
        }

        /// Gives the calling thread a token.
        fn take() -> usize {
            let mine = TAKEN.replace(TAKEN.get() + 1);
            MINE.with(|cell| cell.set(Some(mine)));
            // Ordering: Acquire pairs with the AcqRel in `heavy`; it carries what the threads did that
            // called `heavy` before this thread had a token.
            TOKENS.heavy.fetch_add(0, Ordering::Acquire);
            mine
        }

        /// As in a normal build.
        pub fn light() {
            if membarrier() {
                token();
            } else {
                // Ordering: SeqCst fence, against the fence in `heavy`: the loads after the later of the
                // two see the stores before the earlier.
                fence(Ordering::SeqCst);
            }
        }

        /// What `light` does with membarrier. The other strategy needs no compiler fence, because no
        /// checker reorders the accesses of one thread.
        pub(crate) fn compiler_fence() {
            if membarrier() {
                token();
            }
        }

        fn token() {
            let mine = MINE.with(Cell::get).unwrap_or_else(take);
            // Ordering: AcqRel pairs with the AcqRel in `heavy`, both ways.
            TOKENS.of_threads[mine].fetch_add(0, Ordering::AcqRel);
        }

        pub(crate) fn heavy() {
            if !membarrier() {
                // Ordering: SeqCst fence, against the fences in `light` and in this function: the loads
                // after the later of two fences see the stores before the earlier.
                return fence(Ordering::SeqCst);
            }
            // Ordering: AcqRel, both, pairs with the AcqRel in `token` and in this function, both ways.
            TOKENS.heavy.fetch_add(0, Ordering::AcqRel);
            let mut next = 0;
            let mine = MINE.with(Cell::get);
            while next < TAKEN.get() {
                if mine != Some(next) {
                    TOKENS.of_threads[next].fetch_add(0, Ordering::AcqRel);
                }
                next += 1;
            }
        }
    }
}
