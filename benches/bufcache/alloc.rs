//! B4: allocations per hit, and per miss of a cache that is full.

use std::hint::black_box;

use bufcache::Cache;
use harness::{Plan, Report, Table, number};

use crate::back::{Nowhere, dirty};
use crate::ours::Ours;
use crate::pages::{Pages, place};
use crate::peers::{Lru, Moka, Quick};
use testkit::alloc::counted;

const ROOM: usize = 1024;
const OPS: u64 = 20_000;

fn row<P: Pages>(table: &mut Table) -> [f64; 2] {
    let pages = P::filled(ROOM / 2, ROOM);
    let reads = |numbers: &mut dyn Iterator<Item = u64>| {
        numbers.for_each(|number| _ = black_box(pages.read(number, place(number))));
    };
    let mut hits = (0..OPS).map(|at| at % (ROOM as u64 / 2));
    reads(&mut hits.by_ref().take(ROOM)); // what a thread's first need
    let hit = counted(|| reads(&mut hits)).1.allocations as f64 / (OPS - ROOM as u64) as f64;
    let first = ROOM as u64;
    reads(&mut (first..first + OPS)); // full from here on
    let miss =
        counted(|| reads(&mut (first + OPS..first + 2 * OPS))).1.allocations as f64 / OPS as f64;
    table.row(P::NAME, [hit, miss].map(text));
    [hit, miss]
}

fn text(count: f64) -> String {
    number(Some(count), 3)
}

/// Blocks dirtied between two flushes.
const BATCH: u64 = 64;

/// Counts the allocations of writes to cached blocks, of flushes, and of misses that evict dirty blocks.
fn writes(table: &mut Table) {
    let cache = Cache::builder(ROOM * 4096).dirty_limits(100, 100).build().expect("memory");
    let device = cache.attach(Nowhere).expect("memory");
    let some = |first: u64| (0..BATCH).for_each(|at| dirty(&device, first + at * 3));
    let flush = || device.flush().expect("a device that does not fail");
    (0..4).for_each(|_| (some(0), flush()).1); // what a thread's first need
    let rounds = OPS / BATCH;
    some(0);
    let dirtied = counted(|| (0..rounds).for_each(|_| some(0))).1.allocations as f64 / OPS as f64;
    let each = counted(|| (0..rounds).for_each(|_| (some(0), flush()).1)).1.allocations;
    table.row("bufcache, a block dirtied again", [text(dirtied)]);
    table.row("bufcache, 64 dirtied and flushed", [text(each as f64 / rounds as f64)]);
    let mut fresh = 1 << 20..;
    let mut misses =
        |count: u64| fresh.by_ref().take(count as usize).for_each(|at| dirty(&device, at));
    misses(OPS);
    let miss = counted(|| misses(OPS)).1.allocations as f64 / OPS as f64;
    table.row("bufcache, evicting what is dirty", [String::new(), text(miss)]);
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations", ["per hit", "per miss"]);
    let [hit, miss] = row::<Ours>(&mut table);
    row::<Quick>(&mut table);
    row::<Moka>(&mut table);
    row::<Lru>(&mut table);
    writes(&mut table);
    print!("{table}");
    report.record("B4.allocs.hit.n", Some(hit));
    report.record("B4.allocs.miss.n", Some(miss));
}
