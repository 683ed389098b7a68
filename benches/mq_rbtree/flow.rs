//! M4: one thread sends, another receives. M10: four send and four receive, on two CPUs.

use std::hint::black_box;
use std::sync::Arc;

use harness::timed::{Row, at_once, measure};
use harness::{Plan, Report, allowed_cpus, two};

use crate::kernel::KernelQueue;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap, kernel_room};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 1024;
/// Messages of a window: a millisecond or two, which a busy machine leaves to both threads more often.
const MESSAGES: u64 = 10_000;
/// Priorities in turn.
const LEVELS: u64 = 8;

/// Sends and receives a window's messages, with half of so many threads on each side.
fn rows<Q: Queue>(threads: &[usize]) -> Vec<Row<'static>> {
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

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let threads: Vec<usize> = plan.threads.iter().copied().filter(|n| *n > 1).collect();
    let rows = [
        rows::<Ours>(&threads),
        rows::<Tree>(&threads),
        rows::<KernelQueue>(&threads),
        rows::<PlHeap>(&threads),
        rows::<AsyncPriority>(&threads),
        rows::<Crossbeam>(&threads),
        rows::<Kanal>(&threads),
    ];
    println!("# queues of {MOST} messages, the kernel's of {}", kernel_room(MOST));
    let [rounds] = measure(["one sends, one receives"], plan, rows.into_iter().flatten().collect());
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let peers =
        [("kernel", KernelQueue::NAME), ("pl_heap", PlHeap::NAME), ("crossbeam", Crossbeam::NAME)];
    for (id, peer) in peers {
        report.record(&format!("M4.{id}"), rounds.time_ratio(&two(Ours::NAME), &two(peer)));
    }
}

/// Senders and receivers of M10.
const MANY: usize = 8;

pub(crate) fn run_many(plan: &Plan, report: &mut Report) {
    let rows =
        [rows::<Ours>, rows::<Tree>, rows::<PlHeap>, rows::<Crossbeam>].map(|rows| rows(&[MANY]));
    let [rounds] = measure(["four send, four receive"], plan, rows.into_iter().flatten().collect());
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let ratio =
        |peer| rounds.time_ratio(&format!("{}/{MANY}", Ours::NAME), &format!("{peer}/{MANY}"));
    report.record("M10.crossbeam", ratio(Crossbeam::NAME));
    report.record("M10.pl_heap", ratio(PlHeap::NAME));
}
