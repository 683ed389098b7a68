//! The built-in client: uses a server through its socket and checks every byte of its replies.
//!
//! ```text
//!  image   | shared: read by all | region of connection 0 | region of connection 1 | ...
//!  fill    every connection writes its region and its part of the shared one, 1 MiB at a time
//!  mixed   random 4 KiB reads and writes, 70 to 30, and some of everything else, for a set time
//!  trims   TRIMs alone, 16 at a time, for a second
//!  verify  every connection reads back another one's region, and all of the image is compared
//! ```
//!
//! One thread per connection, up to `depth` requests in flight on each; replies may come in any
//! order. Every second connection negotiates structured replies.

mod connection;
mod model;
mod report;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use nbd_protocol::TransmissionFlags;

use self::connection::{Connection, Progress};
pub(crate) use self::model::DemoError;
use self::model::{Kind, Layout, Mixed, Plan, Region, Sweep};
pub(crate) use self::report::DemoReport;
use self::report::{PhaseReport, TRIMS_AT_A_TIME, Tally};

/// The time of the phase of TRIMs.
const TRIMS: Duration = Duration::from_secs(1);
/// The start of the pseudo-random sequence of requests.
const SEED: u64 = 0x0ff1_0c4b;

/// The options of a run.
#[derive(Clone, Debug)]
pub(crate) struct DemoOptions {
    /// Connections, each with a thread. Reduced to one if the server does not offer `MULTI_CONN`.
    pub(crate) connections: usize,
    /// Requests in flight per connection.
    pub(crate) depth: usize,
    /// Minimum duration of the mixed phase, which also needs `at_least` requests.
    pub(crate) mixed: Duration,
    /// Minimum number of requests of each connection in the mixed phase.
    pub(crate) at_least: u64,
    /// Show a progress bar on stderr, if that is a terminal.
    pub(crate) progress: bool,
}

impl Default for DemoOptions {
    /// 4 connections with 32 requests in flight for 8 seconds, under a progress bar.
    fn default() -> Self {
        Self {
            connections: 4,
            depth: 32,
            mixed: Duration::from_secs(8),
            at_least: 1000,
            progress: true,
        }
    }
}

/// Fills, exercises and verifies the default export at `socket`, which is overwritten.
///
/// Blocks for the time of the mixed phase, and for as long as it takes to write and read the image
/// once.
///
/// # Errors
///
/// The first [`DemoError`] of any connection. A wrong byte is an error.
pub(crate) fn run(socket: &Path, options: &DemoOptions) -> Result<DemoReport, DemoError> {
    let open = |nr| Connection::open(socket, options.depth, nr);
    let first = open(0)?;
    let mut wanted = options.connections.max(1);
    if !first.export().flags.contains(TransmissionFlags::CAN_MULTI_CONN) {
        wanted = 1;
    }
    let size = first.export().size;
    let layout = Layout::new(size, wanted as u64);
    let usable = layout.is_usable() && !first.export().flags.contains(TransmissionFlags::READ_ONLY);
    if !usable {
        return Err(DemoError::Unusable { size, needed: Layout::smallest(wanted as u64) });
    }
    let mut connections = vec![first];
    for nr in 1..wanted {
        connections.push(open(nr)?);
    }
    let mut regions: Vec<Region> = (0..wanted as u64).map(|nr| layout.region(nr)).collect();
    let mut report = DemoReport {
        size,
        connections: wanted,
        structured: connections.iter().filter(|c| c.export().style.has_chunks()).count(),
        depth: options.depth,
        ..DemoReport::default()
    };

    let bar = Bar::new(options.progress);
    let sweep = |regions: &[Region], write| -> Vec<_> {
        let parts = regions.iter().enumerate();
        parts.map(|(nr, region)| Sweep::new(region, layout.shared_part(nr as u64), write)).collect()
    };

    bar.phase("fill", layout.bytes());
    let plans = sweep(&regions, true);
    let (fill, _) = phase(&mut connections, &mut regions, plans, |p| bar.bytes(p))?;
    report.fill = fill;

    bar.phase("mixed", options.mixed.as_millis() as u64);
    let start = Instant::now();
    let plans = (0..wanted as u64)
        .map(|nr| {
            let seed = SEED.wrapping_add(nr);
            Mixed::new(&layout, seed, start + options.mixed, options.at_least)
        })
        .collect();
    let show = |p: &Progress| bar.time(start.elapsed(), p);
    let (mixed, tally) = phase(&mut connections, &mut regions, plans, show)?;
    report.mixed = mixed;
    report.kinds = tally.kinds();

    if connections[0].export().flags.contains(TransmissionFlags::SEND_TRIM) {
        bar.phase("trims", TRIMS.as_millis() as u64);
        connections
            .iter_mut()
            .for_each(|connection| connection.depth = (TRIMS_AT_A_TIME / wanted).max(1));
        let start = Instant::now();
        let plans = (0..wanted as u64)
            .map(|nr| Mixed::trims(&layout, SEED.wrapping_add(nr), start + TRIMS))
            .collect();
        let show = |p: &Progress| bar.time(start.elapsed(), p);
        let (_, tally) = phase(&mut connections, &mut regions, plans, show)?;
        report.trims = tally.kinds();
        report.trims.retain(|kind| kind.name == Kind::Trim.name()); // and not the last FLUSH
        connections.iter_mut().for_each(|connection| connection.depth = options.depth);
    }

    // Every region is read back by a connection that did not write it.
    regions.rotate_left(1);
    bar.phase("verify", layout.bytes());
    let plans = sweep(&regions, false);
    let (verify, _) = phase(&mut connections, &mut regions, plans, |p| bar.bytes(p))?;
    report.verify = verify;
    report.image_verified = verify.read == layout.bytes() && layout.bytes() == size;
    bar.0.finish_and_clear();

    for connection in connections {
        connection.close()?;
    }
    Ok(report)
}

