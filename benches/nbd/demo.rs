//! The demo's client before each server, on an image of its own of 256 MiB: what it measures of its mix, and of TRIMs
//! alone. The figure is the median over the rounds of the ratio to the better peer of that round.

#[path = "../../crates/nbd-server/src/demo/mod.rs"]
mod client;

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use harness::{Args, Targets, with_cpus};

use self::client::DemoOptions;
pub(crate) use self::client::connection::Connection;
use crate::servers::{NAMES, Site};
use crate::sides::Sides;

/// Bytes of an image: as many as the demo's has.
const SIZE: u64 = 256 << 20;

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

/// Measures on each server, prints the table, and records the targets.
pub(crate) fn measure(
    args: &Args,
    site: &Site<'_>,
    cpu: usize,
    targets: &mut Targets,
) -> Result<(), Box<dyn Error>> {
    let (rounds, mixed) = if args.quick { (3, 3) } else { (5, 8) };
    for name in NAMES {
        File::create(site.image_of(name))?.set_len(SIZE)?;
    }
    let mut servers = site.start_all();
    let mut sides = Sides::new("D", &NAMES);
    for _ in 0..rounds {
        sides
            .round(&mut servers, |server| figures(&server.socket, cpu, Duration::from_secs(mixed)));
    }
    let columns = ["mix/s", "flush p50 ms", "p99", "FUA p50", "TRIM p50", "TRIMs/s alone"];
    let all = |figures: &Figures| figures.map(Some);
    print!("{}", sides.table("the demo [D]".into(), columns, 1, all));
    for (at, (id, more)) in TARGETS.iter().enumerate().filter(|(_, (id, _))| args.wants(id)) {
        targets.record(id, sides.ratio(&NAMES[1..], *more, |figures| Some(figures[at])))?;
    }
    Ok(())
}

fn figures(socket: &Path, cpu: usize, mixed: Duration) -> io::Result<Figures> {
    let options = DemoOptions { mixed, at_least: 0, ..DemoOptions::default() };
    let report = with_cpus(&[cpu], || client::run(socket, &options)).map_err(io::Error::other)?;
    let find = |phase: &client::Phase, name: &str| {
        phase.kinds().into_iter().find(|kind| kind.name.starts_with(name))
    };
    let of = |name: &str| {
        let kind = find(&report.mixed, name);
        kind.ok_or_else(|| io::Error::other(format!("no {name}: the phase was too short")))
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (flush, fua, trim) = (of("flush")?, of("write 4 KiB, FUA")?, of("trim")?);
    let alone = find(&report.trims, "trim").map_or(0.0, |trims| trims.count as f64); // in a second
    Ok([report.mixed.rate(), ms(flush.p50), ms(flush.p99), ms(fua.p50), ms(trim.p50), alone])
}
