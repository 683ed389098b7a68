//! B4: allocations per hit, and per miss of a cache that is full.

use std::hint::black_box;

use harness::{Plan, Report, Table, number};

use crate::ours::Ours;
use crate::pages::{Pages, place};
use crate::peers::{Moka, QuickPages};
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
    table.row(P::NAME, [hit, miss].map(|count| number(Some(count), 3)));
    [hit, miss]
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations", ["per hit", "per miss"]);
    let [hit, miss] = row::<Ours>(&mut table);
    row::<QuickPages>(&mut table);
    row::<Moka>(&mut table);
    print!("{table}");
    report.record("B4.allocs.hit.n", Some(hit));
    report.record("B4.allocs.miss.n", Some(miss));
}
