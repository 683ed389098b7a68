//! Rows of two threads that do different things and wait for each other, so that the generic loop of
//! `harness::Group` cannot measure them: a window is a piece of work, not a time.
//!
//! The rounds, the ratios and the rule about windows in which both really ran are the harness's.

use std::cell::UnsafeCell;
use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harness::timed::repeat;
use harness::{Plan, Rounds, Span, Window, allowed_cpus, pin, thread_cpu_time};

/// One row, called `name/2`.
pub(crate) struct Row<'a> {
    name: &'a str,
    /// A whole piece of work.
    window: Box<dyn FnMut() -> Timed + 'a>,
}

impl<'a> Row<'a> {
    pub(crate) fn new(name: &'a str, window: impl FnMut() -> Timed + 'a) -> Self {
        Self { name, window: Box::new(window) }
    }
}

/// How a piece of work went.
pub(crate) struct Timed {
    window: Window,
    /// From the first start to the last end.
    whole: Duration,
    ops: u64,
}

/// Measures the rows, interleaved.
pub(crate) fn measure(group: &str, plan: &Plan, mut rows: Vec<Row<'_>>) -> Rounds {
    let mut rounds = Rounds::new(group, rows.iter().map(|row| (format!("{}/2", row.name), 2)));
    repeat(plan, || {
        rounds.round(plan.retries, |index| {
            let timed = (rows[index].window)();
            let counts = timed.window.overlap() >= plan.min_overlap;
            counts.then(|| timed.ops as f64 / timed.whole.as_secs_f64())
        });
    });
    rounds
}

/// Runs `work` on two threads at once, pinned to a CPU each; `ops` is what both do together.
pub(crate) fn at_once(ops: u64, work: impl Fn(usize) + Sync) -> Timed {
    let cpus = allowed_cpus().expect("this process has CPUs");
    let (ready, epoch) = (AtomicU32::new(0), Instant::now());
    let timed = |thread: usize| {
        pin(cpus[thread % cpus.len()]).expect("an allowed CPU");
        // Ordering: Relaxed, both; it lines up the starts, and publishes nothing.
        ready.fetch_add(1, Ordering::Relaxed);
        wait(|| ready.load(Ordering::Relaxed) == 2);
        let (start, cpu) = (epoch.elapsed(), thread_cpu_time());
        work(thread);
        let cpu = thread_cpu_time() - cpu;
        Span { start, end: epoch.elapsed(), cpu, ops: ops / 2 }
    };
    let timed = &timed;
    let spans: Vec<Span> = thread::scope(|scope| {
        let threads = [0, 1].map(|thread| scope.spawn(move || timed(thread)));
        threads.map(|thread| thread.join().expect("a thread panicked")).into()
    });
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    Timed { window: Window::new(spans), whole: end - start, ops }
}

/// Waits until the other thread has done what `done` looks for.
#[inline(always)]
pub(crate) fn wait(done: impl Fn() -> bool) {
    let mut spins = 0_u32;
    while !done() {
        spins += 1;
        if spins.is_multiple_of(4096) {
            thread::yield_now(); // the other may need this very CPU
        }
        hint::spin_loop();
    }
}

/// A value that two threads use in turns: one puts it, the other takes it.
pub(crate) struct Handed<T>(UnsafeCell<Option<T>>);

// SAFETY: by the contracts of `put` and `take` one thread at a time uses it, and it moves a `T`.
unsafe impl<T: Send> Sync for Handed<T> {}

impl<T> Handed<T> {
    pub(crate) fn new() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// # Safety
    ///
    /// The other thread has done with it, and this one has seen that.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, value: T) {
        // SAFETY: by the contract of this function no other thread uses it now.
        unsafe { *self.0.get() = Some(value) };
    }

    /// # Safety
    ///
    /// As for [`put`](Self::put).
    #[inline(always)]
    pub(crate) unsafe fn take(&self) -> Option<T> {
        // SAFETY: by the contract of this function no other thread uses it now.
        unsafe { (*self.0.get()).take() }
    }
}
