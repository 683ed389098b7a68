//! Rows that the generic loop of [`Group`](crate::Group) cannot measure: each window needs something done
//! before it, or its operations are counted from outside. One thread, on one CPU; the rounds, the
//! ratios and the rule about disturbed windows are the harness's.

use std::time::{Duration, Instant};

use crate::cpu::{allowed_cpus, thread_cpu_time, with_affinity};
use crate::group::Plan;
use crate::rounds::Rounds;
use crate::window::{Span, Window};

/// One row, called `name/1`.
pub struct Row<'a> {
    name: String,
    /// Before each window, and not in it.
    before: Box<dyn FnMut() + 'a>,
    /// Some operations; how many.
    run: Box<dyn FnMut() -> u64 + 'a>,
}

impl<'a> Row<'a> {
    /// A row whose window is as many runs of `run` as fit.
    pub fn new(name: &str, run: impl FnMut() -> u64 + 'a) -> Self {
        Self { name: name.to_string(), before: Box::new(|| ()), run: Box::new(run) }
    }

    /// Does something before each window.
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
    let cpu = allowed_cpus().expect("this process has CPUs")[0];
    with_affinity(cpu, f).expect("an allowed CPU")
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
