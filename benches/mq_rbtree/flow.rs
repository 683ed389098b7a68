//! M4: one thread sends, another receives. M10: four send and four receive, on two CPUs.

use std::hint::black_box;

use harness::timed::{Timed, at_once, repeat};
use harness::{Plan, Ratio, Report, Rounds, allowed_cpus};

use crate::kernel::Kernel;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, Mpsc, PlHeap, Spsc};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 1024;
/// Messages of a window: a millisecond or two, which a busy machine leaves to both threads more often.
const MESSAGES: u64 = 10_000;
/// Priorities in turn.
const LEVELS: u64 = 8;

/// Sends and receives a window's messages, with so many threads on each side.
type Row<'a> = (&'static str, Box<dyn Fn(usize) -> Timed + 'a>);

fn row<Q: Queue>(queue: &Q) -> Row<'_> {
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
    let (ours, tree) = (<Ours as Queue>::new(MOST), <Tree as Queue>::new(MOST));
    let (kernel, pl_heap) = (Kernel::new(MOST), PlHeap::new(MOST));
    let asynchronous = AsyncPriority::new(MOST);
    let (crossbeam, kanal) = (Crossbeam::new(MOST), Kanal::new(MOST));
    let (spsc, mpsc) = (Spsc::new(MOST), Mpsc::new(MOST));
    // These have one receiver.
    let single = [row(&spsc), row(&mpsc)];
    let rows = [
        row(&ours),
        row(&tree),
        row(&kernel),
        row(&pl_heap),
        row(&asynchronous),
        row(&crossbeam),
        row(&kanal),
    ];
    println!("# queues of {MOST} messages, the kernel's of {}", Kernel::room(MOST));
    let cpus = allowed_cpus().map_or(1, |cpus| cpus.len());
    let threads = plan.threads.iter().copied().filter(|threads| *threads > 1);
    let of = |threads| rows.iter().chain(single.iter().filter(move |_| threads == 2));
    let cases: Vec<_> =
        threads.flat_map(|threads| of(threads).map(move |row| (row, threads))).collect();
    let names = cases.iter().map(|((name, _), threads)| (format!("{name}/{threads}"), 1));
    let mut rounds = Rounds::new("one sends, one receives", names);
    repeat(plan, || {
        rounds.round(plan.retries, |index| {
            let ((_, window), threads) = cases[index];
            let timed = window(threads / 2);
            // Threads that share a CPU never overlap.
            let counts = threads > cpus || timed.overlap() >= plan.min_overlap;
            counts.then(|| MESSAGES as f64 / timed.whole.as_secs_f64())
        });
    });
    report.show(&rounds);
    let peers = of(2).skip(2).map(|row| row.0).collect::<Vec<_>>();
    report.against(&rounds, Ours::NAME, 2, &peers);
    report.against(&rounds, Tree::NAME, 2, &peers);
    report.record("M4.kernel", over(&rounds, Kernel::NAME));
    report.record("M4.pl_heap", over(&rounds, PlHeap::NAME));
    report.record("M4.crossbeam", over(&rounds, Crossbeam::NAME));
}

/// Senders, and receivers, of M10.
const PAIRS: usize = 4;

/// Threads that share a CPU never overlap, so each window counts.
pub(crate) fn run_many(plan: &Plan, report: &mut Report) {
    let (ours, tree) = (<Ours as Queue>::new(MOST), <Tree as Queue>::new(MOST));
    let (pl_heap, crossbeam) = (PlHeap::new(MOST), Crossbeam::new(MOST));
    let rows = [row(&ours), row(&tree), row(&pl_heap), row(&crossbeam)];
    let names = rows.iter().map(|(name, _)| (format!("{name}/{}", 2 * PAIRS), 1));
    let mut rounds = Rounds::new("four send, four receive", names);
    repeat(plan, || {
        rounds.round(plan.retries, |index| {
            let timed = rows[index].1(PAIRS);
            Some(MESSAGES as f64 / timed.whole.as_secs_f64())
        });
    });
    report.show(&rounds);
    let ratio = |peer| {
        let (ours, peer) =
            (format!("{}/{}", Ours::NAME, 2 * PAIRS), format!("{peer}/{}", 2 * PAIRS));
        rounds.time_ratio(&ours, &peer)
    };
    report.record("M10.crossbeam", ratio(Crossbeam::NAME));
    report.record("M10.pl_heap", ratio(PlHeap::NAME));
}

fn over(rounds: &Rounds, peer: &str) -> Option<Ratio> {
    rounds.time_ratio(&format!("{}/2", Ours::NAME), &format!("{peer}/2"))
}
