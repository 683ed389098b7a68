//! Virtual CPUs, for models and for builds with `--cfg offlock_virtual_cpu`.
//!
//! The test sets the CPU of each thread. A model has two CPUs. A build with
//! `--cfg offlock_virtual_cpu` has as many as [`fix`] sets before the first use. It has no rseq
//! sections, because the kernel restarts a section when the thread leaves a real CPU, not a virtual
//! one.

use std::cell::Cell;

use crate::CpuId;

super::const_thread_local! {
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

    use super::super::imp::std_shaped;
    use crate::CpuId;

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

    /// Runs a model with rseq sections, and then without.
    pub fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
        for on in [true, false] {
            with_sections(on, f.clone());
        }
    }

    /// Runs a model. The model has rseq sections if `on` is true.
    pub fn with_sections(on: bool, f: impl Fn() + Send + Sync + 'static) {
        SECTIONS.set(on);
        super::super::model(f);
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
