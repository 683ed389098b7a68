//! M9: how long the lock is held, at any depth.
//!
//! The longest single send or receive of a window, which is the longest time under the lock and what
//! surrounds it; of all windows the median. Windows last as long at any depth, so that interrupts are
//! in all of them. `QueueStats::longest_hold` is the longest of a queue's life, filling included: one
//! loss of the CPU decides that, so it is the least of some queues.

use std::hint::black_box;
use std::time::{Duration, Instant};

use harness::timed::{on_one_cpu, repeat};
use harness::{Plan, Report, median};

use crate::queue::{Ours, Priorities};

/// How deep, and how many priorities.
const ROWS: [(usize, u32); 4] = [(0, 1), (1_000, 32_768), (1_000_000, 1), (1_000_000, 32_768)];
/// Queues of each row.
const FILLED: usize = 5;
/// Windows of each row in a round.
const WINDOWS: usize = 5;
/// Operations between two looks whether a window is over.
const BATCH: u64 = 64;

struct Row {
    queue: Ours,
    priorities: Priorities,
    longest: Vec<f64>,
    held: Duration,
}

impl Row {
    fn new((depth, levels): (usize, u32)) -> Self {
        let mut filled = (0..FILLED).map(|_| {
            let builder = Ours::builder(depth + 1).time_lock();
            let queue: Ours = builder.build().expect("memory for a queue");
            let mut priorities = Priorities::new(levels);
            for n in 0..depth as u64 {
                queue.send(n, priorities.next()).expect("there is room");
            }
            let held = queue.stats().longest_hold;
            (queue, priorities, held.unwrap_or_default())
        });
        let (mut queue, mut priorities, mut held) = filled.next().expect("some are");
        for other in filled {
            held = held.min(other.2);
            (queue, priorities) = (other.0, other.1);
        }
        Self { queue, priorities, longest: Vec::new(), held }
    }

    fn window(&mut self, length: Duration) {
        let (mut longest, begin) = (Duration::ZERO, Instant::now());
        while begin.elapsed() < length {
            for n in 0..BATCH {
                let priority = self.priorities.next();
                let start = Instant::now();
                self.queue.send(n, priority).expect("there is room");
                let middle = Instant::now();
                black_box(self.queue.receive().expect("sent just now"));
                longest = longest.max(middle - start).max(middle.elapsed());
            }
        }
        self.longest.push(longest.as_nanos() as f64);
    }
}

pub(crate) fn run(plan: &Plan, _report: &mut Report) {
    let mut rows = ROWS.map(Row::new);
    on_one_cpu(|| {
        repeat(plan, || {
            for row in &mut rows {
                (0..WINDOWS).for_each(|_| row.window(plan.window / 10));
            }
        });
    });
    println!("{:<36}{:>12}{:>16}{:>12}", "longest, ns", "operation", "filling, held", "drop");
    for (row, (depth, levels)) in rows.into_iter().zip(ROWS) {
        let Row { queue, longest: windows, held, .. } = row;
        let usual = median(&windows).unwrap_or(f64::NAN);
        // Nobody else can wait: the last owner drops it, and no lock is taken.
        let start = Instant::now();
        drop(queue);
        let dropped = start.elapsed().as_nanos();
        let name = format!("{depth} deep, priorities: {levels}");
        println!("  {name:<34}{usual:>12.0}{:>16}{dropped:>12}", held.as_nanos());
    }
}
