//! M5: a message goes to another thread, which sends it back: the time until it is there.

use std::sync::Mutex;
use std::time::Instant;

use harness::timed::{Row, at_once, measure};
use harness::{Plan, Report, percentile};

use crate::kernel::KernelQueue;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 16;
/// The number of messages at the start of a window that are not timed: a queue learns how long to spin.
const WARM_UP: usize = 64;

/// Round trips of so many messages in a window, which is as good as its median and its p99.
fn row<Q: Queue>(trips: usize) -> Row<'static, 2> {
    let (there, back) = (Q::new(MOST), Q::new(MOST));
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

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    // What sleeps takes a hundred times as long. A smoke run must end on a machine whose CPUs are busy as well.
    let is_smoke = plan.limit.is_zero();
    let (many, few) = if is_smoke { (100, 20) } else { (4_000, 200) };
    let rows = vec![
        row::<Ours>(many),
        row::<Tree>(many),
        row::<Kanal>(many),
        row::<KernelQueue>(few),
        row::<Crossbeam>(few),
        row::<PlHeap>(few),
        row::<AsyncPriority>(few),
    ];
    let [medians, tails] = measure(["there and back, p50", "there and back, p99"], plan, rows);
    report.show(&medians);
    report.show(&tails);
    report.record("M5.kernel.p50", medians.time_ratio(Ours::NAME, KernelQueue::NAME));
    report.record("M5.kanal.p50", medians.time_ratio(Ours::NAME, Kanal::NAME));
    report.record("M5.kanal.p99", tails.time_ratio(Ours::NAME, Kanal::NAME));
}
