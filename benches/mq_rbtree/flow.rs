//! M4: one thread sends, another receives. M10: four send and four receive, on two CPUs.

use std::hint::black_box;

use harness::timed::{Timed, at_once, repeat};
use harness::{Plan, Report, Rounds, allowed_cpus, two};

use crate::kernel::Kernel;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 1024;
/// Messages of a window: a millisecond or two, which a busy machine leaves to both threads more often.
const MESSAGES: u64 = 10_000;
/// Priorities in turn.
const LEVELS: u64 = 8;

/// Sends and receives a window's messages, with so many threads on each side.
type Row = (&'static str, Box<dyn Fn(usize) -> Timed>);

fn row<Q: Queue>() -> Row {
    let queue = Q::new(MOST);
    let window = move |pairs| {
        let each = MESSAGES / pairs as u64;
        at_once(2 * pairs, |thread| {
            if thread < pairs {
                (0..each).for_each(|n| queue.send(n, (n % LEVELS) as u32));
            } else {
                (0..each).for_each(|_| {
                    black_box(queue.receive());
                });
            }
        })
    };
    (Q::NAME, Box::new(window))
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rows = [
        row::<Ours>(),
        row::<Tree>(),
        row::<Kernel>(),
        row::<PlHeap>(),
        row::<AsyncPriority>(),
        row::<Crossbeam>(),
        row::<Kanal>(),
    ];
    println!("# queues of {MOST} messages, the kernel's of {}", Kernel::room(MOST));
    let threads = plan.threads.iter().copied().filter(|threads| *threads > 1);
    let cases = threads.flat_map(|threads| rows.iter().map(move |row| (row, threads)));
    let rounds = measure(plan, "one sends, one receives", &cases.collect::<Vec<_>>());
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let peers =
        [("kernel", Kernel::NAME), ("pl_heap", PlHeap::NAME), ("crossbeam", Crossbeam::NAME)];
    for (id, peer) in peers {
        report.record(&format!("M4.{id}"), rounds.time_ratio(&two(Ours::NAME), &two(peer)));
    }
}

/// Senders and receivers of M10.
const MANY: usize = 8;

pub(crate) fn run_many(plan: &Plan, report: &mut Report) {
    let rows = [row::<Ours>(), row::<Tree>(), row::<PlHeap>(), row::<Crossbeam>()];
    let cases: Vec<_> = rows.iter().map(|row| (row, MANY)).collect();
    let rounds = measure(plan, "four send, four receive", &cases);
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let ratio =
        |peer| rounds.time_ratio(&format!("{}/{MANY}", Ours::NAME), &format!("{peer}/{MANY}"));
    report.record("M10.crossbeam", ratio(Crossbeam::NAME));
    report.record("M10.pl_heap", ratio(PlHeap::NAME));
}

fn measure(plan: &Plan, group: &str, cases: &[(&Row, usize)]) -> Rounds {
    let cpus = allowed_cpus().len();
    let names = cases.iter().map(|((name, _), threads)| (format!("{name}/{threads}"), 1));
    let mut rounds = Rounds::new(group, names);
    repeat(plan, || {
        rounds.round(plan.retries, |index| {
            let ((_, window), threads) = cases[index];
            let timed = window(threads / 2);
            // Threads that share a CPU never overlap.
            let counts = threads > cpus || timed.overlap() >= plan.min_overlap;
            counts.then(|| MESSAGES as f64 / timed.whole.as_secs_f64())
        });
    });
    rounds
}
