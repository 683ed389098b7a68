//! The demo's client before each server, on an image of its own of 256 MiB: what it measures of its mix, and of TRIMs
//! alone. The figure is the median over the rounds of the ratio to the better peer of that round.

#[path = "../../crates/nbd-server/src/demo/mod.rs"]
mod client;

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use harness::{Ratio, Table, median, number, with_affinity};

use self::client::DemoOptions;
use crate::servers::Server;
use crate::writes::NAMES;

/// Bytes of an image: as many as the demo's has.
pub(crate) const SIZE: u64 = 256 << 20;

/// The targets, and whether a larger figure is the better one.
pub(crate) const TARGETS: [(&str, bool); 6] = [
    ("D1.mix.tput", true),
    ("D2.flush.p50", false),
    ("D2.flush.p99", false),
    ("D3.fua.p50", false),
    ("D4.trim.p50", false),
    ("D4.trim16.tput", true),
];

/// For each target requests per second, or milliseconds.
type Figures = [f64; TARGETS.len()];

/// The figures by round and server.
#[derive(Default)]
pub(crate) struct DemoRow(Vec<[Option<Figures>; 3]>);

impl DemoRow {
    /// One round: the demo before each server.
    pub(crate) fn round(&mut self, servers: &mut [Server], cpu: usize, mixed: Duration) {
        let mut round = [None; 3];
        for step in 0..NAMES.len() {
            let index = (self.0.len() + step) % NAMES.len();
            if let Some(server) = servers.iter_mut().find(|server| server.name == NAMES[index]) {
                let figures = server.check().and_then(|()| figures(&server.socket, cpu, mixed));
                let said = |error: &io::Error| println!("# failed: D on {}: {error}", NAMES[index]);
                round[index] = figures.inspect_err(said).ok();
            }
        }
        self.0.push(round);
    }

    /// Each target with its ratio.
    pub(crate) fn targets(&self) -> impl Iterator<Item = (&'static str, Option<Ratio>)> {
        TARGETS.iter().enumerate().map(|(at, &(id, more))| {
            let ratio = |[ours, qemu, nbdkit]: &[Option<Figures>; 3]| {
                let (ours, qemu, nbdkit) = ((*ours)?[at], (*qemu)?[at], (*nbdkit)?[at]);
                Some(ours / if more { qemu.max(nbdkit) } else { qemu.min(nbdkit) })
            };
            (id, Ratio::of(&self.0.iter().filter_map(ratio).collect::<Vec<_>>()))
        })
    }

    /// The medians of each server.
    pub(crate) fn table(&self) -> Table {
        let columns = ["mix/s", "flush p50 ms", "p99", "FUA p50", "TRIM p50", "TRIMs/s alone"];
        let mut table = Table::new("the demo [D]", columns);
        for (index, name) in NAMES.iter().enumerate() {
            let of = |at: usize| -> Vec<f64> {
                self.0.iter().filter_map(|round| Some(round[index]?[at])).collect()
            };
            table.row(*name, (0..TARGETS.len()).map(|at| number(median(&of(at)), 1)));
        }
        table
    }
}

/// Makes the images, one for each server.
pub(crate) fn make_images(of: impl Fn(&str) -> std::path::PathBuf) -> io::Result<()> {
    NAMES.iter().try_for_each(|name| File::create(of(name))?.set_len(SIZE))
}

fn figures(socket: &Path, cpu: usize, mixed: Duration) -> io::Result<Figures> {
    let options = DemoOptions { mixed, at_least: 0, progress: false, ..DemoOptions::default() };
    let report = with_affinity(cpu, || client::run(socket, &options))?.map_err(io::Error::other)?;
    let of = |name: &str| {
        let kind = report.kinds.iter().find(|kind| kind.name.starts_with(name));
        kind.ok_or_else(|| io::Error::other(format!("no {name}: the phase was too short")))
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (flush, fua, trim) = (of("flush")?, of("write 4 KiB, FUA")?, of("trim")?);
    let alone = report.trims.first().map_or(0.0, |trims| trims.count as f64); // in a second
    Ok([report.mixed.rate(), ms(flush.p50), ms(flush.p99), ms(fua.p50), ms(trim.p50), alone])
}
