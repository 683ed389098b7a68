//! Tests of tables that share one process.
//!
//! A test that needs an allocator or a limit of its own is a test program of its own.
#![cfg(not(offlock_model))]

mod reentry;
mod support;
mod table;
mod table_model;
mod table_ops;
mod waiting;
