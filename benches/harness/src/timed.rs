//! Rows that the generic loop of [`Group`](crate::Group) cannot measure: each window needs something done
//! before it, has several figures, or is a piece of work and not a time. The rounds, the ratios and the rule
//! about disturbed windows are the harness's.

use std::fs;
use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cpu::{allowed_cpus, pin, thread_cpu_time, with_cpus};
use crate::group::Plan;
use crate::rounds::Rounds;
use crate::window::{Span, Window};

/// Measures a window; `None` is one that does not count.
type Measure<'a, const N: usize> = Box<dyn FnMut(&Plan) -> Option<[f64; N]> + 'a>;

/// One row. A window of it gives `N` figures, each of them operations per second.
pub struct Row<'a, const N: usize = 1> {
    name: String,
    threads: usize,
    window: Measure<'a, N>,
}

impl<'a> Row<'a> {
    /// The row `name/1`, on one CPU: a window is as many runs as fit of `run`, which does some operations and
    /// says how many.
    pub fn new(name: &str, run: impl FnMut() -> u64 + 'a) -> Self {
        Self::after(name, || (), run)
    }

    /// Such a row with a function that runs before each window and is not timed.
    pub fn after(name: &str, before: impl FnMut() + 'a, mut run: impl FnMut() -> u64 + 'a) -> Self {
        Self::clocked(name, before, move |[clock]| clock.add(&mut run))
    }
}

impl<'a, const N: usize> Row<'a, N> {
    /// The row `name/1`, on one CPU: `run` tells its clocks what is timed, and each of these is a figure.
    pub fn clocked(
        name: &str,
        mut before: impl FnMut() + 'a,
        mut run: impl FnMut(&mut [Clock; N]) + 'a,
    ) -> Self {
        let mut window = move |length: Duration| {
            before();
            let mut clocks = std::array::from_fn(|_| Clock::default());
            while clocks.iter().map(|clock| clock.wall).sum::<Duration>() < length * N as u32 {
                run(&mut clocks);
            }
            clocks.map(|clock| clock.window())
        };
        Self::of_windows(format!("{name}/1"), 1, move |plan| {
            on_one_cpu(|| Some(least_disturbed(plan, || window(plan.window))))
        })
    }

    /// A row that measures its windows itself; `None` is one that does not count. Its name ends in a slash and
    /// the number of threads.
    pub fn of_windows(
        name: String,
        threads: usize,
        window: impl FnMut(&Plan) -> Option<[f64; N]> + 'a,
    ) -> Self {
        Self { name, threads, window: Box::new(window) }
    }
}

/// Measures the rows, interleaved. Each figure of their windows has a group of its own.
pub fn measure<const N: usize>(
    groups: [&str; N],
    plan: &Plan,
    mut rows: Vec<Row<'_, N>>,
) -> [Rounds; N] {
    let mut all = groups
        .map(|group| Rounds::new(group, rows.iter().map(|row| (row.name.clone(), row.threads))));
    repeat(plan, || {
        let mut found = vec![None; rows.len()];
        for (at, rounds) in all.iter_mut().enumerate() {
            rounds.round(if at == 0 { plan.retries } else { 0 }, |index| {
                if at == 0 {
                    found[index] = (rows[index].window)(plan);
                }
                found[index].map(|figures| figures[at])
            });
        }
    });
    all
}

/// Runs `f` on the first CPU that this process may use.
pub fn on_one_cpu<R>(f: impl FnOnce() -> R) -> R {
    with_cpus(&allowed_cpus()[..1], f)
}

/// Rounds that are measured whatever they take.
const LEAST_ROUNDS: usize = 3;

/// Runs as many rounds as the plan has, and as its limit allows.
pub fn repeat(plan: &Plan, mut round: impl FnMut()) {
    let start = Instant::now();
    for done in 0..plan.rounds {
        if done >= LEAST_ROUNDS && start.elapsed() > plan.limit {
            break;
        }
        round();
    }
}

/// The throughputs of the least disturbed of a few windows; the first that is hardly disturbed.
pub(crate) fn least_disturbed<const N: usize>(
    plan: &Plan,
    mut window: impl FnMut() -> [Window; N],
) -> [f64; N] {
    let overlap = |windows: &[Window; N]| windows.iter().map(Window::overlap).fold(1.0, f64::min);
    let mut best = window();
    for _ in 0..plan.retries {
        if overlap(&best) >= plan.min_overlap {
            break;
        }
        let other = window();
        best = if overlap(&other) > overlap(&best) { other } else { best };
    }
    best.map(|window| window.throughput())
}

/// Adds up what was timed.
#[derive(Debug, Default)]
pub struct Clock {
    wall: Duration,
    cpu: Duration,
    ops: u64,
}

impl Clock {
    /// Times `run`, which says how many operations it did.
    pub fn add(&mut self, run: impl FnOnce() -> u64) {
        let (wall, cpu) = (Instant::now(), thread_cpu_time());
        self.ops += run();
        self.cpu += thread_cpu_time() - cpu;
        self.wall += wall.elapsed();
    }

    /// All of it, as one window of one thread.
    fn window(&self) -> Window {
        let Self { wall, cpu, ops } = *self;
        Window::new(vec![Span { start: Duration::ZERO, end: wall, cpu, ops }])
    }
}

/// The result of some threads that did a piece of work.
///
/// A thread that waits may sleep, as its implementation chose. So a window counts by how long the threads
/// would have run and did not, which the kernel tells (`schedstat`: time on a run queue).
#[derive(Debug)]
pub struct Timed {
    window: Window,
    /// The time from the first start to the last end.
    whole: Duration,
}

impl Timed {
    /// Operations per second, if the part of the time in which all ran, or slept because they wanted to, is
    /// large enough.
    pub fn throughput(&self, min_overlap: f64, ops: u64) -> Option<f64> {
        (self.window.overlap() >= min_overlap).then(|| ops as f64 / self.whole.as_secs_f64())
    }
}

/// Runs `work` on so many threads at once, pinned to the CPUs in turn.
pub fn at_once(threads: usize, work: impl Fn(usize) + Sync) -> Timed {
    let cpus = allowed_cpus();
    let (ready, epoch) = (AtomicUsize::new(0), Instant::now());
    let timed = |thread: usize| {
        pin(cpus[thread % cpus.len()]);
        // Ordering: Relaxed, both; it lines up the starts, and publishes nothing.
        ready.fetch_add(1, Ordering::Relaxed);
        wait(|| ready.load(Ordering::Relaxed) == threads);
        let (start, before) = (epoch.elapsed(), kept_waiting());
        work(thread);
        let (end, waited) = (epoch.elapsed(), kept_waiting().saturating_sub(before));
        Span { start, end, cpu: (end - start).saturating_sub(waited), ops: 1 }
    };
    let timed = &timed;
    let spans: Vec<Span> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread panicked")).collect()
    });
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    Timed { window: Window::new(spans), whole: end - start }
}

/// Returns the time for which this thread was ready to run, but did not run.
fn kept_waiting() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let number = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    Duration::from_nanos(number.unwrap_or_default())
}

/// Waits until another thread has done what `done` looks for.
#[inline(always)]
pub fn wait(done: impl Fn() -> bool) {
    let mut spins = 0_u32;
    while !done() {
        spins += 1;
        if spins.is_multiple_of(4096) {
            thread::yield_now(); // the other may need this very CPU
        }
        hint::spin_loop();
    }
}
