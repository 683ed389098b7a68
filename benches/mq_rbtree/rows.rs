//! M4, M5, M6 and M10: messages from thread to thread, there and back, and allocations.

use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use harness::timed::{Row, at_once, measure, on_one_cpu};
use harness::{Plan, Report, Table, allowed_cpus, number, percentile, two};
use testkit::alloc::counted;

use crate::kernel::KernelQueue;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap, kernel_room};
use crate::queue::{Ours, Priorities, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 1024;
/// Messages of a window: a millisecond or two, which a busy machine leaves to both threads more often.
const MESSAGES: u64 = 10_000;
/// Priorities in turn.
const LEVELS: u64 = 8;

/// Sends and receives a window's messages, with half of so many threads on each side.
fn flows<Q: Queue>(threads: &[usize]) -> Vec<Row<'static>> {
    let queue = Arc::new(Q::new(MOST));
    let row = |&threads: &usize| {
        let (queue, pairs) = (Arc::clone(&queue), threads / 2);
        let each = MESSAGES / pairs as u64;
        Row::of_windows(format!("{}/{threads}", Q::NAME), 1, move |plan| {
            let timed = at_once(2 * pairs, |thread| {
                if thread < pairs {
                    (0..each).for_each(|n| queue.send(n, (n % LEVELS) as u32));
                } else {
                    (0..each).for_each(|_| _ = black_box(queue.receive()));
                }
            });
            // Threads that share a CPU never overlap.
            let is_shared = threads > allowed_cpus().len();
            let min_overlap = if is_shared { 0.0 } else { plan.min_overlap };
            timed.throughput(min_overlap, MESSAGES).map(|rate| [rate])
        })
    };
    threads.iter().map(row).collect()
}

/// M4: one thread sends, another receives.
pub(crate) fn run_flow(plan: &Plan, report: &mut Report) {
    let threads: Vec<usize> = plan.threads.iter().copied().filter(|n| *n > 1).collect();
    let flows = [
        flows::<Ours>(&threads),
        flows::<Tree>(&threads),
        flows::<KernelQueue>(&threads),
        flows::<PlHeap>(&threads),
        flows::<AsyncPriority>(&threads),
        flows::<Crossbeam>(&threads),
        flows::<Kanal>(&threads),
    ];
    println!("# queues of {MOST} messages, the kernel's of {}", kernel_room(MOST));
    let [rounds] =
        measure(["one sends, one receives"], plan, flows.into_iter().flatten().collect());
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let peers =
        [("kernel", KernelQueue::NAME), ("pl_heap", PlHeap::NAME), ("crossbeam", Crossbeam::NAME)];
    for (id, peer) in peers {
        report.record(&format!("M4.{id}"), rounds.time_ratio(&two(Ours::NAME), &two(peer)));
    }
}

/// Senders and receivers of M10.
const MANY: usize = 8;

/// M10: four send and four receive, on two CPUs.
pub(crate) fn run_many(plan: &Plan, report: &mut Report) {
    let flows = [flows::<Ours>, flows::<Tree>, flows::<PlHeap>, flows::<Crossbeam>]
        .map(|flows| flows(&[MANY]));
    let [rounds] =
        measure(["four send, four receive"], plan, flows.into_iter().flatten().collect());
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let ratio =
        |peer| rounds.time_ratio(&format!("{}/{MANY}", Ours::NAME), &format!("{peer}/{MANY}"));
    report.record("M10.crossbeam", ratio(Crossbeam::NAME));
    report.record("M10.pl_heap", ratio(PlHeap::NAME));
}

/// Messages that a queue takes.
const FEW: usize = 16;
/// The number of messages at the start of a window that are not timed: a queue learns how long to spin.
const WARM_UP: usize = 64;

/// Round trips of so many messages in a window, which is as good as its median and its p99.
fn there_and_back<Q: Queue>(trips: usize) -> Row<'static, 2> {
    let (there, back) = (Q::new(FEW), Q::new(FEW));
    Row::of_windows(format!("{}/1", Q::NAME), 1, move |plan| {
        let times = Mutex::new(Vec::with_capacity(trips));
        let timed = at_once(2, |thread| {
            if thread == 1 {
                (0..WARM_UP + trips).for_each(|_| back.send(there.receive(), 1));
                return;
            }
            let mut times = times.lock().expect("no thread panicked");
            for n in 0..WARM_UP + trips {
                let start = Instant::now();
                there.send(n as u64, 1);
                assert_eq!(back.receive(), n as u64);
                if n >= WARM_UP {
                    times.push(start.elapsed().as_nanos() as f64);
                }
            }
        });
        timed.throughput(plan.min_overlap, trips as u64)?; // both threads ran
        let times = times.into_inner().expect("no thread panicked");
        let per_second = |percent| percentile(&times, percent).map_or(0.0, |ns| 1e9 / ns);
        Some([50.0, 99.0].map(per_second))
    })
}

/// M5: a message goes to another thread, which sends it back: the time until it is there.
pub(crate) fn run_ping(plan: &Plan, report: &mut Report) {
    // What sleeps takes a hundred times as long. A smoke run must end on a machine whose CPUs are busy as well.
    let is_smoke = plan.limit.is_zero();
    let (many, few) = if is_smoke { (100, 20) } else { (4_000, 200) };
    let rows = vec![
        there_and_back::<Ours>(many),
        there_and_back::<Tree>(many),
        there_and_back::<Kanal>(many),
        there_and_back::<KernelQueue>(few),
        there_and_back::<Crossbeam>(few),
        there_and_back::<PlHeap>(few),
        there_and_back::<AsyncPriority>(few),
    ];
    let [medians, tails] = measure(["there and back, p50", "there and back, p99"], plan, rows);
    report.show(&medians);
    report.show(&tails);
    report.record("M5.kernel.p50", medians.time_ratio(Ours::NAME, KernelQueue::NAME));
    report.record("M5.kanal.p50", medians.time_ratio(Ours::NAME, Kanal::NAME));
    report.record("M5.kanal.p99", tails.time_ratio(Ours::NAME, Kanal::NAME));
}

/// Messages that come and go at once.
const BURST: usize = 1_000;
const PRIORITIES: u32 = 32_768;
const OPS: usize = 20_000;

/// Counts the allocations of an operation, of one message at a time and of bursts.
fn allocations<Q: Queue>(table: &mut Table) -> [f64; 2] {
    let queue = Q::new(BURST);
    let rounds = |rounds: usize, burst: usize| {
        let mut priorities = Priorities::new(PRIORITIES);
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

/// M6: allocations.
pub(crate) fn run_alloc(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations of a send and a receive", ["steady", "burst"]);
    let [ours, tree] =
        on_one_cpu(|| [allocations::<Ours>(&mut table), allocations::<Tree>(&mut table)]);
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
