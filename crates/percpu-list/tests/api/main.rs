//! Tests of the lists that share one process.
//!
//! What needs an allocator, a limit or a fork of its own is a test program of its own.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

mod errors;
mod list_model;
#[path = "../list_ops/mod.rs"]
mod list_ops;
mod lists;
mod ops;
mod panics;
