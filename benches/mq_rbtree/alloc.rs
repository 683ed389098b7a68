//! M6: allocations.

use std::hint::black_box;

use harness::timed::on_one_cpu;
use harness::{Plan, Report, Table, number};

use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Priorities, Queue, Tree};
use testkit::alloc::counted;

/// Messages that come and go at once.
const BURST: usize = 1_000;
const LEVELS: u32 = 32_768;
const OPS: usize = 20_000;

/// Allocations per operation of one implementation.
struct Allocations {
    steady: f64,
    burst: f64,
}

fn count<Q: Queue>() -> Allocations {
    let queue = Q::new(BURST);
    let pairs = |ops: usize| {
        let mut priorities = Priorities::new(LEVELS);
        for n in 0..ops {
            queue.send(n as u64, priorities.next());
            black_box(queue.receive());
        }
    };
    let bursts = |bursts: usize| {
        let mut priorities = Priorities::new(LEVELS);
        for _ in 0..bursts {
            (0..BURST).for_each(|n| queue.send(n as u64, priorities.next()));
            (0..BURST).for_each(|_| {
                black_box(queue.receive());
            });
        }
    };
    pairs(2 * OPS);
    let steady = counted(|| pairs(OPS)).1.allocations as f64 / OPS as f64;
    bursts(20);
    let burst = counted(|| bursts(20)).1.allocations as f64 / (20 * BURST) as f64;
    Allocations { steady, burst }
}

fn row<Q: Queue>(table: &mut Table) -> Allocations {
    let counted = count::<Q>();
    table.row(Q::NAME, [counted.steady, counted.burst].map(|count| number(Some(count), 3)));
    counted
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations of a send and a receive", ["steady", "burst"]);
    let ours = on_one_cpu(|| {
        let ours = [row::<Ours>(&mut table), row::<Tree>(&mut table)];
        row::<PlHeap>(&mut table);
        row::<AsyncPriority>(&mut table);
        row::<Crossbeam>(&mut table);
        row::<Kanal>(&mut table);
        ours
    });
    print!("{table}");
    let worst = |of: fn(&Allocations) -> f64| ours.iter().map(of).reduce(f64::max);
    report.record("M6.allocs.steady.n", worst(|counted| counted.steady));
    report.record("M6.allocs.burst.n", worst(|counted| counted.burst));
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