/// Runs one plan per connection, each on a thread of its own, while the calling thread shows the
/// progress.
fn phase<P: Plan + Send>(
    connections: &mut [Connection],
    regions: &mut [Region],
    plans: Vec<P>,
    show: impl Fn(&Progress),
) -> Result<(PhaseReport, Tally), DemoError> {
    let progress = Progress::default();
    let start = Instant::now();
    let results: Vec<Result<Tally, DemoError>> = thread::scope(|scope| {
        let threads: Vec<_> = connections
            .iter_mut()
            .zip(regions.iter_mut())
            .zip(plans)
            .map(|((connection, region), plan)| {
                let progress = &progress;
                scope.spawn(move || {
                    let result = connection.run(region, plan, progress);
                    if result.is_err() {
                        // Ordering: Relaxed; the other connections only stop. The error is returned
                        // by `join`.
                        progress.stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            show(&progress);
            thread::sleep(Duration::from_millis(20));
        }
        threads.into_iter().map(|t| t.join().expect("a demo thread panicked")).collect()
    });
    let elapsed = start.elapsed();

    let mut total = Tally::default();
    let mut failure = None;
    for result in results {
        match result {
            Ok(tally) => total.add(&tally),
            // The error of the connection that failed first is the cause, not that of one that was
            // stopped.
            Err(DemoError::Stopped) if failure.is_some() => {}
            Err(error) if matches!(failure, None | Some(DemoError::Stopped)) => {
                failure = Some(error);
            }
            Err(_) => {}
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok((total.phase(elapsed), total)),
    }
}

/// The progress bar over the phases.
struct Bar(ProgressBar);

impl Bar {
    fn new(visible: bool) -> Self {
        let bar = if visible { ProgressBar::new(1) } else { ProgressBar::hidden() };
        let template = "{spinner} {prefix:>6} [{bar:40}] {percent:>3}%  {msg}";
        let style = ProgressStyle::with_template(template).expect("the template is constant");
        Self(bar.with_style(style.progress_chars("=> ")))
    }

    fn phase(&self, name: &'static str, length: u64) {
        self.0.set_prefix(name);
        self.0.set_message("");
        self.0.set_length(length);
        self.0.set_position(0);
    }

    fn bytes(&self, progress: &Progress) {
        let bytes = progress.bytes.load(Ordering::Relaxed);
        self.0.set_message(format!("{} MiB", bytes >> 20));
        self.0.set_position(bytes);
    }

    fn time(&self, elapsed: Duration, progress: &Progress) {
        let ops = progress.ops.load(Ordering::Relaxed) as f64;
        let rate = ops / elapsed.as_secs_f64().max(0.001);
        self.0.set_message(format!("{rate:.0} requests/s"));
        self.0.set_position(elapsed.as_millis() as u64);
    }
}
