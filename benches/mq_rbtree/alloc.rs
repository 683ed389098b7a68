//! M6: allocations.

use std::hint::black_box;

use harness::timed::on_one_cpu;
use harness::{Plan, Report, Table, number};

use crate::queue::{Ours, Priorities, Queue, Tree};
use testkit::alloc::counted;

/// Messages that come and go at once.
const BURST: usize = 1_000;
const LEVELS: u32 = 32_768;
const OPS: usize = 20_000;

/// Counts the allocations of an operation, of one message at a time and of bursts.
fn row<Q: Queue>(table: &mut Table) -> [f64; 2] {
    let queue = Q::new(BURST);
    let rounds = |rounds: usize, burst: usize| {
        let mut priorities = Priorities::new(LEVELS);
        for _ in 0..rounds {
            (0..burst).for_each(|n| queue.send(n as u64, priorities.next()));
            (0..burst).for_each(|_| _ = black_box(queue.receive()));
        }
    };
    let figures = [1, BURST].map(|burst| {
        rounds(2 * OPS / burst, burst); // what is kept from then on
        counted(|| rounds(OPS / burst, burst)).1.allocations as f64 / OPS as f64
    });
    table.row(Q::NAME, figures.map(|count| number(Some(count), 3)));
    figures
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations of a send and a receive", ["steady", "burst"]);
    let [ours, tree] = on_one_cpu(|| [row::<Ours>(&mut table), row::<Tree>(&mut table)]);
    print!("{table}");
    for (at, id) in ["M6.allocs.steady.n", "M6.allocs.burst.n"].into_iter().enumerate() {
        report.record(id, Some(ours[at].max(tree[at])));
    }
    report.record("M6.cache_hits.pct", Some(cache_hits()));
}

/// Returns the share, in percent, of nodes that were the kept one, for a priority that comes and goes.
fn cache_hits() -> f64 {
    let queue = <Tree as Queue>::new(BURST);
    let pair = |n| {
        Queue::send(&queue, n, 0);
        black_box(Queue::receive(&queue));
    };
    pair(0);
    let before = queue.stats().levels;
    (0..OPS as u64).for_each(pair);
    let after = queue.stats().levels;
    println!("- nodes: {after}");
    100.0 * (after.from_cache - before.from_cache) as f64 / OPS as f64
}
