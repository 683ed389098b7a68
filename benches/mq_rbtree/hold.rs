//! M9: how long the lock is held, at any depth.
//!
//! A receive holds the lock nearly as long as it takes; a send through the ring takes none. So the
//! row compares the 99th percentile of the single receives of a window, deep and shallow at the same
//! number of priorities, without the cost of the clock: of all windows the median, and of the two
//! numbers of priorities the worse. The windows last as long at any depth, so that interrupts are in
//! all of them.
//!
//! The worse is that of 32,768 priorities, because of the misses of the caches: an operation takes at most a
//! third more instructions at another depth. At one priority the 99th percentile is 31 ns at both depths. At 32,768 it is 40, 150, 310
//! and 531 ns with 1,000, 10,000, 100,000 and 1,000,000 messages, and 390 ns with huge pages, so a quarter
//! is the translation of addresses. The drain links a message to the last one of its priority, and only that
//! priority's list tells where it is. Simulated by cachegrind with 1 MiB as the last level, a send and a receive
//! miss the first level 0.02, 0.6, 2.1 and 3.2 times at these depths and the last 0, 0, 0.6 and 1.9 times, in
//! 255 to 346 instructions.
//!
//! The table has the longest operation of a window as well, and `QueueStats::longest_hold`: the
//! longest of a queue's life, filling included. One loss of the CPU decides that, so it is the least
//! of some queues.

use std::hint::black_box;
use std::time::{Duration, Instant};

use harness::timed::{on_one_cpu, repeat};
use harness::{Plan, Report, median, percentile};

use crate::queue::{Ours, Priorities};

/// How deep, and how many priorities: each deep row after the shallow one that it is compared with.
const ROWS: [(usize, u32); 4] = [(1_000, 1), (1_000_000, 1), (1_000, 32_768), (1_000_000, 32_768)];
/// Queues of each row whose filling is measured.
const FILLED: usize = 5;
/// Windows of each row in a round.
const WINDOWS: usize = 5;
/// Operations between two looks whether a window is over.
const BATCH: u64 = 64;

/// Times of a row's windows, in nanoseconds.
struct Row {
    queue: Ours,
    priorities: Priorities,
    longest: Vec<f64>,
    p99: Vec<f64>,
    held: Duration,
}

/// Returns a queue with so many messages, which measures its lock or not.
fn filled((depth, levels): (usize, u32), time_lock: bool) -> (Ours, Priorities) {
    let builder = Ours::builder(depth + 1);
    let builder = if time_lock { builder.time_lock() } else { builder };
    let (queue, mut priorities) = (builder.build().expect("memory"), Priorities::new(levels));
    for n in 0..depth as u64 {
        queue.send(n, priorities.next()).expect("there is room");
    }
    (queue, priorities)
}

impl Row {
    fn new(of: (usize, u32)) -> Self {
        let longest = |_| filled(of, true).0.stats().longest_hold.unwrap_or_default();
        let held = (0..FILLED).map(longest).min().unwrap_or_default();
        let (queue, priorities) = filled(of, false);
        Self { queue, priorities, longest: Vec::new(), p99: Vec::new(), held }
    }

    fn window(&mut self, length: Duration, clock: f64) {
        let (mut longest, mut receives, begin) = (Duration::ZERO, Vec::new(), Instant::now());
        while begin.elapsed() < length {
            for n in 0..BATCH {
                let priority = self.priorities.next();
                let start = Instant::now();
                self.queue.send(n, priority).expect("there is room");
                let middle = Instant::now();
                black_box(self.queue.receive().expect("sent just now"));
                let receive = middle.elapsed();
                longest = longest.max(middle - start).max(receive);
                receives.push(receive.as_nanos() as f64 - clock);
            }
        }
        self.longest.push(longest.as_nanos() as f64);
        self.p99.extend(percentile(&receives, 99.0));
    }
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let mut rows = ROWS.map(Row::new);
    on_one_cpu(|| {
        let nothing: Vec<_> =
            (0..1_000).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
        let clock = median(&nothing).unwrap_or_default();
        repeat(plan, || {
            for row in &mut rows {
                (0..WINDOWS).for_each(|_| row.window(plan.window / 10, clock));
            }
        });
    });
    println!("{:<36}{:>12}{:>12}{:>16}{:>12}", "ns", "receive p99", "longest", "filling", "drop");
    let mut p99s = Vec::new();
    for (row, (depth, levels)) in rows.into_iter().zip(ROWS) {
        let Row { queue, longest, p99, held, .. } = row;
        let [longest, p99] = [&longest, &p99].map(|of| median(of).unwrap_or(f64::NAN));
        p99s.push(p99);
        // The last owner drops it, and takes no lock.
        let start = Instant::now();
        drop(queue);
        let dropped = start.elapsed().as_nanos();
        let (name, held) = (format!("{depth} deep, priorities: {levels}"), held.as_nanos());
        println!("  {name:<34}{p99:>12.0}{longest:>12.0}{held:>16}{dropped:>12}");
    }
    let ratios = p99s.chunks_exact(2).map(|pair| pair[1] / pair[0]);
    report.record("M9.lock_hold_p99_depth_ratio", ratios.reduce(f64::max));
}
