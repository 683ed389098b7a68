//! R9: bytes of the heap, by the layouts that were asked for.
//!
//! The counting allocator is there for the whole bench. It counts only while this family measures;
//! otherwise it costs a load and a branch that is always the same.

use std::hint::black_box;

use harness::{Plan, Report, Table};
use offlock_percpu::rcu;
use radix_ctx::CtxTable;
use rustc_hash::FxBuildHasher;
use scc::HashIndex;
use slotmap::SlotMap;
use testkit::alloc::{CountingAllocator, counted};

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

    let mut table = Table::new("bytes per entry of 64k", ["u64", "[u64; 7]", "empty, bytes"]);
    let mut row = |name: &str, figures: [Option<f64>; 3]| {
        let text = |bytes: Option<f64>| bytes.map_or(String::new(), |bytes| format!("{bytes:.1}"));
        table.row(name, figures.map(text));
    };
    let (ours, empty) = (small::<Ctx<u64>>(), bytes(CtxTable::<Value>::new));
    row("CtxTable", [Some(ours), Some(large::<Ctx<Value>>()), Some(empty)]);
    let papaya = Some(bytes(papaya::HashMap::<u64, Value>::new));
    row("papaya", [Some(small::<Papaya<u64>>()), Some(large::<Papaya<Value>>()), papaya]);
    let index = Some(bytes(HashIndex::<u64, Value, FxBuildHasher>::default));
    row("HashIndex", [Some(small::<Index<u64>>()), Some(large::<Index<Value>>()), index]);
    let dash = Some(bytes(dashmap::DashMap::<u64, Value>::new));
    row("dashmap", [Some(small::<Dash<u64>>()), Some(large::<Dash<Value>>()), dash]);
    let slab = Some(bytes(sharded_slab::Slab::<Value>::new));
    row("sharded-slab", [Some(small::<Sharded<u64>>()), Some(large::<Sharded<Value>>()), slab]);
    let slots = bytes(|| slot_map(0, value));
    row("slotmap", [Some(slot_maps(|n| n)), Some(slot_maps(value)), Some(slots)]);
    row("Vec<Slot>", [None, Some(large::<Slots<Value>>()), None]);
    print!("{table}");
    report.record("R9.bytes_per_entry@64k", Some(ours));
    report.record("R9.empty.bytes", Some(empty));
}

fn small<M: Map<u64>>() -> f64 {
    bytes(|| M::filled(ENTRIES, |n| n).0) / ENTRIES as f64
}

fn large<M: Map<Value>>() -> f64 {
    bytes(|| M::filled(ENTRIES, value).0) / ENTRIES as f64
}

/// slotmap: keys with generations, as a table has, for one thread.
fn slot_maps<V>(value: fn(u64) -> V) -> f64 {
    bytes(|| slot_map(ENTRIES, value)) / ENTRIES as f64
}

fn slot_map<V>(n: usize, value: fn(u64) -> V) -> SlotMap<slotmap::DefaultKey, V> {
    let mut map = SlotMap::with_capacity(n);
    (0..n as u64).for_each(|n| _ = map.insert(value(n)));
    map
}
