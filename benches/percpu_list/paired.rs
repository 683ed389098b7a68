//! Rows of two threads that do different things and wait for each other, so that the generic loop of
//! `harness::Group` cannot measure them: a window is a piece of work, not a time.
//!
//! The rounds, the ratios and the rule about windows in which both really ran are the harness's.

use std::cell::UnsafeCell;

use harness::timed::{Timed, repeat};
use harness::{Plan, Rounds};

/// One row, called `name/2`.
pub(crate) struct Row<'a> {
    name: &'a str,
    /// The operations of a window.
    ops: u64,
    /// A whole piece of work.
    window: Box<dyn FnMut() -> Timed + 'a>,
}

impl<'a> Row<'a> {
    pub(crate) fn new(name: &'a str, ops: u64, window: impl FnMut() -> Timed + 'a) -> Self {
        Self { name, ops, window: Box::new(window) }
    }
}

/// Measures the rows, interleaved.
pub(crate) fn measure(group: &str, plan: &Plan, mut rows: Vec<Row<'_>>) -> Rounds {
    let mut rounds = Rounds::new(group, rows.iter().map(|row| (format!("{}/2", row.name), 2)));
    repeat(plan, || {
        rounds.round(plan.retries, |index| {
            let row = &mut rows[index];
            let timed = (row.window)();
            let counts = timed.overlap() >= plan.min_overlap;
            counts.then(|| row.ops as f64 / timed.whole.as_secs_f64())
        });
    });
    rounds
}

/// A value that two threads use in turns: one puts it, the other takes it.
pub(crate) struct Handed<T>(UnsafeCell<Option<T>>);

// SAFETY: by the contracts of `put` and `take` one thread at a time uses it, and it moves a `T`.
unsafe impl<T: Send> Sync for Handed<T> {}

impl<T> Handed<T> {
    pub(crate) fn new() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// # Safety
    ///
    /// The other thread has done with it, and this one has seen that.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, value: T) {
        // SAFETY: by the contract of this function no other thread uses it now.
        unsafe { *self.0.get() = Some(value) };
    }

    /// # Safety
    ///
    /// As for [`put`](Self::put).
    #[inline(always)]
    pub(crate) unsafe fn take(&self) -> Option<T> {
        // SAFETY: by the contract of this function no other thread uses it now.
        unsafe { (*self.0.get()).take() }
    }
}
