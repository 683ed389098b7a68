//! Models of the cache, run by loom in every interleaving and by shuttle in random ones. A cache has
//! one to three buffers, buckets of two places, records of two slots, and policy and home locks of its
//! own.
//!
//! A planted bug is named by the label of a step; [`mutants`] demands that each is caught.

mod bare;
mod completion;
mod disk;
mod engine;
mod evict;
mod load;
mod mutants;
mod overwrite;
mod task;
mod world;
mod write;
