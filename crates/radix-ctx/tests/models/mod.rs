//! Models of the table. loom runs them in every interleaving, shuttle in random ones.
//! Nodes and slabs have two slots here, so that a few entries make a high tree.
//!
//! A planted bug weakens a step of the crate that has a label (`order!`, `step!`, `check!`). [`mutants`]
//! demands that a model catches each.

mod contexts;
mod mutants;
mod table;
mod table_refs;
