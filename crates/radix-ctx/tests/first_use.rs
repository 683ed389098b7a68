//! The first use of percpu in a process is over before a table has a lock.
#![cfg(not(offlock_model))]

use radix_ctx::CtxTable;
use testkit::alloc::{Calls, ThreadAllocator, calls};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// The only test, because it is about the first table of the process. The first counted reference asks
/// under the table's lock whether sections run.
#[test]
fn a_table_leaves_no_first_use_to_its_lock() {
    let table = CtxTable::<u32>::new();
    let (found, made) = calls(offlock_percpu::capabilities);
    assert_eq!(made, Calls::NONE, "{found}");
    drop(table);
}
