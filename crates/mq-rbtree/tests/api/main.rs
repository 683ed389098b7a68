//! Tests of the queues that share one process.
//!
//! A test that needs its own resource limit or fork is in a test program of its own.
#![cfg(not(offlock_model))]

#[path = "../common/asleep.rs"]
mod asleep;
mod errors;
mod guards;
mod handles;
mod limits;
mod memory;
mod panicking;
mod panics;
mod queue_model;
#[path = "../queue_ops/mod.rs"]
mod queue_ops;
mod readiness;
mod stalled;
mod streams;
mod tree;
mod waits;

use testkit::alloc::ThreadAllocator;
use testkit::block_on;

/// Refuses only the allocations of threads that ask for it.
#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(queue_ops::watch::probe);
