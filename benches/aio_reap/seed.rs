//! A4: what QEMU's "linux-aio: process completions from ioq_submit()" changed, on real devices.
//!
//! ```text
//! 8 queues, 32 requests each ──plug──► one engine, Linux AIO, at most 128 in flight
//!                                off   looks for completions when its descriptor says so
//!                                on    and after every submission
//! ```
//!
//! A queue asks for all it can under one plug; what finds no room waits in its queue. Only when no queue
//! can go on is the descriptor polled and the engine turned, as an event loop does it. Sizes are mixed
//! with the seed's mean, MiB/s over operations per second: 10.4 KiB.

use std::hint::black_box;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use aio_reap::{
    AlignedBuf, BackendKind, CompletionQueue, Engine, File, ReapMode, Sizes, SubmitError,
};
use harness::timed::{on_one_cpu, repeat};
use harness::{Plan, Random, Report, Table, median, number, percentile};

use crate::device::{BLOCK, Device, open};
use crate::syscalls::SystemCalls;

const QUEUES: usize = 8;
const PER_QUEUE: usize = 32;
const CAP: usize = 128;
/// The largest request.
const MOST: usize = 64 << 10;

/// Percentiles of the published table, without the 99th that [`Sizes`] adds.
pub(crate) const PERCENTILES: [f64; 11] =
    [1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 99.99];
/// Completions reaped at once as published, before and after.
pub(crate) const PUBLISHED: [[usize; 11]; 2] = [
    [2, 4, 42, 112, 128, 128, 128, 128, 128, 128, 128],
    [1, 1, 4, 14, 33, 45, 47, 48, 50, 51, 108],
];
/// MiB/s; latency in us: mean of the total, 99th and 99.99th percentile of its part from the submission
/// on. As published.
pub(crate) const PUBLISHED_TIMES: [[f64; 4]; 2] =
    [[1822.7, 1389.8, 1800.0, 4704.0], [1921.2, 1318.4, 1496.0, 5408.0]];

/// One mode, over all windows.
#[derive(Default)]
struct Measured {
    sizes: Option<Sizes>,
    throughput: Vec<f64>,
    mean: Vec<f64>,
    p99: Vec<f64>,
    p9999: Vec<f64>,
    syscalls: Vec<f64>,
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let devices = [("RAM disk", Device::ram()), ("disk", Device::disk())];
    for (target, (name, device)) in [true, false].into_iter().zip(devices) {
        let device = match device {
            Ok(device) => device,
            Err(error) => {
                println!("# {name}: not measured: {error}");
                continue;
            }
        };
        let modes = match on_one_cpu(|| measure(plan, &device)) {
            Ok(modes) => modes,
            Err(error) => {
                println!("# {name}: not measured: {error}");
                continue;
            }
        };
        print_tables(name, &modes);
        if target {
            record(&modes, report);
        }
    }
}

fn record([off, on]: &[Measured; 2], report: &mut Report) {
    let p50 = |mode: &Measured| mode.sizes.as_ref().map(|sizes| sizes.percentile(50.0) as f64);
    report.record("A4.reaped_p50", p50(on).zip(p50(off)).map(|(on, off)| on / off));
    report.record("A4.ring_full.pct", on.sizes.as_ref().map(full));
    let calls = median(&on.syscalls).zip(median(&off.syscalls));
    report.record("A4.syscalls", calls.map(|(on, off)| on / off));
}

/// Reaps that found a full ring, in a hundred.
fn full(sizes: &Sizes) -> f64 {
    100.0 * sizes.at_least(CAP) as f64 / sizes.count().max(1) as f64
}

fn measure(plan: &Plan, device: &Device) -> io::Result<[Measured; 2]> {
    let mut modes = [Measured::default(), Measured::default()];
    // Disks need a while for their larger percentiles.
    let window = 20 * plan.window;
    let plan = Plan { rounds: plan.rounds / 9, limit: Duration::MAX, ..plan.clone() };
    let mut result = Ok(());
    let mut round = 0;
    repeat(&plan, || {
        round += 1;
        for turn in 0..2 {
            let on = (round + turn) % 2;
            let mode = if on == 1 { ReapMode::AfterSubmit } else { ReapMode::OnTurn };
            let measured = windows(device, mode, window, &mut modes[on]);
            if result.is_ok() {
                result = measured;
            }
        }
    });
    result.map(|()| modes)
}

