//! Models of the queue, run by loom in every interleaving and by shuttle in random ones.
//!
//! In a model the slab's first chunk has two slots, the staging ring has four, no thread spins, and a wait with a deadline may
//! reach it at any moment.
//!
//! A mutant weakens a labelled step (`fence!`, `order!`, `step!`, `check!`). [`mutants`] checks
//! that a model fails for each of them.

mod closing;
mod guards;
mod memory;
mod mixed;
mod mutants;
pub(crate) mod payload;
mod readiness;
mod ring;
mod staging;
mod tasks;
mod threads;
