//! Tests of the cache that share one process.
//!
//! A test that needs an allocator or a limit of its own is a test program of its own.
#![cfg(not(offlock_model))]

mod adaptive;
mod attach;
mod cache;
mod calls;
mod claims;
mod closing;
mod counts;
mod deadlocks;
mod detach;
mod devices;
mod engine_writes;
mod errors;
mod fairness;
mod kept;
mod lent_engine;
mod loads;
mod log;
mod loop_devices;
mod machine;
mod operations;
mod panics;
mod pressure;
mod queued;
mod readahead;
mod reloaded;
mod stress;
mod sync_after_failure;
mod tasks;
mod told_once;
mod waits;
mod world;
mod write_around;
mod write_ops;
mod writes;
