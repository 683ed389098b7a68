//! Tests of the queues that share one process.
//!
//! What needs an allocator, a limit or a fork of its own is a test program of its own.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

mod edges;
mod errors;
mod futures;
mod handles;
mod limits;
#[path = "../mq_ops/mod.rs"]
mod mq_ops;
mod ops;
mod orders;
#[path = "../common/panicking.rs"]
mod panicking;
mod panics;
mod promises;
mod queue_model;
mod queues;
mod waits;

use testkit::alloc::ThreadAllocator;

/// Refuses only allocations of a thread that asks for it.
#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();
