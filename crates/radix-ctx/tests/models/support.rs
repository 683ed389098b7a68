//! Helpers of the models.

use offlock_sync::{Arc, model, thread, virtual_cpu, with_preemptions};

/// Runs a model with at least three preemptions, for models that take less than a second with them.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    with_preemptions(3, || model(f));
}

/// Runs a model with rseq sections, and then without.
pub(super) fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
    virtual_cpu::both_modes(|| model(f.clone()));
}

/// Repetitions of a short operation that must meet another short one: a random schedule needs several.
pub(super) const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// Lets other threads run for a while in a random schedule. loom runs every schedule anyway.
pub(super) fn yield_often() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

pub(super) fn spawn<T: Send + Sync + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}
