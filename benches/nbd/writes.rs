//! Writes: each server has an image of its own, which fio's nbd engine writes.
//!
//! A window of a server is followed by a FLUSH outside of it, so that what one server has left in memory is not
//! written back in the window of the next. The figure is the median over the rounds of the ratio to the better
//! peer of that round: for throughputs the faster one, for latencies the one with the lower p99.
//!
//! The images are copied by `copy_file_range`, so the page cache has them in small folios. Where a file was written in
//! pieces of 1 MiB, ext4 walks all buffers of a large folio at each write of 4 KiB, and a server without a cache of its
//! own made 25,000 to 30,000 such writes a second in place of 177,000.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use harness::{Args, FioMix, FioSide, Foreign, Ratio, Table, median, number};

use crate::light;
use crate::servers::{NBDKIT, OURS, QEMU, Server};

/// The servers of a row, ours first.
pub(crate) const NAMES: [&str; 3] = [OURS, QEMU, NBDKIT];

/// One load.
pub(crate) struct Job {
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

    /// The better one of two peers.
    fn better(self, a: f64, b: f64) -> f64 {
        if matches!(self, Self::Throughput) { a.max(b) } else { a.min(b) }
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

/// A load and its windows.
pub(crate) struct WriteRow {
    job: &'static Job,
    /// By round and server.
    windows: Vec<[Option<FioMix>; 3]>,
}

/// The rows that were asked for.
pub(crate) fn rows(args: &Args) -> Vec<WriteRow> {
    let wanted = |job: &&Job| args.wants(&format!("{}.{}", job.id, job.name));
    JOBS.iter().filter(wanted).map(|job| WriteRow { job, windows: Vec::new() }).collect()
}

/// Copies of an image, one for each server.
pub(crate) fn make_images(image: &Path, of: impl Fn(&str) -> std::path::PathBuf) -> io::Result<()> {
    for name in NAMES {
        let copy = of(name);
        fs::copy(image, &copy)?;
        File::open(&copy)?.sync_all()?;
    }
    Ok(())
}

impl WriteRow {
    /// One round: a window of each server.
    pub(crate) fn round(
        &mut self,
        servers: &mut [Server],
        cpus: (usize, usize),
        window: Duration,
        scratch: &Path,
    ) {
        let mut round = [None; 3];
        for step in 0..NAMES.len() {
            let index = (self.windows.len() + step) % NAMES.len();
            let Some(server) = servers.iter_mut().find(|server| server.name == NAMES[index]) else {
                continue;
            };
            match self.window(server, cpus, window, scratch) {
                Ok(window) => round[index] = Some(window),
                Err(error) => println!("# failed: {} on {}: {error}", self.job.name, server.name),
            }
        }
        self.windows.push(round);
    }

    fn window(
        &self,
        server: &mut Server,
        (client, cpu): (usize, usize),
        window: Duration,
        scratch: &Path,
    ) -> io::Result<FioMix> {
        server.check()?;
        let engine = ["--ioengine=nbd".to_string(), format!("--uri={}", server.uri())];
        let words = |args: &str| args.split_whitespace().map(String::from).collect::<Vec<_>>();
        let mut args = words(self.job.args);
        args.extend(engine.iter().cloned());
        if !self.job.beside.is_empty() {
            // fio's options are those of the job before them: all again.
            args.extend(["--name=beside", "--new_group", "--time_based"].map(String::from));
            args.extend(["--norandommap".into(), format!("--runtime={}ms", window.as_millis())]);
            args.extend(words(self.job.beside));
            args.extend(engine);
        }
        let foreign = Foreign::start(&[client, cpu], &[server.process.id()])?;
        let measured = FioMix::measure(client, window, scratch, args)?;
        let foreign = foreign.share()?;
        light::flush(&server.socket)?;
        if foreign > crate::DISTURBED {
            println!("# disturbed: {} on {}: {:.0} %", self.job.name, server.name, foreign * 100.0);
        }
        Ok(measured)
    }

    /// The targets of the row, as far as all servers were measured.
    pub(crate) fn targets(&self) -> impl Iterator<Item = (String, Option<Ratio>)> {
        self.job.targets.iter().map(|(end, figure)| {
            let ratio = |[ours, qemu, nbdkit]: &[Option<FioMix>; 3]| {
                let of = |window: &Option<FioMix>| figure.of(window.as_ref()?);
                Some(of(ours)? / figure.better(of(qemu)?, of(nbdkit)?))
            };
            let ratios: Vec<f64> = self.windows.iter().filter_map(ratio).collect();
            (format!("{}.{}.{end}", self.job.id, self.job.name), Ratio::of(&ratios))
        })
    }

    /// The medians of each server.
    pub(crate) fn table(&self) -> Table {
        let columns = ["reads/s", "p99 us", "writes/s", "p99 us"];
        let mut table = Table::new(format!("{} [{}]", self.job.name, self.job.id), columns);
        for (index, name) in NAMES.iter().enumerate() {
            let windows = self.windows.iter().filter_map(|round| round[index]);
            let of = |get: &dyn Fn(&FioMix) -> Option<f64>| {
                let values: Vec<f64> = windows.clone().filter_map(|window| get(&window)).collect();
                number(median(&values), 0)
            };
            let iops = |side: Option<FioSide>| side.map(|side| side.iops);
            let p99 = |side: Option<FioSide>| side.map(|side| side.p99.as_secs_f64() * 1e6);
            let reads = [of(&|w| iops(w.reads)), of(&|w| p99(w.reads))];
            let writes = [of(&|w| iops(w.writes.or(w.all))), of(&|w| p99(w.writes.or(w.all)))];
            table.row(*name, reads.into_iter().chain(writes));
        }
        table
    }
}
