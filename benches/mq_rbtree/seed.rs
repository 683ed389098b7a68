//! M7: the seed's table. Three builds of one queue, in one run: an array sorted by priority, as the
//! kernel had it before its tree; the tree without a cache of nodes; and the tree with it.
//!
//! The array is ours too: messages by value, the next one last, under the lock that the queue has. A
//! full queue of 65,528 is what the kernel's own test fills; each step receives a message, then sends
//! one of the priority that is next. Of full queues the seed published no table, only that its
//! tree with the cache is 10 to 20 ns better than without.

use std::hint::black_box;
use std::time::{Duration, Instant};

use harness::timed::{on_one_cpu, repeat};
use harness::{Plan, Report, Rounds, Table, median, number};
use mq_rbtree::RbTree;
use offlock_sync::WordLock;

use crate::queue::{Priorities, Queue, Tree};

/// The depth of the queue in the kernel's test.
const DEPTH: usize = 65_528;
const LEVELS: u32 = 32_768;
/// Operations of a window: an array moves a megabyte for one of them.
const EMPTY: usize = 4_000;
const FULL: usize = 64;

/// Messages in the order in which they are received, from the back.
pub(crate) struct Array(WordLock<Vec<(u32, u64)>>);

impl Queue for Array {
    const NAME: &'static str = "sorted array";

    fn new(most: usize) -> Self {
        Self(WordLock::new(Vec::with_capacity(most)))
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let mut messages = self.0.lock();
        // From the back, over those of a higher priority or older.
        let mut at = messages.len();
        while at > 0 && messages[at - 1].0 >= priority {
            at -= 1;
        }
        messages.insert(at, (priority, message));
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        self.0.lock().pop().expect("sent before").1
    }
}

/// The tree that keeps no node.
struct Plain(Tree);

impl Queue for Plain {
    const NAME: &'static str = "rbtree";

    fn new(most: usize) -> Self {
        let builder = mq_rbtree::Queue::<u64, RbTree<u32>>::builder_with_keys(most);
        Self(builder.spare_nodes(0).build().expect("memory for a queue"))
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        Queue::send(&self.0, message, priority);
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        Queue::receive(&self.0)
    }
}

/// The order of the priorities.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Constant,
    Rising,
    Falling,
    Random,
}

impl Order {
    const ALL: [Self; 4] = [Self::Constant, Self::Rising, Self::Falling, Self::Random];

    fn next(self, last: u32, random: &mut Priorities) -> u32 {
        match self {
            Self::Constant => last,
            Self::Rising => (last + 1) % LEVELS,
            Self::Falling => (last + LEVELS - 1) % LEVELS,
            Self::Random => random.next(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Constant => "full, constant",
            Self::Rising => "full, rising",
            Self::Falling => "full, falling",
            Self::Random => "full, random",
        }
    }
}

/// One build in one situation: nanoseconds of a send and of a receive, one number for each round.
struct Row {
    build: &'static str,
    situation: &'static str,
    window: Box<dyn FnMut() -> [f64; 2]>,
    rounds: [Vec<f64>; 2],
}

impl Row {
    fn new<Q: Queue + 'static>(build: &'static str, order: Option<Order>) -> Self {
        let queue = Q::new(DEPTH);
        let mut random = Priorities::new(LEVELS);
        let mut last = 0;
        if let Some(order) = order {
            for n in 0..DEPTH {
                queue.send(n as u64, last);
                last = order.next(last, &mut random);
            }
        }
        let mut window = move || {
            let (mut send, mut receive) = (Duration::ZERO, Duration::ZERO);
            let count = if order.is_some() { FULL } else { EMPTY };
            for n in 0..count as u64 {
                let priority = order.map_or(0, |_| last);
                let start = Instant::now();
                let middle = if order.is_some() {
                    black_box(queue.receive());
                    let middle = Instant::now();
                    queue.send(n, priority);
                    middle
                } else {
                    queue.send(n, priority);
                    let middle = Instant::now();
                    black_box(queue.receive());
                    middle
                };
                let (first, second) = (middle - start, middle.elapsed());
                let (sent, received) =
                    if order.is_some() { (second, first) } else { (first, second) };
                send += sent;
                receive += received;
                last = order.map_or(0, |order| order.next(last, &mut random));
            }
            [send, receive].map(|time| time.as_nanos() as f64 / count as f64)
        };
        window(); // the first operations bring nodes
        let situation = order.map_or(EMPTY_QUEUE, Order::name);
        Self { build, situation, window: Box::new(window), rounds: [Vec::new(), Vec::new()] }
    }
}

/// The published times on empty queues: nanoseconds of a send and of a receive. For full queues the author published
/// only that the cache makes 10 to 20 of difference.
const PUBLISHED: [(&str, [f64; 2]); 3] =
    [(Array::NAME, [305.0, 288.0]), (Plain::NAME, [349.0, 318.0]), (CACHED, [310.0, 322.0])];

const CACHED: &str = "rbtree + cache";
const EMPTY_QUEUE: &str = "empty";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let mut rows = Vec::new();
    for order in [None].into_iter().chain(Order::ALL.map(Some)) {
        rows.push(Row::new::<Array>(Array::NAME, order));
        rows.push(Row::new::<Plain>(Plain::NAME, order));
        rows.push(Row::new::<Tree>(CACHED, order));
    }
    let clock = clock();
    on_one_cpu(|| {
        let mut first = 0;
        repeat(plan, || {
            for at in 0..rows.len() {
                let index = (first + at) % rows.len();
                let row = &mut rows[index];
                let measured = (row.window)();
                for (rounds, ns) in row.rounds.iter_mut().zip(measured) {
                    rounds.push(ns - clock);
                }
            }
            first += 1;
        });
    });
    // The target: without looks at the clock in between.
    let (plain, cached) = (Plain::new(16), <Tree as Queue>::new(16));
    let group = harness::Group::new("send and receive, empty queue")
        .case(crate::queue::pair(&plain, Plain::NAME, 1))
        .case(crate::queue::pair(&cached, CACHED, 1));
    let rounds: Rounds = group.run(plan);
    report.show(&rounds);
    let ratio = rounds.time_ratio(&format!("{CACHED}/1"), &format!("{}/1", Plain::NAME));
    report.record("M7.cache_vs_rbtree", ratio);
    print!("{}", table(&rows));
}

/// The figures beside the published ones.
fn table(rows: &[Row]) -> Table {
    let columns = ["send", "receive", "published send", "published receive"];
    let mut table = Table::new("a queue, ns less the clock's own", columns);
    table.bars = vec![0, 1, 2, 3];
    for row in rows {
        let published = PUBLISHED.iter().find(|(build, _)| *build == row.build);
        let published = published.filter(|_| row.situation == EMPTY_QUEUE).map(|(_, ns)| *ns);
        let published = [0, 1].map(|at| number(published.map(|ns| ns[at]), 0));
        let measured = [0, 1].map(|at| number(median(&row.rounds[at]), 0));
        let cells = measured.into_iter().chain(published);
        table.row(format!("{}, {}", row.build, row.situation), cells);
    }
    table
}

/// Returns the time that a look at the clock adds to a measurement.
fn clock() -> f64 {
    let times = (0..10_000).map(|_| {
        let start = Instant::now();
        start.elapsed().as_nanos() as f64
    });
    median(&times.collect::<Vec<_>>()).unwrap_or(0.0)
}
