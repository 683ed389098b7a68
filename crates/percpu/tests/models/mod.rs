//! Models of every primitive, run by loom in every interleaving and by shuttle in
//! random ones.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is code
//! of its own behind `is_planted("...")` in a model; [`mutants`] demands that each is caught.

mod counter;
mod counts;
mod lglock;
mod mutants;
mod rcu;

use std::env;

use offlock_sync::virtual_fence::with_membarrier;
use offlock_sync::{virtual_cpu, with_preemptions};

/// Runs a model with membarrier and rseq sections, as the crate runs in most programs.
///
/// With three preemptions, but not with a planted bug: two show it, and a run that a bug makes longer
/// is not worth the time.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let least = if env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, || long_model(f));
}

/// [`model`] with `LOOM_MAX_PREEMPTIONS`, for models that take seconds or minutes with three.
fn long_model(f: impl Fn() + Send + Sync + 'static) {
    with_membarrier(|| offlock_sync::model(f));
}

/// Runs a model with membarrier, with rseq sections and then without.
fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
    virtual_cpu::both_modes(|| model(f.clone()));
}
