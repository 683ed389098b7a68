//! [`CpuId`], the number of a CPU, and the CPUs of models.

use std::fmt;

/// The number of a CPU, as the kernel counts CPUs.
///
/// A type of its own, so that a CPU is not mistaken for the number of a node or a count.
///
/// ```
/// # use offlock_sync::CpuId;
/// let cpu = CpuId::new(3);
/// assert_eq!((cpu.get(), cpu.index()), (3, 3));
/// assert_eq!(cpu.to_string(), "cpu 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct CpuId(u32);

impl CpuId {
    /// Makes the id of CPU `id`, without a check that this CPU exists.
    #[inline]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the number of the CPU.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number as the index of a slot. For every id that `current_cpu` returns it is
    /// below the capacity.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for CpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu {}", self.0)
    }
}

#[cfg(any(offlock_model, offlock_virtual_cpu))]
pub mod virtual_cpu {
    //! Virtual CPUs, for models and for builds with `--cfg offlock_virtual_cpu`.
    //!
    //! The test sets the CPU of each thread. A model has two CPUs, and rseq sections. A build with
    //! `--cfg offlock_virtual_cpu` has as many as [`fix`] sets before the first use. It has no rseq
    //! sections, because the kernel restarts a section when the thread leaves a real CPU, not a virtual
    //! one.

    use std::cell::Cell;

    use crate::CpuId;

    crate::const_thread_local! {
        static CURRENT: Cell<CpuId> = Cell::new(CpuId::new(0));
    }

    /// Returns the CPU that [`set_current`] set for the calling thread, or CPU 0.
    pub fn current() -> CpuId {
        CURRENT.with(Cell::get)
    }

    /// Moves the calling thread to `cpu`. Two calls of [`current`] around this call differ, as after a
    /// migration.
    ///
    /// # Panics
    ///
    /// Panics if `cpu` is not below [`possible`].
    pub fn set_current(cpu: CpuId) {
        assert!(cpu.index() < possible(), "there are {} virtual CPUs, not {cpu}", possible());
        CURRENT.with(|current| current.set(cpu));
    }

    pub use current as recent;

    pub use self::imp::*;

    #[cfg(not(offlock_model))]
    mod imp {
        use std::sync::OnceLock;

        static COUNT: OnceLock<usize> = OnceLock::new();

        /// Returns the number of virtual CPUs: the number that [`fix`] set, or 1.
        pub fn possible() -> usize {
            *COUNT.get_or_init(|| 1)
        }

        /// Sets the number of virtual CPUs.
        ///
        /// # Panics
        ///
        /// Panics if an earlier call or the first use of a per-CPU structure has set the number, and if
        /// `count` is 0 or above 4096.
        pub fn fix(count: usize) {
            assert!((1..=4096).contains(&count), "{count} virtual CPUs");
            COUNT.set(count).expect("the number of virtual CPUs is fixed at its first use");
        }
    }

    #[cfg(offlock_model)]
    mod imp {
        use std::cell::Cell;

        #[cfg(offlock_loom)]
        use loom::{lazy_static, sync::MutexGuard, thread_local};
        #[cfg(offlock_shuttle)]
        use shuttle::{lazy_static, sync::MutexGuard, thread_local};

        use crate::CpuId;
        use crate::imp::std_shaped;

        thread_local! {
            static HAS_ID: Cell<bool> = Cell::new(true);
        }

        std::thread_local! {
            // One per model, because both checkers run all threads of a model on one OS thread.
            static SECTIONS: Cell<bool> = const { Cell::new(true) };
        }

        lazy_static! {
            static ref ALONE: [std_shaped::Mutex<()>; 2] = [(); 2].map(std_shaped::Mutex::new);
        }

        /// Returns the number of virtual CPUs of a model: 2.
        pub fn possible() -> usize {
            2
        }

        /// Runs the models in `run` with rseq sections, and then without.
        pub fn both_modes(run: impl Fn()) {
            run();
            without_sections(run);
        }

        /// Runs the models in `run` without rseq sections.
        pub fn without_sections(run: impl FnOnce()) {
            SECTIONS.set(false);
            run();
            SECTIONS.set(true);
        }

        /// Returns whether this model has rseq sections.
        pub fn sections() -> bool {
            SECTIONS.get()
        }

        /// Removes the rseq id of the calling thread. A thread that libc did not create has none.
        pub fn take_id() {
            HAS_ID.with(|id| id.set(false));
        }

        /// Returns whether the calling thread has an rseq id.
        pub fn has_id() -> bool {
            HAS_ID.with(Cell::get)
        }

        /// Takes the lock of `cpu`: no other thread runs a section on `cpu` while the guard lives.
        pub fn alone_on(cpu: CpuId) -> MutexGuard<'static, ()> {
            ALONE[cpu.index()].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }
}
