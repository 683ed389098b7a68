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