/// A window by the clock, and one whose system calls are counted: counting takes time.
fn windows(
    device: &Device,
    mode: ReapMode,
    window: Duration,
    measured: &mut Measured,
) -> io::Result<()> {
    let mut load = Load::new(device, mode)?;
    load.run(Instant::now() + window / 10);
    load.reset();
    let start = Instant::now();
    load.run(start + window);
    let seconds = start.elapsed().as_secs_f64();
    measured.throughput.push(load.bytes as f64 / seconds / f64::from(1 << 20));
    let micros: Vec<f64> = load.nanos.iter().map(|&nanos| nanos as f64 / 1e3).collect();
    measured.mean.push(micros.iter().sum::<f64>() / micros.len().max(1) as f64);
    measured.p99.extend(percentile(&micros, 99.0));
    measured.p9999.extend(percentile(&micros, 99.99));
    if let Ok(mut calls) = SystemCalls::start() {
        load.reset();
        let before = calls.count()?;
        load.run(Instant::now() + window / 10);
        let counted = calls.count()? - before - 1;
        measured.syscalls.push(counted as f64 / load.nanos.len().max(1) as f64);
    }
    let sizes = load.engine.stats().reap_sizes;
    match &mut measured.sizes {
        Some(sum) => sum.merge(&sizes),
        none => *none = Some(sizes),
    }
    Ok(())
}

/// One request of a queue, while it waits there.
struct Asked {
    buf: AlignedBuf,
    since: Option<Instant>,
}

/// The engine and its queues.
struct Load {
    engine: Engine,
    file: File,
    done: CompletionQueue<AlignedBuf>,
    idle: [Vec<Asked>; QUEUES],
    /// When the request with this token was asked for; the token says the queue as well.
    began: Vec<(usize, Instant)>,
    tokens: Vec<u64>,
    pattern: Pattern,
    /// Reads that were done, by their times.
    nanos: Vec<u64>,
    bytes: u64,
}

impl Load {
    fn new(device: &Device, mode: ReapMode) -> io::Result<Self> {
        let builder = Engine::builder().backend(BackendKind::Aio).depth(CAP).capacity(CAP);
        let engine = builder.reap_mode(mode).build()?;
        let file = engine.attach(open(&device.path)?)?;
        let asked = || Asked { buf: AlignedBuf::zeroed(MOST, BLOCK), since: None };
        Ok(Self {
            engine,
            file,
            done: CompletionQueue::new(),
            idle: std::array::from_fn(|_| (0..PER_QUEUE).map(|_| asked()).collect()),
            began: vec![(0, Instant::now()); CAP],
            tokens: (0..CAP as u64).collect(),
            pattern: Pattern { blocks: device.blocks(), random: Random::new(1) },
            nanos: Vec::with_capacity(1 << 20),
            bytes: 0,
        })
    }

    fn reset(&mut self) {
        self.nanos.clear();
        self.bytes = 0;
    }

    /// Runs until then, and until the requests in flight have ended.
    fn run(&mut self, until: Instant) {
        // Every request is wanted from the start of the window on.
        let start = Instant::now();
        self.idle.iter_mut().flatten().for_each(|asked| asked.since = Some(start));
        let mut first = 0;
        while Instant::now() < until {
            let mut went_on = false;
            for queue in 0..QUEUES {
                went_on |= self.ask((first + queue) % QUEUES);
            }
            first = (first + 1) % QUEUES;
            if !went_on {
                self.sleep();
            }
        }
        while self.tokens.len() < CAP {
            self.sleep();
        }
    }

