//! Models of the list. loom runs them in every interleaving, and shuttle in random ones. There
//! are two CPUs, a block has two cells, and a walk takes one block at a time.
//!
//! The sections of a model are those of `src/model.rs`. A model in both modes runs once more without them:
//! with additions under the lock of a slot, and removals by atomic operations.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`).
//! [`mutants`] checks that a model catches each.

mod cells;
mod ends;
mod lists;
mod mutants;
mod snapshot;
mod world;
