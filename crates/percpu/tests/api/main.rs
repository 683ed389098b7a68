//! Tests that share one process. RCU has a test program of its own, and so have tests that need an
//! allocator, a seccomp filter or a signal handler.
#![cfg(not(offlock_model))]

mod auto_traits;
mod counters;
mod cpu;
mod ledger;
mod lglock;
#[path = "../model/mod.rs"]
mod model;
#[path = "../common/no_id.rs"]
mod no_id;
mod properties;
mod ref_block;
mod refcount;
mod slots;
