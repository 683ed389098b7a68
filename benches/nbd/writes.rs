//! Writes: each server has an image of its own, which fio's nbd engine writes.
//!
//! A window of a server is followed by a FLUSH outside of it, so that what one server has left in memory is not
//! written back in the window of the next.
//!
//! The images are copied by `copy_file_range`, so the page cache has them in small folios. Where a file was written in
//! pieces of 1 MiB, ext4 walks all buffers of a large folio at each write of 4 KiB, and a server without a cache of its
//! own made 25,000 to 30,000 such writes a second in place of 177,000.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use harness::{Args, FioMix, FioSide, Foreign, Targets};

use crate::hung;
use crate::servers::{NAMES, Server, Site};
use crate::sides::Sides;

/// The row with an export whose device answers no more.
const HUNG: &str = "W9.write_beside_hung_export.p99";

/// One load.
struct Job {
    /// The number of its targets, and the name of the row.
    id: &'static str,
    name: &'static str,
    /// fio's arguments.
    args: &'static str,
    /// The operations of the jobs beside it.
    beside: &'static str,
    /// The targets that the row decides, by the ends of their names.
    targets: &'static [(&'static str, Figure)],
}

/// The figure of a window that is compared.
#[derive(Debug, Clone, Copy)]
enum Figure {
    /// Operations per second.
    Throughput,
    /// The p99 of reads.
    Reads,
    /// The p99 of writes.
    Writes,
    /// The p99 of both.
    All,
}

impl Figure {
    fn of(self, window: &FioMix) -> Option<f64> {
        let p99 = |side: Option<FioSide>| side.map(|side| side.p99.as_secs_f64());
        match self {
            Self::Throughput => Some(window.iops()),
            Self::Reads => p99(window.reads),
            Self::Writes => p99(window.writes),
            Self::All => p99(window.all),
        }
    }
}

const JOBS: [Job; 8] = [
    job("W1", "randwrite4k", "--rw=randwrite --bs=4k --iodepth=32", &[TPUT, WRITES]),
    job(
        "W2",
        "randwrite4k_flush32",
        "--rw=randwrite --bs=4k --iodepth=32 --fsync=32",
        &[TPUT, WRITES],
    ),
    job("W3", "seqwrite1M", "--rw=write --bs=1M --iodepth=4", &[TPUT]),
    job(
        "W4",
        "randrw70_4k",
        "--rw=randrw --rwmixread=70 --bs=4k --iodepth=32",
        &[TPUT, ("read_p99", Figure::Reads)],
    ),
    job("W5", "randwrite64k", "--rw=randwrite --bs=64k --iodepth=16", &[TPUT]),
    job(
        "W6",
        "mixed_sizes",
        "--rw=randrw --rwmixread=60 --bssplit=4k/60:64k/30:256k/10 --iodepth=16 \
         --unified_rw_reporting=1",
        &[TPUT, ("p99", Figure::All)],
    ),
    Job {
        beside: "--rw=randwrite --bs=1M --iodepth=1 --numjobs=8",
        ..job("W7", "read_beside_1M_writers", ONE_READ, &[("p99", Figure::Reads)])
    },
    Job {
        beside: "--rw=randtrim --bs=64k --iodepth=16",
        ..job("W8", "read_beside_trims", ONE_READ, &[("p99", Figure::Reads)])
    },
];

const ONE_READ: &str = "--rw=randread --bs=4k --iodepth=1";
const TPUT: (&str, Figure) = ("tput", Figure::Throughput);
const WRITES: (&str, Figure) = ("p99", Figure::Writes);

/// A job with none beside it.
const fn job(
    id: &'static str,
    name: &'static str,
    args: &'static str,
    targets: &'static [(&'static str, Figure)],
) -> Job {
    Job { id, name, args, beside: "", targets }
}

/// Measures the rows that were asked for, prints their tables, and records their targets.
pub(crate) fn measure(
    args: &Args,
    site: &Site<'_>,
    cpus: (usize, usize),
    scratch: &Path,
    targets: &mut Targets,
) -> Result<(), Box<dyn Error>> {
    let wanted = |job: &&Job| args.wants(&format!("{}.{}", job.id, job.name));
    let rows = JOBS.iter().filter(wanted).map(|job| (job, Sides::new(job.name, &NAMES)));
    let mut rows: Vec<_> = rows.take(if args.smoke { 2 } else { usize::MAX }).collect();
    let (rounds, window) = match args {
        Args { smoke: true, .. } => (1, 50),
        Args { quick: true, .. } => (3, 1_500),
        _ => (5, 4_000),
    };
    let window = Duration::from_millis(window);
    if !rows.is_empty() {
        for name in NAMES {
            let copy = site.image_of(name);
            fs::copy(site.image, &copy)?;
            File::open(&copy)?.sync_all()?;
        }
        let mut servers = site.start_all();
        for _ in 0..rounds {
            for (job, sides) in &mut rows {
                sides.round(&mut servers, |server| job.window(server, cpus, window, scratch));
            }
        }
    }
    for (job, sides) in &rows {
        let title = format!("{} [{}]", job.name, job.id);
        print!("{}", sides.table(title, ["reads/s", "p99 us", "writes/s", "p99 us"], 0, columns));
        for (end, figure) in job.targets {
            let more = matches!(figure, Figure::Throughput);
            let ratio = sides.ratio(&NAMES[1..], more, |window| figure.of(window));
            targets.record(&format!("{}.{}.{end}", job.id, job.name), ratio)?;
        }
    }
    if args.wants(HUNG) && !args.smoke {
        let ratio = hung::ratio(site, cpus.0, rounds, window, scratch);
        let ratio = ratio.inspect_err(|error| println!("# not measured: {HUNG}: {error}"));
        targets.record(HUNG, ratio.ok().flatten())?;
    }
    Ok(())
}

/// The figures of a server in the table.
fn columns(window: &FioMix) -> [Option<f64>; 4] {
    let iops = |side: Option<FioSide>| side.map(|side| side.iops);
    let p99 = |side: Option<FioSide>| side.map(|side| side.p99.as_secs_f64() * 1e6);
    let writes = window.writes.or(window.all);
    [iops(window.reads), p99(window.reads), iops(writes), p99(writes)]
}

impl Job {
    fn window(
        &self,
        server: &Server,
        (client, cpu): (usize, usize),
        window: Duration,
        scratch: &Path,
    ) -> io::Result<FioMix> {
        let engine = ["--ioengine=nbd".to_string(), format!("--uri={}", server.uri())];
        let words = |args: &str| args.split_whitespace().map(String::from).collect::<Vec<_>>();
        let mut args = words(self.args);
        args.extend(engine.iter().cloned());
        if !self.beside.is_empty() {
            // fio's options are those of the job before them: all again.
            args.extend(["--name=beside", "--new_group", "--time_based"].map(String::from));
            args.extend(["--norandommap".into(), format!("--runtime={}ms", window.as_millis())]);
            args.extend(words(self.beside));
            args.extend(engine);
        }
        let foreign = Foreign::start(&[client, cpu], &[server.process.id()])?;
        let measured = FioMix::measure(client, window, scratch, args)?;
        let foreign = foreign.share()?;
        server.flush()?;
        if foreign > crate::DISTURBED {
            println!("# disturbed: {} on {}: {:.0} %", self.name, server.name, foreign * 100.0);
        }
        Ok(measured)
    }
}
