//! Models of every primitive, run by loom in every interleaving and by shuttle in
//! random ones.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is code
//! of its own behind `is_planted("...")` in a model; [`mutants`] demands that each is caught.

mod counter;
mod lglock;
mod mutants;
mod rcu;
mod ref_block;
mod refcount;

use std::cell::Cell;
use std::env;

use offlock_sync::virtual_fence::with_membarrier;
use offlock_sync::{virtual_cpu, with_preemptions};

/// Runs a model with membarrier and rseq sections, as the crate runs in most programs.
fn model(f: impl Fn() + Send + Sync + 'static) {
    thoroughly(|| with_membarrier(|| offlock_sync::model(f)));
}

/// Runs a model with membarrier, with rseq sections and then without.
fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
    virtual_cpu::both_modes(|| model(f.clone()));
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
