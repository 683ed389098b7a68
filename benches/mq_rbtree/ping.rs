//! M5: a message goes to another thread, which sends it back: the time until it is there.

use std::sync::Mutex;
use std::time::Instant;

use harness::timed::{at_once, repeat};
use harness::{Plan, Ratio, Report, Table, median, number, percentile};

use crate::kernel::Kernel;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Queue, Tree};

/// Messages that a queue takes.
const MOST: usize = 16;
/// The number of messages at the start of a window that are not timed: a queue learns how long to spin.
const WARM_UP: usize = 64;
const PERCENTS: [f64; 3] = [50.0, 99.0, 99.9];

/// Times of round trips, in nanoseconds, if both threads ran.
type Window<'a> = Box<dyn Fn(f64) -> Option<Vec<f64>> + 'a>;

fn window<'a, Q: Queue + 'a>(trips: usize) -> (&'static str, Window<'a>) {
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

/// The result of the windows of one implementation: a percentile of each round.
#[derive(Default)]
struct Measured {
    rounds: Vec<Option<[f64; 3]>>,
    discarded: usize,
}

impl Measured {
    fn of(&self, which: usize) -> Option<f64> {
        let kept = self.rounds.iter().flatten().map(|round| round[which]);
        median(&kept.collect::<Vec<_>>())
    }

    /// The median of the ratios of each round.
    fn over(&self, other: &Self, which: usize) -> Option<Ratio> {
        let pairs = self.rounds.iter().zip(&other.rounds);
        let ratio = |pair| match pair {
            (Some(ours), Some(other)) => {
                let (ours, other): (&[f64; 3], &[f64; 3]) = (ours, other);
                Some(ours[which] / other[which])
            }
            _ => None,
        };
        let ratios: Vec<f64> =
            pairs.filter_map(|(ours, other)| ratio((ours.as_ref(), other.as_ref()))).collect();
        Ratio::of(&ratios)
    }
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
    let mut all: Vec<Measured> = rows.iter().map(|_| Measured::default()).collect();
    let mut first = 0;
    repeat(plan, || {
        for at in 0..rows.len() {
            let index = (first + at) % rows.len();
            let mut times = None;
            for _ in 0..=plan.retries {
                times = (rows[index].1)(plan.min_overlap);
                if times.is_some() {
                    break;
                }
                all[index].discarded += 1;
            }
            let percentiles = times.map(|times| {
                PERCENTS.map(|percent| percentile(&times, percent).unwrap_or(f64::NAN))
            });
            all[index].rounds.push(percentiles);
        }
        first += 1;
    });

    let columns = ["p50 ns", "p99", "p999", "rounds", "discarded"];
    let mut table = Table::new("there and back", columns);
    for ((name, _), measured) in rows.iter().zip(&all) {
        let kept = measured.rounds.iter().flatten().count();
        let counts = [kept, measured.discarded].map(|count| count.to_string());
        table.row(*name, [0, 1, 2].map(|at| number(measured.of(at), 0)).into_iter().chain(counts));
    }
    print!("{table}");
    let (ours, kanal, kernel) = (&all[0], &all[2], &all[3]);
    report.record("M5.kernel.p50", ours.over(kernel, 0));
    report.record("M5.kanal.p50", ours.over(kanal, 0));
    report.record("M5.kanal.p99", ours.over(kanal, 1));
}
