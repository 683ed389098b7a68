//! The tests that can share one process.
//!
//! A test that needs an allocator, a limit or a child process of its own is a separate program.
#![cfg(not(offlock_model))]

mod errors;
mod list_model;
mod list_ops;
mod lists;
mod no_id;
mod panics;
