//! Cases measured by one generic loop, on pinned threads that live as long as the group.
//!
//! ```text
//! main       calibrate | window case 0 | window case 1 | ...   (asleep while a window runs)
//! worker 0   pinned to the first CPU; owns its part of every case, made on this thread
//! worker 1   pinned to the second; takes part in the windows of cases with two threads
//! ```
//!
//! The workers are kept, rather than started per window, so that a peer that registers its threads
//! does so once.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::cpu::{allowed_cpus, pin, thread_cpu_time};
use crate::rounds::Rounds;
use crate::timed::{least_disturbed, repeat, wait};
use crate::window::{Span, Window};

/// Time between two looks at the clock inside a window: far above the cost of a look (about
/// 30 ns), far below a window.
const CHUNK: Duration = Duration::from_micros(10);

/// The number of times that all rounds are measured again if a case has no window that counts: the load of a
/// busy machine changes within seconds.
const AGAIN: usize = 2;

/// The parameters of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Rounds; each measures every case once.
    pub rounds: usize,
    /// Length of one window.
    pub window: Duration,
    /// The number of times that a window that does not count is tried again within its round.
    pub retries: usize,
    /// Windows of several threads count from this overlap on (see [`Window::overlap`]). Those of one
    /// thread are tried again below it as well, or a ratio of two threads to one would compare
    /// quiet windows with disturbed ones; the least disturbed counts. Zero for operations that
    /// sleep.
    pub min_overlap: f64,
    /// No round begins later than this after the first, from the fourth on: on a busy machine most
    /// windows are tried again.
    pub limit: Duration,
    /// The numbers of threads of the rows that scale: 1, 2, and what `--threads` adds.
    pub threads: Vec<usize>,
    /// `--quick` or `--smoke`, where one was given: for another run of the bench.
    pub pace: Option<&'static str>,
}

impl Plan {
    /// 101 rounds of 10 ms within a minute, or 31 of 5 ms within 1.5 s with `--quick`; at least
    /// 85 % overlap. With `--smoke` three of 1 ms.
    pub fn new(args: &Args) -> Self {
        let ms = Duration::from_millis;
        let usual = Self {
            rounds: 101,
            window: ms(10),
            retries: 3,
            min_overlap: 0.85,
            limit: ms(60_000),
            threads: args.threads(),
            pace: None,
        };
        if args.smoke {
            // Nine, because some benches take a ninth of them.
            let (limit, pace) = (Duration::ZERO, Some("--smoke"));
            Self { rounds: 9, window: ms(1), retries: 0, limit, pace, ..usual }
        } else if args.quick {
            let (limit, pace) = (ms(1_500), Some("--quick"));
            Self { rounds: 31, window: ms(5), retries: 2, limit, pace, ..usual }
        } else {
            usual
        }
    }
}

/// Runs that many operations.
type Body<'a> = Box<dyn FnMut(u64) + 'a>;

/// One implementation with a number of threads, measured beside the others of its [`Group`].
pub struct Case<'a> {
    name: String,
    threads: usize,
    make: Box<dyn Fn(usize) -> Body<'a> + Sync + 'a>,
}

impl<'a> Case<'a> {
    /// `make` runs once on each thread, gets the number of the thread (from 0), and returns the
    /// operation, which gets a running count. The case is called `name/threads`.
    pub fn new<Op>(name: &str, threads: usize, make: impl Fn(usize) -> Op + Sync + 'a) -> Self
    where
        Op: FnMut(u64) + 'a,
    {
        Self::batched(name, threads, move |thread| {
            let mut op = make(thread);
            let mut next = 0_u64;
            move |ops| {
                // A local: what the optimiser must not see through may touch `next`, and would
                // make every operation wait for a count in memory.
                let mut count = next;
                for _ in 0..ops {
                    op(count);
                    count = count.wrapping_add(1);
                }
                next = count;
            }
        })
    }

    /// Like [`new`](Self::new), for an operation that is the same on all threads.
    pub fn op<R>(name: &str, threads: usize, op: impl Fn() -> R + Copy + Sync + 'a) -> Self {
        Self::new(name, threads, move |_| {
            move |_| {
                black_box(&op());
            }
        })
    }

    /// Like [`new`](Self::new), for a case whose loop does something around many operations, such
    /// as holding a guard: the closure is told how many operations to do.
    pub fn batched<Batch>(
        name: &str,
        threads: usize,
        make: impl Fn(usize) -> Batch + Sync + 'a,
    ) -> Self
    where
        Batch: FnMut(u64) + 'a,
    {
        assert!(threads > 0, "case {name} has no thread");
        let make = move |thread| Box::new(make(thread)) as Body<'a>;
        Self { name: format!("{name}/{threads}"), threads, make: Box::new(make) }
    }
}

/// Cases that are compared with each other.
pub struct Group<'a> {
    name: String,
    cases: Vec<Case<'a>>,
}

