//! Runs of a model.

use crate::{Arc, quarantine, thread, virtual_fence};

pub use self::imp::{model, with_preemptions};

/// Resets what the checkers do not: they run all threads of a model, and its runs, on one OS thread.
fn begin_run() {
    quarantine::begin_run();
    virtual_fence::begin_run();
}

/// Runs a model with at least three preemptions, for models that take less than a second with them.
pub fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    with_preemptions(3, || model(f));
}

/// Runs `f` in another thread.
pub fn beside<T: Send + Sync + 'static, R: Send + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// Yields many times under shuttle, so that other threads often run in between. loom tries that anyway.
pub fn yield_often() {
    if cfg!(offlock_shuttle) {
        (0..100).for_each(|_| thread::yield_now());
    }
}

#[cfg(offlock_loom)]
mod imp {
    use std::cell::Cell;

    std::thread_local! {
        static LEAST_PREEMPTIONS: Cell<usize> = const { Cell::new(0) };
    }

    /// Runs the models in `run` with at least `least` preemptions, also if `LOOM_MAX_PREEMPTIONS`
    /// is lower.
    pub fn with_preemptions(least: usize, run: impl FnOnce()) {
        LEAST_PREEMPTIONS.set(least);
        run();
        LEAST_PREEMPTIONS.set(0);
    }

    /// Runs `f` once for each interleaving within loom's limits (`LOOM_MAX_PREEMPTIONS`).
    ///
    /// # Panics
    ///
    /// Panics if a run panics or deadlocks. A deadlock may abort the process instead.
    pub fn model(f: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.max_branches = builder.max_branches.max(BRANCHES);
        let least = LEAST_PREEMPTIONS.get();
        builder.preemption_bound = builder.preemption_bound.map(|bound| bound.max(least));
        builder.check(move || {
            super::begin_run();
            f();
        });
    }

    /// The number of steps after which loom gives up a run as endless. The longest runs
    /// take 1,500 steps.
    const BRANCHES: usize = 5_000;
}

#[cfg(offlock_shuttle)]
mod imp {
    /// The number of schedules that [`model`] tries if `OFFLOCK_SHUTTLE_ITERATIONS` is not set. A
    /// guess: the models of this crate catch the planted bugs within the first hundred.
    const ITERATIONS: usize = 1_000;

    /// Calls `run`. shuttle does not limit preemptions.
    pub fn with_preemptions(_least: usize, run: impl FnOnce()) {
        run();
    }

    /// Runs `f` under `OFFLOCK_SHUTTLE_ITERATIONS` random schedules.
    ///
    /// With `OFFLOCK_SHUTTLE_SWITCHES` a schedule changes the running thread at only so many random
    /// steps (probabilistic concurrency testing, Burckhardt et al., ASPLOS 2010). It finds bugs
    /// that need one thread to make many steps inside a short window of another.
    ///
    /// # Panics
    ///
    /// Panics if a run panics or deadlocks.
    pub fn model(f: impl Fn() + Send + Sync + 'static) {
        let asked = |name| std::env::var(name).ok().map(|n| n.parse().expect("a number"));
        let iterations = asked("OFFLOCK_SHUTTLE_ITERATIONS").unwrap_or(ITERATIONS);
        let run = move || {
            super::begin_run();
            f();
        };
        match asked("OFFLOCK_SHUTTLE_SWITCHES") {
            Some(switches) => shuttle::check_pct(run, iterations, switches),
            None => shuttle::check_random(run, iterations),
        }
    }
}
