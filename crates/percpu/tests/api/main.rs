//! Tests of everything but RCU that share one process.
//!
//! What needs an allocator, a filter or a signal handler of its own is a test program of its own.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

// `model` is shared with the fuzz target, whose dependency is renamed to `percpu`.
extern crate offlock_percpu as percpu;

mod auto_traits;
mod counters;
mod cpu;
mod gate;
mod lglock;
mod lglock_slots;
#[path = "../model/mod.rs"]
mod model;
#[path = "../common/no_id.rs"]
mod no_id;
mod ref_block;
mod refcount;
mod targets;
