//! R9: bytes of the heap, by the layouts that were asked for.
//!
//! The counting allocator is there for the whole bench. It counts only while this family measures;
//! otherwise it costs a load and a branch that is always the same.

use std::hint::black_box;

use harness::{Plan, Report};
use offlock_percpu::rcu;
use radix_ctx::CtxTable;
use rustc_hash::FxBuildHasher;
use scc::HashIndex;
use testkit::alloc::{CountingAllocator, counted};

use crate::locked::RwArena;
use crate::map::{Map, Value, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded, Slots};

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

    println!("{:<36}{:>14}{:>14}", "bytes per entry of 64k", "u64", "[u64; 7]");
    let ours = small::<Ctx<u64>>();
    row("CtxTable", Some(ours), Some(large::<Ctx<Value>>()));
    row("papaya", Some(small::<Papaya<u64>>()), Some(large::<Papaya<Value>>()));
    row("HashIndex", Some(small::<Index<u64>>()), Some(large::<Index<Value>>()));
    row("dashmap", Some(small::<Dash<u64>>()), Some(large::<Dash<Value>>()));
    row("sharded-slab", Some(small::<Sharded<u64>>()), Some(large::<Sharded<Value>>()));
    row("RwLock<Arena>", Some(small::<RwArena<u64>>()), Some(large::<RwArena<Value>>()));
    row("Vec<Slot>", None, Some(large::<Slots<Value>>()));
    report.record("R9.bytes_per_entry@64k", Some(ours));

    println!("{:<36}{:>14}", "bytes of an empty one", "bytes");
    let empty = bytes(CtxTable::<Value>::new);
    row("CtxTable", Some(empty), None);
    row("papaya", Some(bytes(papaya::HashMap::<u64, Value>::new)), None);
    row("HashIndex", Some(bytes(HashIndex::<u64, Value, FxBuildHasher>::default)), None);
    row("dashmap", Some(bytes(dashmap::DashMap::<u64, Value>::new)), None);
    row("sharded-slab", Some(bytes(sharded_slab::Slab::<Value>::new)), None);
    report.record("R9.empty.bytes", Some(empty));
}

fn small<M: Map<u64>>() -> f64 {
    bytes(|| M::filled(ENTRIES, |n| n).0) / ENTRIES as f64
}

fn large<M: Map<Value>>() -> f64 {
    bytes(|| M::filled(ENTRIES, value).0) / ENTRIES as f64
}

fn row(name: &str, first: Option<f64>, second: Option<f64>) {
    let text = |bytes: Option<f64>| bytes.map_or(String::new(), |bytes| format!("{bytes:.1}"));
    println!("  {name:<34}{:>14}{:>14}", text(first), text(second));
}
