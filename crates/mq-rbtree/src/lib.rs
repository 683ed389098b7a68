//! A priority message queue that does not allocate under its lock.

mod alloc;
mod core;
mod stats;
