//! M5: a message goes to another thread, which sends it back: the time until it is there.

use std::sync::Mutex;
use std::time::Instant;

use harness::timed::{at_once, repeat};
use harness::{Plan, Report, Rounds, percentile};

use crate::kernel::Kernel;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 16;
/// The number of messages at the start of a window that are not timed: a queue learns how long to spin.
const WARM_UP: usize = 64;

/// Times of round trips, in nanoseconds, if both threads ran.
type Window = Box<dyn Fn(f64) -> Option<Vec<f64>>>;

fn window<Q: Queue>(trips: usize) -> (&'static str, Window) {
    let (there, back) = (Q::new(MOST), Q::new(MOST));
    let times = Mutex::new(Vec::with_capacity(trips));
    let run = move |min_overlap: f64| {
        let timed = at_once(2, |thread| {
            if thread == 1 {
                (0..WARM_UP + trips).for_each(|_| back.send(there.receive(), 1));
                return;
            }
            let mut times = times.lock().expect("no thread panicked");
            times.clear();
            for n in 0..WARM_UP + trips {
                let start = Instant::now();
                there.send(n as u64, 1);
                assert_eq!(back.receive(), n as u64);
                if n >= WARM_UP {
                    times.push(start.elapsed().as_nanos() as f64);
                }
            }
        });
        let times = times.lock().expect("no thread panicked");
        (timed.overlap() >= min_overlap).then(|| times.clone())
    };
    (Q::NAME, Box::new(run))
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    // What sleeps takes a hundred times as long. A smoke run must end on a machine whose CPUs are busy as well.
    let is_smoke = plan.limit.is_zero();
    let (many, few) = if is_smoke { (100, 20) } else { (4_000, 200) };
    let rows = [
        window::<Ours>(many),
        window::<Tree>(many),
        window::<Kanal>(many),
        window::<Kernel>(few),
        window::<Crossbeam>(few),
        window::<PlHeap>(few),
        window::<AsyncPriority>(few),
    ];
    let names = || rows.iter().map(|(name, _)| (*name, 1));
    let mut medians = Rounds::new("there and back, p50", names());
    let mut tails = Rounds::new("there and back, p99", names());
    repeat(plan, || {
        let mut found = vec![None; rows.len()];
        let per_second = |times: &[f64], percent| percentile(times, percent).map(|ns| 1e9 / ns);
        medians.round(plan.retries, |index| {
            let times = (rows[index].1)(plan.min_overlap)?;
            found[index] = per_second(&times, 99.0);
            per_second(&times, 50.0)
        });
        tails.round(0, |index| found[index]);
    });
    report.show(&medians);
    report.show(&tails);
    report.record("M5.kernel.p50", medians.time_ratio(Ours::NAME, Kernel::NAME));
    report.record("M5.kanal.p50", medians.time_ratio(Ours::NAME, Kanal::NAME));
    report.record("M5.kanal.p99", tails.time_ratio(Ours::NAME, Kanal::NAME));
}
