//! Allocators that count calls and bytes, and refuse on request.
//!
//! A test program declares one of them as its `#[global_allocator]`:
//!
//! - [`ThreadAllocator`] counts the calls and bytes of each thread, and refuses allocations of the
//!   calling thread on request.
//! - [`CountingAllocator`] counts those of all threads, while counting is switched on. It costs a
//!   load and a branch otherwise, so benches can use it.

mod process;
mod thread;

pub use process::{Counted, CountingAllocator, counted};
pub use thread::{
    Calls, ThreadAllocator, admitted_left, calls, process_bytes, refuse_after, refuse_first,
    refuse_large, thread_bytes, until_admitted,
};
