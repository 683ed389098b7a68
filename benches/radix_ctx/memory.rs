//! R9: bytes of the heap, by the layouts that were asked for.
//!
//! The counting allocator is there for the whole bench. It counts only while this family measures;
//! otherwise it costs a load and a branch that is always the same.

use std::hint::black_box;

use harness::{Plan, Report};
use offlock_percpu::rcu;
use radix_ctx::CtxTable;
use testkit::alloc::{CountingAllocator, counted};

use crate::map::{Map, Value, value};
use crate::ours::Ctx;

const ENTRIES: usize = 1 << 16;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Bytes on the heap that `make` leaves allocated, and those of what it returns.
fn bytes<T>(make: impl FnOnce() -> T) -> f64 {
    let (made, heap) = counted(make);
    black_box(&made);
    heap.bytes as f64 + size_of::<T>() as f64
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    // What the first use costs a process is no table's: registrations, per-CPU memory.
    drop(rcu::pin());
    drop(Ctx::<Value>::filled(1, value));
    let entries = ENTRIES as f64;
    let small = bytes(|| Ctx::<u64>::filled(ENTRIES, |n| n).0) / entries;
    let large = bytes(|| Ctx::<Value>::filled(ENTRIES, value).0) / entries;
    let empty = bytes(CtxTable::<Value>::new);
    println!(
        "- an entry takes {small:.1} bytes with a u64, {large:.1} with [u64; 7]; none: {empty}"
    );
    report.record("R9.bytes_per_entry@64k", Some(small));
    report.record("R9.empty.bytes", Some(empty));
}
