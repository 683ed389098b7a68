//! The CPUs of a model: two of them, and a thread is on the one its test says.

use std::cell::Cell;

use crate::cpu::CpuId;

#[cfg(offlock_loom)]
use loom::thread_local;
#[cfg(offlock_shuttle)]
use shuttle::thread_local;

thread_local! {
    // The checker's, not std's: every thread of a model runs on one OS thread.
    static CURRENT: Cell<CpuId> = Cell::new(CpuId::new(0));
}

/// The CPU that the calling thread was put on; CPU 0 if it was not.
pub fn current() -> CpuId {
    CURRENT.with(Cell::get)
}

/// How many slots there are: 2.
pub fn possible() -> usize {
    2
}

/// Moves the calling thread to `cpu`, at any point: also between two uses of [`current`].
///
/// # Panics
///
/// Panics if `cpu` is not below [`possible`].
pub fn set_current(cpu: CpuId) {
    assert!(cpu.index() < possible(), "a model has {} CPUs, not {cpu}", possible());
    CURRENT.with(|current| current.set(cpu));
}