    /// Submits what the queue has, as far as there is room; whether there was any.
    fn ask(&mut self, queue: usize) -> bool {
        let plug = self.engine.plug();
        let mut went_on = false;
        while let Some(mut asked) = self.idle[queue].pop() {
            let Some(token) = self.tokens.pop() else {
                self.idle[queue].push(asked);
                break;
            };
            let now = Instant::now();
            let (offset, len) = self.pattern.next();
            asked.buf.set_len(len);
            let read = self.engine.read(&self.file, asked.buf, offset);
            match read.enqueue(&self.done, token) {
                Ok(_) => self.began[token as usize] = (queue, asked.since.unwrap_or(now)),
                Err(SubmitError::Full(read)) => {
                    self.idle[queue].push(Asked { buf: read.into_buf(), since: asked.since });
                    self.tokens.push(token);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
            went_on = true;
        }
        drop(plug);
        self.take();
        went_on
    }

    fn sleep(&mut self) {
        let fd = self.engine.as_fd().as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one `pollfd`, which lives through the call.
        unsafe { libc::poll(&raw mut poll, 1, 1000) };
        self.engine.turn();
        self.take();
    }

    fn take(&mut self) {
        let mut now = None;
        while let Some(completion) = self.done.pop() {
            let now = *now.get_or_insert_with(Instant::now);
            self.bytes += completion.result.expect("a read") as u64;
            let (queue, began) = self.began[completion.token as usize];
            self.nanos.push((now - began).as_nanos() as u64);
            self.tokens.push(completion.token);
            self.idle[queue].push(Asked { buf: black_box(completion.buf), since: Some(now) });
        }
    }
}

/// The offsets and the length of the reads.
struct Pattern {
    blocks: u64,
    random: Random,
}

impl Pattern {
    /// Offset and length in bytes.
    fn next(&mut self) -> (u64, usize) {
        let number = self.random.next();
        let len = match (number >> 8) % 100 {
            0..82 => BLOCK,
            82..84 => 2 * BLOCK,
            84..88 => 4 * BLOCK,
            88..92 => 8 * BLOCK,
            _ => MOST,
        };
        let places = u128::from(self.blocks - (MOST / BLOCK) as u64);
        let block = ((u128::from(number) * places) >> 64) as u64;
        (block * BLOCK as u64, len)
    }
}

/// Completions reaped at once, off and on.
pub(crate) fn reaped(of: &str, sizes: [Option<&Sizes>; 2]) -> Table {
    let title = format!("{of}: completions reaped at once, by percentile of the reaps");
    let mut table = Table::new(title, &PERCENTILES);
    table.bars = (0..PERCENTILES.len()).collect();
    for ((name, sizes), published) in ["off", "on"].into_iter().zip(sizes).zip(PUBLISHED) {
        let measured = PERCENTILES.map(|at| sizes.map(|sizes| sizes.percentile(at) as f64));
        table.row(name, measured.map(|size| number(size, 0)));
        table.row(format!("{name}, published"), published.map(|size| size.to_string()));
    }
    table
}

/// Throughput and times, off and on: as [`PUBLISHED_TIMES`].
pub(crate) fn times(of: &str, measured: [[f64; 4]; 2]) -> Table {
    let columns = ["MiB/s", "mean, us", "p99", "p99.99"];
    let mut table = Table::new(of, columns);
    table.bars = vec![1, 2, 3];
    for ((name, measured), published) in
        ["off", "on"].into_iter().zip(measured).zip(PUBLISHED_TIMES)
    {
        for (name, row) in [(name.to_string(), measured), (format!("{name}, published"), published)]
        {
            table.row(name, row.map(|value| number(Some(value), 1)));
        }
    }
    table
}

fn print_tables(device: &str, modes: &[Measured; 2]) {
    let mut reaped = reaped(device, modes.each_ref().map(|mode| mode.sizes.as_ref()));
    reaped.columns.extend(["full, %".into(), "calls/read".into()]);
    for (mode, at) in modes.iter().zip([0, 2]) {
        let full = number(mode.sizes.as_ref().map(full), 2);
        reaped.rows[at].1.extend([full, number(median(&mode.syscalls), 4)]);
    }
    let figures = modes.each_ref().map(|mode| {
        let figures = [&mode.throughput, &mode.mean, &mode.p99, &mode.p9999];
        figures.map(|figure| median(figure).unwrap_or(f64::NAN))
    });
    print!("{reaped}{}", times(device, figures));
}
