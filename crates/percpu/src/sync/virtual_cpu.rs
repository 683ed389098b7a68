//! The CPUs of a model, or of a build with `--cfg offlock_virtual_cpu`: a thread is on the one its
//! test says.
//!
//! A model has two. The virtual build has as many as [`fix`] said before the first use, and no rseq
//! sections, since the kernel protects the real CPU only.

use std::cell::Cell;

use crate::cpu::CpuId;

#[cfg(offlock_loom)]
use loom::thread_local;
#[cfg(offlock_shuttle)]
use shuttle::thread_local;
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
use std::thread_local;

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    static CURRENT: Cell<CpuId> = const { Cell::new(CpuId::new(0)) };
}

#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    // The checker's, not std's: every thread of a model runs on one OS thread.
    static CURRENT: Cell<CpuId> = Cell::new(CpuId::new(0));
}

/// The CPU that the calling thread was put on; CPU 0 if it was not.
pub fn current() -> CpuId {
    CURRENT.with(Cell::get)
}

/// Moves the calling thread to `cpu`, at any point: also between two uses of [`current`].
///
/// # Panics
///
/// Panics if `cpu` is not below [`possible`].
pub fn set_current(cpu: CpuId) {
    assert!(cpu.index() < possible(), "there are {} virtual CPUs, not {cpu}", possible());
    CURRENT.with(|current| current.set(cpu));
}

#[cfg(any(offlock_loom, offlock_shuttle))]
pub(crate) use current as recent;

pub use self::imp::*;

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::sync::OnceLock;

    static COUNT: OnceLock<usize> = OnceLock::new();

    /// How many there are: what [`fix`] said, or 1.
    pub fn possible() -> usize {
        *COUNT.get_or_init(|| 1)
    }

    /// Fixes the number of virtual CPUs.
    ///
    /// # Panics
    ///
    /// Panics if it is fixed already, by a call or by the first use of a per-CPU structure, and if
    /// `count` is 0 or absurd.
    pub fn fix(count: usize) {
        assert!((1..=4096).contains(&count), "{count} virtual CPUs");
        COUNT.set(count).expect("the number of virtual CPUs is fixed at its first use");
    }
}

#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    use std::cell::Cell;

    #[cfg(offlock_loom)]
    use loom::{lazy_static, sync::MutexGuard, thread_local};
    #[cfg(offlock_shuttle)]
    use shuttle::{lazy_static, sync::MutexGuard, thread_local};

    use super::super::imp::std_shaped;
    use crate::cpu::CpuId;

    thread_local! {
        static HAS_ID: Cell<bool> = Cell::new(true);
    }

    std::thread_local! {
        // One per model: both checkers run every thread of a model on one OS thread.
        static SECTIONS: Cell<bool> = const { Cell::new(true) };
    }

    lazy_static! {
        static ref ALONE: [std_shaped::Mutex<()>; 2] = [(); 2].map(std_shaped::Mutex::new);
    }

    /// How many there are: 2.
    pub fn possible() -> usize {
        2
    }

    /// Runs a model twice: with rseq sections, and without.
    pub fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
        for on in [true, false] {
            with_sections(on, f.clone());
        }
    }

    /// Runs a model with rseq sections, or without.
    pub fn with_sections(on: bool, f: impl Fn() + Send + Sync + 'static) {
        SECTIONS.set(on);
        super::super::model(f);
        SECTIONS.set(true);
    }

    /// Whether this model has sections.
    pub fn sections() -> bool {
        SECTIONS.get()
    }

    /// Takes the calling thread's rseq id away, as from a thread that libc did not make.
    pub fn take_id() {
        HAS_ID.with(|id| id.set(false));
    }

    /// Whether the calling thread has an rseq id.
    pub fn has_id() -> bool {
        HAS_ID.with(Cell::get)
    }

    /// Keeps the sections of other threads off `cpu`.
    pub(crate) fn alone_on(cpu: CpuId) -> MutexGuard<'static, ()> {
        ALONE[cpu.index()].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
