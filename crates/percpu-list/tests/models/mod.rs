//! Models of the list. loom runs them in every interleaving, and shuttle in random ones. There
//! are two CPUs, a segment has two cells, and a walk takes one entry under a lock.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is
//! code in a model behind `is_planted("...")`. [`mutants`] checks that a model catches each.

mod cells;
mod mutants;
mod owning;
mod payload;
mod pool;
mod snapshot;
mod walk;
