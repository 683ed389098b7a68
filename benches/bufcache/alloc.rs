//! B4: allocations per hit, and per miss of a cache that is full.

use std::hint::black_box;

use harness::{Plan, Report};

use crate::counting::allocations;
use crate::ours::Ours;
use crate::pages::{Pages, place};
use crate::peers::{Lru, Moka, Quick};

const ROOM: usize = 1024;
const OPS: u64 = 20_000;

fn row<P: Pages>() -> [f64; 2] {
    let pages = P::filled(ROOM / 2, ROOM);
    let reads = |numbers: &mut dyn Iterator<Item = u64>| {
        numbers.for_each(|number| _ = black_box(pages.read(number, place(number))));
    };
    let mut hits = (0..OPS).map(|at| at % (ROOM as u64 / 2));
    reads(&mut hits.by_ref().take(ROOM)); // what a thread's first need
    let hit = allocations(|| reads(&mut hits)) as f64 / (OPS - ROOM as u64) as f64;
    let first = ROOM as u64;
    reads(&mut (first..first + OPS)); // full from here on
    let miss = allocations(|| reads(&mut (first + OPS..first + 2 * OPS))) as f64 / OPS as f64;
    println!("  {:<34}{hit:>10.3}{miss:>10.3}", P::NAME);
    [hit, miss]
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    println!("{:<36}{:>10}{:>10}", "allocations", "per hit", "per miss");
    let [hit, miss] = row::<Ours>();
    row::<Quick>();
    row::<Moka>();
    row::<Lru>();
    report.record("B4.allocs.hit.n", Some(hit));
    report.record("B4.allocs.miss.n", Some(miss));
}
