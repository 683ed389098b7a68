//! Rows that the generic loop of [`Group`](crate::Group) cannot measure: each window needs something done
//! before it, or its operations are counted from outside. One thread, on one CPU; the rounds, the
//! ratios and the rule about disturbed windows are the harness's.

use std::fs;
use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cpu::{allowed_cpus, pin, thread_cpu_time, with_cpus};
use crate::group::Plan;
use crate::rounds::Rounds;
use crate::window::{Span, Window};

/// One row, called `name/1`.
pub struct Row<'a> {
    name: String,
    /// A function that runs before each window and is not timed.
    before: Box<dyn FnMut() + 'a>,
    /// Some operations; how many.
    run: Box<dyn FnMut() -> u64 + 'a>,
}

impl<'a> Row<'a> {
    /// A row whose window is as many runs of `run` as fit.
    pub fn new(name: &str, run: impl FnMut() -> u64 + 'a) -> Self {
        Self { name: name.to_string(), before: Box::new(|| ()), run: Box::new(run) }
    }

    /// Sets a function that runs before each window.
    #[must_use]
    pub fn before(self, before: impl FnMut() + 'a) -> Self {
        Self { before: Box::new(before), ..self }
    }
}

/// Measures the rows, interleaved.
pub fn measure(group: &str, plan: &Plan, mut rows: Vec<Row<'_>>) -> Rounds {
    let mut rounds = Rounds::new(group, rows.iter().map(|row| (format!("{}/1", row.name), 1)));
    on_one_cpu(|| {
        repeat(plan, || {
            rounds.round(plan.retries, |index| {
                let row = &mut rows[index];
                least_disturbed(plan, || {
                    (row.before)();
                    let mut clock = Clock::default();
                    while clock.wall < plan.window {
                        clock.add(&mut row.run);
                    }
                    clock.window()
                })
            });
        });
    });
    rounds
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

/// The throughput of the least disturbed of a few windows; the first that is hardly disturbed.
pub fn least_disturbed(plan: &Plan, mut window: impl FnMut() -> Window) -> Option<f64> {
    let mut best = window();
    for _ in 0..plan.retries {
        if best.overlap() >= plan.min_overlap {
            break;
        }
        let other = window();
        best = if other.overlap() > best.overlap() { other } else { best };
    }
    Some(best.throughput())
}

/// Adds up what was timed.
#[derive(Debug, Default)]
pub struct Clock {
    /// The time that passed.
    pub wall: Duration,
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
    pub fn window(&self) -> Window {
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
    pub whole: Duration,
}

impl Timed {
    /// The part of the time in which all ran, or slept because they wanted to.
    pub fn overlap(&self) -> f64 {
        self.window.overlap()
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
