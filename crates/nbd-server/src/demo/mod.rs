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

pub(crate) mod connection;
mod model;
mod report;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nbd_protocol::TransmissionFlags;

use self::connection::Connection;
pub(crate) use self::model::DemoError;
use self::model::{Layout, Mixed, Plan, Region, sweep};
use self::report::TRIMS_AT_A_TIME;
pub(crate) use self::report::{DemoReport, Phase};

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
}

impl Default for DemoOptions {
    /// 4 connections with 32 requests in flight for 8 seconds.
    fn default() -> Self {
        Self { connections: 4, depth: 32, mixed: Duration::from_secs(8), at_least: 1000 }
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

    let offered = connections[0].export().flags;
    let sweeps = |regions: &[Region], write| -> Vec<_> {
        let parts = (0..).zip(regions);
        parts.map(|(nr, region)| sweep(region, layout.shared_part(nr), write, offered)).collect()
    };
    let seeds = (0..wanted as u64).map(|nr| SEED.wrapping_add(nr));

    let plans = sweeps(&regions, true);
    report.fill = phase(&mut connections, &mut regions, plans)?;

    let until = Instant::now() + options.mixed;
    let mixed = |seed| Mixed::new(&layout, seed, until, options.at_least);
    let plans = seeds.clone().map(mixed).collect();
    report.mixed = phase(&mut connections, &mut regions, plans)?;

    if offered.contains(TransmissionFlags::SEND_TRIM) {
        let depth = (TRIMS_AT_A_TIME / wanted).max(1);
        connections.iter_mut().for_each(|connection| connection.depth = depth);
        let until = Instant::now() + TRIMS;
        let plans = seeds.map(|seed| Mixed::trims(&layout, seed, until)).collect();
        report.trims = phase(&mut connections, &mut regions, plans)?;
        connections.iter_mut().for_each(|connection| connection.depth = options.depth);
    }

    // Every region is read back by a connection that did not write it.
    regions.rotate_left(1);
    let plans = sweeps(&regions, false);
    report.verify = phase(&mut connections, &mut regions, plans)?;

    for connection in connections {
        connection.close()?;
    }
    Ok(report)
}

/// Runs one plan per connection, each on a thread of its own.
fn phase<P: Plan + Send>(
    connections: &mut [Connection],
    regions: &mut [Region],
    plans: Vec<P>,
) -> Result<Phase, DemoError> {
    let start = Instant::now();
    let phases: Result<Vec<Phase>, DemoError> = thread::scope(|scope| {
        let parts = connections.iter_mut().zip(regions).zip(plans);
        let threads: Vec<_> = parts
            .map(|((connection, region), plan)| scope.spawn(move || connection.run(region, plan)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("a demo thread panicked")).collect()
    });
    let mut total = Phase { elapsed: start.elapsed(), ..Phase::default() };
    phases?.iter().for_each(|phase| total.add(phase));
    Ok(total)
}
