//! M6: allocations, and the time of single operations.

use std::hint::black_box;
use std::time::Instant;

use harness::timed::on_one_cpu;
use harness::{Plan, Report, percentile};

use crate::kernel::Kernel;
use crate::locked::{PlHeap, PlMap, StdHeap};
use crate::peers::{AsyncPriority, Crossbeam, Flume, Kanal};
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

/// Single operations, timed one by one; the clock's own time is part of it.
fn latency<Q: Queue>(depth: usize) -> [f64; 3] {
    let queue = Q::new(depth + 1);
    let mut priorities = Priorities::new(if depth == 0 { 1 } else { LEVELS });
    (0..depth).for_each(|n| queue.send(n as u64, priorities.next()));
    let mut times = Vec::with_capacity(OPS);
    for n in 0..2 * OPS {
        let priority = priorities.next();
        let start = Instant::now();
        queue.send(n as u64, priority);
        black_box(queue.receive());
        if n >= OPS {
            times.push(start.elapsed().as_nanos() as f64);
        }
    }
    [50.0, 99.0, 99.9].map(|percent| percentile(&times, percent).unwrap_or(f64::NAN))
}

fn row<Q: Queue>() -> Allocations {
    let counted = count::<Q>();
    let (empty, deep) = (latency::<Q>(0), latency::<Q>(BURST));
    print!("  {:<34}{:>8.3}{:>8.3}", Q::NAME, counted.steady, counted.burst);
    empty.iter().chain(&deep).for_each(|ns| print!("{ns:>8.0}"));
    println!();
    counted
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    println!(
        "{:<36}{:>16}{:>24}{:>24}",
        "send and receive", "allocations", "empty, ns", "1,000 deep, ns"
    );
    println!(
        "{:<36}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}",
        "", "steady", "burst", "p50", "p99", "p999", "p50", "p99", "p999"
    );
    let ours = on_one_cpu(|| {
        let ours = [row::<Ours>(), row::<Tree>()];
        row::<StdHeap>();
        row::<PlHeap>();
        row::<PlMap>();
        row::<AsyncPriority>();
        row::<Crossbeam>();
        row::<Kanal>();
        row::<Flume>();
        let kernel = latency::<Kernel>(0);
        let [p50, p99, p999] = kernel;
        println!("  {:<50}{p50:>8.0}{p99:>8.0}{p999:>8.0}", Kernel::NAME);
        ours
    });
    let worst = |of: fn(&Allocations) -> f64| ours.iter().map(of).reduce(f64::max);
    report.record("M6.allocs.steady.n", worst(|counted| counted.steady));
    report.record("M6.allocs.burst.n", worst(|counted| counted.burst));
    report.record("M6.cache_hits.pct", Some(cache_hits()));
}

/// Of nodes for a priority that comes and goes, how many in a hundred are the one kept before.
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
    println!("  nodes: {after}");
    100.0 * (after.from_cache - before.from_cache) as f64 / OPS as f64
}
