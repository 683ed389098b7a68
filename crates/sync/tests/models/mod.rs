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

use std::env;

use offlock_sync::virtual_fence::with_membarrier;
use offlock_sync::with_preemptions;

/// Runs a model with membarrier, and with three preemptions.
fn model(f: impl Fn() + Send + Sync + 'static) {
    thoroughly(|| long_model(f));
}

/// [`model`] with `LOOM_MAX_PREEMPTIONS`, for models that take seconds or minutes with three.
fn long_model(f: impl Fn() + Send + Sync + 'static) {
    with_membarrier(|| offlock_sync::model(f));
}

/// Runs models with three preemptions.
///
/// Not with a planted bug: two show it, and a run that a bug makes longer is not worth the time.
fn thoroughly(run: impl FnOnce()) {
    let least = if env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, run);
}
