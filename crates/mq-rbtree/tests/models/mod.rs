//! Models of the queue, run by loom in every interleaving and by shuttle in random ones. The slab's
//! first chunk has two places, nobody spins, and a wait that has a deadline may reach it at any
//! moment.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`); [`mutants`]
//! demands that each is caught.

mod closing;
mod memory;
mod mixed;
mod mutants;
mod notify;
mod payload;
mod tasks;
mod threads;