impl<'a> Group<'a> {
    /// An empty group.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_string(), cases: Vec::new() }
    }

    /// Adds a case.
    #[must_use]
    pub fn case(mut self, case: Case<'a>) -> Self {
        self.cases.push(case);
        self
    }

    /// Adds cases.
    #[must_use]
    pub fn cases(mut self, cases: impl IntoIterator<Item = Case<'a>>) -> Self {
        self.cases.extend(cases);
        self
    }

    /// Measures all cases. Thread `n` of every case is pinned to the `n`-th CPU that this process
    /// may use; with fewer CPUs than threads they share, and no such window counts.
    pub fn run(self, plan: &Plan) -> Rounds {
        let names = self.cases.iter().map(|case| (case.name.clone(), case.threads));
        let mut rounds = Rounds::new(self.name, names);
        let cases = &self.cases[..];
        let threads = cases.iter().map(|case| case.threads).max().unwrap_or(0);
        let cpus = allowed_cpus();
        thread::scope(|scope| {
            let workers: Vec<Worker> = (0..threads)
                .map(|thread| {
                    let cpu = cpus[thread % cpus.len()];
                    let (orders, inbox) = channel();
                    let (outbox, spans) = channel();
                    scope.spawn(move || work(thread, cpu, cases, &inbox, &outbox));
                    Worker { orders, spans }
                })
                .collect();

            let mut run = |index: usize, chunk: u64, window: Duration| {
                let case = &cases[index];
                window_of(&workers[..case.threads], index, chunk, window)
            };
            let chunks: Vec<u64> =
                (0..cases.len()).map(|index| calibrate(index, &mut run)).collect();
            let again = if plan.retries == 0 { 0 } else { AGAIN };
            for pass in 0..=again {
                if pass > 0 && !rounds.lacks_a_case(cpus.len()) {
                    break;
                }
                repeat(plan, || {
                    rounds.round(plan.retries, |index| {
                        let window = || run(index, chunks[index], plan.window);
                        if cases[index].threads == 1 {
                            let [throughput] = least_disturbed(plan, || [window()]);
                            return Some(throughput);
                        }
                        let window = window();
                        (window.overlap() >= plan.min_overlap).then(|| window.throughput())
                    });
                });
            }
        });
        rounds
    }
}

/// The number of operations that take about [`CHUNK`], with all threads of the case at work.
fn calibrate(index: usize, run: &mut impl FnMut(usize, u64, Duration) -> Window) -> u64 {
    let mut chunk = 1;
    while chunk < 1 << 20 {
        let window = run(index, chunk, 20 * CHUNK);
        let took = window.ns_per_op() * chunk as f64;
        if took >= CHUNK.as_nanos() as f64 {
            break;
        }
        chunk *= 2;
    }
    chunk
}

/// One window of one case.
struct Order {
    case: usize,
    chunk: u64,
    window: Duration,
    /// The clock that the spans of this window count from.
    epoch: Instant,
    /// Threads that are ready to start.
    ready: Arc<AtomicUsize>,
}

struct Worker {
    orders: Sender<Order>,
    spans: Receiver<Span>,
}

fn window_of(workers: &[Worker], case: usize, chunk: u64, window: Duration) -> Window {
    let ready = Arc::new(AtomicUsize::new(0));
    let epoch = Instant::now();
    for worker in workers {
        let order = Order { case, chunk, window, epoch, ready: Arc::clone(&ready) };
        worker.orders.send(order).expect("a worker panicked");
    }
    // A worker that panics drops its end: this panics in turn, and the scope joins the others.
    Window::new(workers.iter().map(|w| w.spans.recv().expect("a worker panicked")).collect())
}

/// A worker's life: from its first order to the end of the group.
fn work(
    thread: usize,
    cpu: usize,
    cases: &[Case<'_>],
    inbox: &Receiver<Order>,
    outbox: &Sender<Span>,
) {
    pin(cpu);
    let mut bodies: Vec<Option<Body<'_>>> = cases.iter().map(|_| None).collect();
    while let Ok(order) = inbox.recv() {
        let case = &cases[order.case];
        let ready = Ready(&order.ready);
        let body = bodies[order.case].get_or_insert_with(|| (case.make)(thread));
        body(order.chunk); // warm up: the caches still hold what the case before left there
        drop(ready);
        // Ordering: Relaxed; see `Ready`.
        wait(|| order.ready.load(Ordering::Relaxed) >= case.threads);
        let span = measure(body, &order);
        if outbox.send(span).is_err() {
            return; // the group is over: another worker panicked
        }
    }
}

/// Counts this thread as ready when it is dropped: also in a panic, or the others would wait for ever.
struct Ready<'a>(&'a AtomicUsize);

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; the count only lines up the starts, it publishes nothing.
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn measure(body: &mut Body<'_>, order: &Order) -> Span {
    let start = order.epoch.elapsed();
    let cpu = thread_cpu_time();
    let mut ops = 0;
    while order.epoch.elapsed() - start < order.window {
        body(order.chunk);
        ops += order.chunk;
    }
    let cpu = thread_cpu_time() - cpu;
    Span { start, end: order.epoch.elapsed(), cpu, ops }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rounds: usize) -> Plan {
        Plan { rounds, window: Duration::from_millis(2), ..Plan::new(&Args::default()) }
    }

    /// A case of two threads that sleep most of the time never ran at once: all its windows are
    /// discarded, and with the rule off they all count.
    #[test]
    fn windows_without_overlap_do_not_count() {
        let nap = || Case::new("nap", 2, |_| |_| thread::sleep(Duration::from_micros(200)));
        let rounds = Group::new("g").case(nap()).run(&plan(2));
        assert_eq!(rounds.throughput("nap/2"), None);
        // Two rounds, one window and three retries each; and all of it again, as no window counted.
        assert_eq!(rounds.discarded("nap/2"), 8 * (1 + AGAIN));

        let rounds = Group::new("g").case(nap()).run(&Plan { min_overlap: 0.0, ..plan(2) });
        assert!(rounds.throughput("nap/2").is_some());
        assert_eq!(rounds.discarded("nap/2"), 0);
    }
}
