//! Models of both lists, run by loom in every interleaving and by shuttle in random ones. There are
//! two CPUs, segments have two cells, and walks take one entry under a lock.
//!
//! A planted bug weakens a step that has a label (`fence!`, `order!`, `step!`, `check!`), or is code
//! of its own behind `is_planted("...")` in a model; [`mutants`] demands that each is
//! caught.

mod deferred;
mod intrusive;
mod mutants;
mod owning;
mod payload;
mod pool;
mod snapshot;
mod walk;
