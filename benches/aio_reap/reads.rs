//! The loop of A2 and A3: so many reads of one block in flight, at offsets without order, for a while.
//!
//! All engines, rings and runtimes live on one thread on the first CPU, where fio is started for each window.
//! Each row gets the same offsets, window by window, fio its own.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use harness::timed::{self, Row, on_one_cpu};
use harness::{FioMix, Plan, Random, Rounds, allowed_cpus};

use crate::device::{BLOCK, Device};

/// The work of every row.
pub(crate) struct Job {
    pub(crate) path: PathBuf,
    pub(crate) blocks: u64,
    pub(crate) depth: usize,
}

/// Hands out offsets until the time is over.
pub(crate) struct Feed {
    random: Cell<Random>,
    blocks: u64,
    until: Instant,
    handed: Cell<u64>,
    over: Cell<bool>,
}

impl Feed {
    /// Offsets between two looks at the clock.
    const BETWEEN: u64 = 64;

    fn new(job: &Job, seed: u64, until: Instant) -> Self {
        let random = Cell::new(Random::new(seed));
        let (handed, over) = (Cell::new(0), Cell::new(false));
        Self { random, blocks: job.blocks, until, handed, over }
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
        let mut random = self.random.get();
        let block = random.below(self.blocks as usize);
        self.random.set(random);
        Some((block * BLOCK) as u64)
    }
}

/// Reads what the feed says, and returns when all of it is there.
pub(crate) type Reader = Box<dyn FnMut(&Rc<Feed>)>;

/// Makes an implementation; why it could not is its row's line.
pub(crate) type Make = fn(&Job) -> io::Result<Reader>;

/// The way in which a row is measured.
pub(crate) enum Kind {
    Reader(Make),
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

/// Measures the rows: about a ninth of the plan's rounds, with windows of `length`, but of [`fio_length`] for
/// fio.
pub(crate) fn measure(
    group: &str,
    plan: &Plan,
    length: Duration,
    device: &Device,
    depth: usize,
    rows: &Rows,
) -> Rounds {
    let job = Job { path: device.path.clone(), blocks: device.blocks(), depth };
    let job = &job;
    let row = |&(name, ref kind): &(&'static str, Kind)| {
        let complain = move |error: io::Error| println!("# {name}: not measured: {error}");
        match kind {
            Kind::Reader(make) => match on_one_cpu(|| make(job)) {
                Ok(reader) => reads(name, job, reader, length),
                Err(error) => {
                    complain(error);
                    Row::of_windows(format!("{name}/1"), 1, |_| None)
                }
            },
            Kind::Fio(args) => {
                let (name, args, mut complain) =
                    (format!("{name}/1"), args.clone(), Some(complain));
                Row::of_windows(name, 1, move |plan| {
                    let measured = run_fio(job, device, fio_length(plan), &args);
                    let once = |error| _ = complain.take().map(|complain| complain(error));
                    measured.map_err(once).ok().map(|rate| [rate])
                })
            }
        }
    };
    let rows = rows.iter().map(row).collect();
    let plan = Plan { rounds: plan.rounds / 9, limit: Duration::MAX, ..plan.clone() };
    let [rounds] = timed::measure([group], &plan, rows);
    rounds
}

fn reads<'a>(name: &str, job: &'a Job, mut reader: Reader, length: Duration) -> Row<'a> {
    let mut seed = 0;
    let mut window = move |length| {
        seed += 1;
        let feed = Rc::new(Feed::new(job, seed, Instant::now() + length));
        reader(&feed);
        feed.handed.get()
    };
    on_one_cpu(|| window(Duration::from_millis(5))); // to warm up
    Row::new(name, move || window(length))
}

/// Returns the time for which fio is measured. fio takes a while to start.
pub(crate) fn fio_length(plan: &Plan) -> Duration {
    50 * plan.window
}

fn run_fio(job: &Job, device: &Device, runtime: Duration, args: &[String]) -> io::Result<f64> {
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
    let cpu = allowed_cpus()[0];
    let args = common.iter().chain(args);
    FioMix::measure(cpu, runtime, device.scratch.path(), args).map(|mix| mix.iops())
}
