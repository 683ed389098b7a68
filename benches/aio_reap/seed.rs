//! A4: what QEMU's "linux-aio: process completions from ioq_submit()" changed, on a RAM disk.
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
use harness::{Plan, Random, Report, Table, median, number};

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
/// One mode, over all windows.
#[derive(Default)]
struct Measured {
    sizes: Option<Sizes>,
    syscalls: Vec<f64>,
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let measured = Device::ram().and_then(|device| on_one_cpu(|| measure(plan, &device)));
    let [off, on] = match measured {
        Ok(modes) => modes,
        Err(error) => return println!("# RAM disk: not measured: {error}"),
    };
    let mut reaped = reaped("RAM disk", [&off, &on].map(|mode| mode.sizes.as_ref()));
    reaped.columns.extend(["full, %".into(), "calls/read".into()]);
    for (mode, at) in [&off, &on].into_iter().zip([0, 2]) {
        let full = number(mode.sizes.as_ref().map(full), 2);
        reaped.rows[at].1.extend([full, number(median(&mode.syscalls), 4)]);
    }
    print!("{reaped}");
    let p50 = |mode: &Measured| mode.sizes.as_ref().map(|sizes| sizes.percentile(50.0) as f64);
    report.record("A4.reaped_p50", p50(&on).zip(p50(&off)).map(|(on, off)| on / off));
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

/// A window, and one whose system calls are counted: counting takes time.
fn windows(
    device: &Device,
    mode: ReapMode,
    window: Duration,
    measured: &mut Measured,
) -> io::Result<()> {
    let mut load = Load::new(device, mode)?;
    load.run(Instant::now() + window);
    if let Ok(mut calls) = SystemCalls::start() {
        load.done_reads = 0;
        let before = calls.count()?;
        load.run(Instant::now() + window / 10);
        let counted = calls.count()? - before - 1;
        measured.syscalls.push(counted as f64 / load.done_reads.max(1) as f64);
    }
    let sizes = load.engine.stats().reap_sizes;
    match &mut measured.sizes {
        Some(sum) => sum.merge(&sizes),
        none => *none = Some(sizes),
    }
    Ok(())
}

/// The engine and its queues.
struct Load {
    engine: Engine,
    file: File,
    done: CompletionQueue<AlignedBuf>,
    /// The buffers of the requests that wait in each queue.
    idle: [Vec<AlignedBuf>; QUEUES],
    /// The queue of the request with this token.
    queues: Vec<usize>,
    tokens: Vec<u64>,
    pattern: Pattern,
    done_reads: u64,
}

impl Load {
    fn new(device: &Device, mode: ReapMode) -> io::Result<Self> {
        let builder = Engine::builder().backend(BackendKind::Aio).depth(CAP).capacity(CAP);
        let engine = builder.reap_mode(mode).build()?;
        let file = engine.attach(open(&device.path)?)?;
        let buf = |_| AlignedBuf::zeroed(MOST, BLOCK);
        Ok(Self {
            engine,
            file,
            done: CompletionQueue::new(),
            idle: std::array::from_fn(|_| (0..PER_QUEUE).map(buf).collect()),
            queues: vec![0; CAP],
            tokens: (0..CAP as u64).collect(),
            pattern: Pattern { blocks: device.blocks(), random: Random::new(1) },
            done_reads: 0,
        })
    }

    /// Runs until then, and until the requests in flight have ended.
    fn run(&mut self, until: Instant) {
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
        while let Some(mut buf) = self.idle[queue].pop() {
            let Some(token) = self.tokens.pop() else {
                self.idle[queue].push(buf);
                break;
            };
            let (offset, len) = self.pattern.next();
            buf.set_len(len);
            match self.engine.read(&self.file, buf, offset).enqueue(&self.done, token) {
                Ok(_) => self.queues[token as usize] = queue,
                Err(SubmitError::Full(read)) => {
                    self.idle[queue].push(read.into_buf());
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
        while let Some(completion) = self.done.pop() {
            completion.result.expect("a read");
            self.done_reads += 1;
            self.tokens.push(completion.token);
            let queue = self.queues[completion.token as usize];
            self.idle[queue].push(black_box(completion.buf));
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
