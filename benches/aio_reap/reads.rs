//! The loop of A2 and A3: so many reads of one block in flight, at offsets without order, for a while.
//!
//! ```text
//! row 0   a thread on the first CPU: its engine, ring or runtime lives there
//! row 1   another, on the same CPU; asleep while a row before it is measured
//! row 2   fio, started on that CPU for each window
//! ```
//!
//! Each row of a round gets the same offsets, fio its own.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use harness::timed::{least_disturbed, repeat};
use harness::{FioMix, Plan, Rounds, Span, Window, allowed_cpus, pin, thread_cpu_time};

use crate::device::{BLOCK, Device};

/// The work of every row.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) path: PathBuf,
    pub(crate) blocks: u64,
    pub(crate) depth: usize,
}

/// Hands out offsets until the time is over.
pub(crate) struct Feed {
    state: Cell<u64>,
    blocks: u64,
    until: Instant,
    handed: Cell<u64>,
    over: Cell<bool>,
}

impl Feed {
    /// Offsets between two looks at the clock.
    const BETWEEN: u64 = 64;

    fn new(job: &Job, seed: u64, until: Instant) -> Self {
        let state = Cell::new(0x9E37_79B9_7F4A_7C15 ^ seed);
        let (handed, over) = (Cell::new(0), Cell::new(false));
        Self { state, blocks: job.blocks, until, handed, over }
    }

    /// Returns the next offset to read.
    #[inline(always)]
    pub(crate) fn next(&self) -> Option<u64> {
        let handed = self.handed.get();
        if handed.is_multiple_of(Self::BETWEEN) && Instant::now() >= self.until {
            self.over.set(true);
        }
        if self.over.get() {
            return None;
        }
        self.handed.set(handed + 1);
        let mut state = self.state.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.state.set(state);
        let block = ((u128::from(state) * u128::from(self.blocks)) >> 64) as u64;
        Some(block * BLOCK as u64)
    }
}

/// An implementation, on its thread.
pub(crate) trait Reader {
    /// Reads what the feed says, and returns when all of it is there.
    fn read(&mut self, feed: &Rc<Feed>);
}

/// Makes an implementation; why it could not is its row's line.
pub(crate) type Make = fn(&Job) -> io::Result<Box<dyn Reader>>;

/// The way in which a row is measured.
pub(crate) enum Kind {
    Thread(Make),
    /// Arguments of fio beside those that every row of it has.
    Fio(Vec<String>),
}

/// The rows, by the names that the tables have.
pub(crate) type Rows = Vec<(&'static str, Kind)>;

/// fio's arguments for batches: what completed is taken at once, and as many are submitted at once.
pub(crate) fn fio_batched(engine: &str, depth: usize) -> Kind {
    Kind::Fio(vec![
        format!("--ioengine={engine}"),
        format!("--iodepth_batch_submit={depth}"),
        "--iodepth_batch_complete_min=1".to_string(),
        format!("--iodepth_batch_complete_max={depth}"),
    ])
}

/// Measures the rows: about a ninth of the plan's rounds, with windows of `length` for threads and of
/// [`fio_length`] for fio.
pub(crate) fn measure(
    group: &str,
    plan: &Plan,
    length: Duration,
    device: &Device,
    depth: usize,
    rows: &Rows,
) -> Rounds {
    let job = Job { path: device.path.clone(), blocks: device.blocks(), depth };
    let cpu = allowed_cpus()[0];
    let fio_length = fio_length(plan);
    let plan = Plan { rounds: plan.rounds / 9, limit: Duration::MAX, ..plan.clone() };
    let mut rounds = Rounds::new(group, rows.iter().map(|(name, _)| (format!("{name}/1"), 1)));
    thread::scope(|scope| {
        let workers: Vec<Option<Worker>> = rows
            .iter()
            .map(|(name, kind)| {
                let Kind::Thread(make) = kind else { return None };
                let (orders, inbox) = channel();
                let (outbox, spans) = channel();
                let job = job.clone();
                scope.spawn(move || work(cpu, &job, *make, &inbox, &outbox));
                match spans.recv().expect("a worker panicked") {
                    Ok(_) => Some(Worker { orders, spans }),
                    Err(error) => {
                        println!("# {name}: not measured: {error}");
                        None
                    }
                }
            })
            .collect();
        let mut seed = 0;
        let mut complained = vec![false; rows.len()];
        repeat(&plan, || {
            seed += 1;
            rounds.round(0, |index| match (&rows[index].1, &workers[index]) {
                (Kind::Thread(_), None) => None,
                (Kind::Thread(_), Some(worker)) => {
                    least_disturbed(&plan, || worker.window(seed, length))
                }
                (Kind::Fio(args), _) => {
                    let measured = run_fio(&job, device, cpu, fio_length, args);
                    if let (Err(error), false) = (&measured, complained[index]) {
                        println!("# {}: not measured: {error}", rows[index].0);
                        complained[index] = true;
                    }
                    measured.ok()
                }
            });
        });
    });
    rounds
}

/// Returns the time for which fio is measured. fio takes a while to start.
pub(crate) fn fio_length(plan: &Plan) -> Duration {
    50 * plan.window
}

fn run_fio(
    job: &Job,
    device: &Device,
    cpu: usize,
    runtime: Duration,
    args: &[String],
) -> io::Result<f64> {
    let path = job.path.to_str().expect("temporary paths are UTF-8");
    let common = [
        format!("--filename={path}"),
        format!("--size={}", job.blocks * BLOCK as u64),
        format!("--bs={BLOCK}"),
        format!("--iodepth={}", job.depth),
        "--rw=randread".to_string(),
        "--direct=1".to_string(),
        "--invalidate=0".to_string(),
        "--gtod_reduce=1".to_string(), // no clock reads for latencies
        "--thread".to_string(),        // it ends with the bench; a process that it forks does not
    ];
    FioMix::reads_per_second(cpu, runtime, device.scratch.path(), common.iter().chain(args))
}

/// The thread of a row.
struct Worker {
    orders: Sender<(u64, Duration)>,
    spans: Receiver<io::Result<Span>>,
}

impl Worker {
    fn window(&self, seed: u64, window: Duration) -> Window {
        self.orders.send((seed, window)).expect("a worker panicked");
        let span = self.spans.recv().expect("a worker panicked");
        Window::new(vec![span.expect("only the first answer can be an error")])
    }
}

fn work(
    cpu: usize,
    job: &Job,
    make: Make,
    orders: &Receiver<(u64, Duration)>,
    spans: &Sender<io::Result<Span>>,
) {
    pin(cpu);
    let mut reader = match make(job) {
        Ok(reader) => reader,
        Err(error) => {
            spans.send(Err(error)).expect("the bench waits for it");
            return;
        }
    };
    let mut window = |seed, length| {
        let (start, cpu) = (Instant::now(), thread_cpu_time());
        let feed = Rc::new(Feed::new(job, seed, start + length));
        reader.read(&feed);
        let (end, cpu) = (start.elapsed(), thread_cpu_time() - cpu);
        Ok(Span { start: Duration::ZERO, end, cpu, ops: feed.handed.get() })
    };
    // The first, to warm up, says that it works.
    spans.send(window(0, Duration::from_millis(5))).expect("the bench waits for it");
    for (seed, length) in orders {
        spans.send(window(seed, length)).expect("the bench waits for it");
    }
}
