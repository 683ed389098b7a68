//! Models of the facade and of what stands on it, run by loom in every interleaving and by shuttle in
//! random ones.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is code
//! of its own behind `is_planted("...")` in a model; [`mutants`] demands that each is caught.

mod asymmetric;
mod facade;
mod mutants;
mod wait_set;
mod word_lock;

use std::cell::Cell;
use std::env;

use offlock_sync::virtual_fence::with_membarrier;
use offlock_sync::{Arc, thread, with_preemptions};

/// Runs `f` on another thread.
fn beside<T: Send + Sync + 'static, R: Send + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// Runs a model with membarrier.
fn model(f: impl Fn() + Send + Sync + 'static) {
    thoroughly(|| with_membarrier(|| offlock_sync::model(f)));
}

/// Runs models with three preemptions, unless the calling test is [`Long`].
///
/// Not with a planted bug: two show it, and a run that a bug makes longer is not worth the time.
fn thoroughly(run: impl FnOnce()) {
    let least = if LONG.get() || env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, run);
}

thread_local! {
    static LONG: Cell<bool> = const { Cell::new(false) };
}

/// Marks a test whose models take seconds or minutes with three preemptions, until it is dropped.
/// They run with `LOOM_MAX_PREEMPTIONS`.
#[must_use]
struct Long;

impl Long {
    fn mark() -> Self {
        LONG.set(true);
        Self
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        LONG.set(false);
    }
}
