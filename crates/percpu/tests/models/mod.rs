//! Models of the facade and of every primitive, run by loom in every interleaving and by shuttle in
//! random ones.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is code
//! of its own behind `is_planted("...")` in a model; [`mutants`] demands that each is caught.

mod counter;
mod facade;
mod fence;
mod gate;
mod lglock;
mod mutants;
mod rcu;
mod ref_block;
mod refcount;
mod word_lock;

use offlock_percpu::sync::virtual_fence::with_membarrier;
use offlock_percpu::sync::{self, virtual_cpu};

/// Runs a model with membarrier, as the crate runs in most programs.
fn model(f: impl Fn() + Send + Sync + 'static) {
    with_membarrier(|| sync::model(f));
}

/// Runs a model with membarrier, with rseq sections and then without.
fn both_modes(f: impl Fn() + Send + Sync + Clone + 'static) {
    with_membarrier(|| virtual_cpu::both_modes(f));
}

/// Runs a model with membarrier, and with rseq sections if `on` is true.
fn with_sections(on: bool, f: impl Fn() + Send + Sync + 'static) {
    with_membarrier(|| virtual_cpu::with_sections(on, f));
}
