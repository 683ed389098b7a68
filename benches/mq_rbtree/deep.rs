//! M2 and M3: a message is sent and one received, beside a million that stay.
//!
//! Priorities are sent without order, the highest is received: so the rest sinks. A queue is filled
//! anew, between windows, before half of it was exchanged.

use std::cell::RefCell;
use std::hint::black_box;

use harness::timed::{Row, measure};
use harness::{Plan, Report};

use crate::peers::{AsyncPriority, PlHeap};
use crate::queue::{Ours, Priorities, Queue, Tree};

const DEPTH: usize = 1_000_000;
/// Operations between two looks at the clock.
const BATCH: usize = 256;

/// A queue and what is in it.
struct Deep<Q> {
    queue: Q,
    priorities: Priorities,
    levels: u32,
    depth: usize,
    exchanged: usize,
}

impl<Q: Queue> Deep<Q> {
    fn new(levels: u32, depth: usize) -> Self {
        let priorities = Priorities::new(levels);
        Self { queue: Self::filled(levels, depth), priorities, levels, depth, exchanged: 0 }
    }

    fn filled(levels: u32, depth: usize) -> Q {
        let queue = Q::new(depth + 1);
        let mut priorities = Priorities::new(levels);
        (0..depth).for_each(|n| queue.send(n as u64, priorities.next()));
        queue
    }

    fn refill(&mut self) {
        if self.levels > 1 && self.exchanged > self.depth / 2 && self.depth > 0 {
            self.queue = Q::new(1); // the memory of the old one first
            self.queue = Self::filled(self.levels, self.depth);
            self.exchanged = 0;
        }
    }

    fn exchange(&mut self) -> u64 {
        for n in 0..BATCH {
            self.queue.send(n as u64, self.priorities.next());
            black_box(self.queue.receive());
        }
        self.exchanged += BATCH;
        BATCH as u64
    }
}

fn name(of: &str, levels: u32, depth: usize) -> String {
    match depth {
        0 => format!("{of}, empty"),
        _ => format!("{of}, 1M @{levels}"),
    }
}

/// Queues of one kind, from empty to deep.
struct Kind<Q>(Vec<RefCell<Deep<Q>>>);

impl<Q: Queue> Kind<Q> {
    fn new(levels: &[u32]) -> Self {
        let deep = levels.iter().map(|&levels| RefCell::new(Deep::new(levels, DEPTH)));
        Self([RefCell::new(Deep::new(1, 0))].into_iter().chain(deep).collect())
    }

    fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.0.iter().map(|deep| {
            let name = name(Q::NAME, deep.borrow().levels, deep.borrow().depth);
            Row::after(&name, || deep.borrow_mut().refill(), || deep.borrow_mut().exchange())
        })
    }
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let all = [1, 8, 32_768];
    let (ours, tree) = (Kind::<Ours>::new(&all), Kind::<Tree>::new(&all));
    let (heap, asynchronous) = (Kind::<PlHeap>::new(&all), Kind::<AsyncPriority>::new(&all));
    let rows = ours.rows().chain(tree.rows()).chain(heap.rows()).chain(asynchronous.rows());
    let [rounds] = measure(["send and receive, deep"], plan, rows.collect());
    report.show(&rounds);
    for levels in all {
        let deep = |of| name(of, levels, DEPTH);
        let peers = [deep(PlHeap::NAME), deep(AsyncPriority::NAME)];
        let peers = peers.each_ref().map(String::as_str);
        report.against(&rounds, &deep(Ours::NAME), 1, &peers);
        report.against(&rounds, &deep(Tree::NAME), 1, &peers);
        let empty = rounds.time_ratio(&deep(Ours::NAME), &name(Ours::NAME, 1, 0));
        report.record(&format!("M2.depth1M@{levels}"), empty);
    }
    let deep = |of| name(of, 32_768, DEPTH);
    for (id, peer) in [("pl_heap", PlHeap::NAME), ("async_priority_channel", AsyncPriority::NAME)] {
        report.record(&format!("M3.{id}"), rounds.time_ratio(&deep(Ours::NAME), &deep(peer)));
    }
}
