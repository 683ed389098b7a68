//! The block server beside `qemu-nbd` and `nbdkit`, on one image. The client is fio's nbd engine. In the
//! rows N7 and N8, which fio would limit, it is one of this bench that costs less CPU time ([`light`]).
//!
//! ```text
//! cargo bench --bench nbd                       every row, 9 rounds of 1 s windows: under 8 minutes
//! cargo bench --bench nbd -- --quick            the rows that decide a target: under 60 s
//! cargo bench --bench nbd -- --only N1          rows by part of a name or target
//! cargo bench --bench nbd -- --only W           the rows that write; 3 rounds with `--quick`
//! cargo bench --bench nbd -- --only D           the demo's client before each server ([`demo`]); 3 rounds with `--quick`
//! ```
//!
//! All servers are started once, kept on one CPU, and serve the same image read-only in rows that read. Those on the page
//! cache are read whole once, beforehand: the image is in the kernel's memory, and in ours. In rows of
//! `1cpus` the client runs on that CPU too, in rows of `2cpus` on another. A round measures every server
//! once per row, next to each other and in an order that rotates; the figure is the median over the
//! rounds of the ratio inside a round. No round starts that would end past the time above.
//!
//! In rows that write each server has an image of its own, and a window is followed by a FLUSH outside of it, so that
//! what one server has left in memory is not written back in the window of the next. The images are copied by
//! `copy_file_range`, so the page cache has them in small folios. Where a file was written in pieces of 1 MiB, ext4
//! walks all buffers of a large folio at each write of 4 KiB, and a server without a cache of its own made 25,000 to
//! 30,000 such writes a second in place of 177,000.
//!
//! `server` and `client` are the parts of the time that these used a CPU: a client at 100 % is what bounds
//! its row. (Ours looks again for a moment before it sleeps, and waits for a busy client to read: its part
//! includes that.) `others` is the part of the used CPUs' time that went to processes outside the measurement. A
//! window that reads with more than [`DISTURBED`] of it is measured again, and the less disturbed one counts.

mod demo;
mod hung;
mod light;
mod rows;
mod servers;
mod sides;

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{Args, FioMix, Foreign, Random, Targets, allowed_cpus, target_dir};

use crate::rows::{Client, Measured, READS, Row, WRITES, Window, summary};
use crate::servers::{NAMES, Server, Site, build_ours};
use crate::sides::Sides;

/// The image: large enough that the CPU's caches do not hold it, small enough for the page cache.
const IMAGE: usize = 1 << 30;
/// The row with an export whose device answers no more.
const HUNG: &str = "W9.write_beside_hung_export.p99";
/// Below it, repeated windows of one server stay within a few percent of each other.
const DISTURBED: f64 = 0.15;

/// The length of a measurement.
struct Pace {
    rounds: usize,
    window: Duration,
    retries: usize,
    /// No round starts that would end later than this; the rest is for printing and for a slower round.
    budget: Duration,
}

impl Pace {
    fn new(args: &Args, writes: bool) -> Self {
        let (rounds, window, retries, budget) = match args {
            Args { smoke: true, .. } => (1, 50, 0, 0),
            Args { quick: true, .. } if writes => (3, 1_500, 0, 900),
            Args { quick: true, .. } => (3, 500, 1, 55),
            _ if writes => (5, 4_000, 0, 900),
            _ => (9, 1_000, 2, 450),
        };
        let (window, budget) = (Duration::from_millis(window), Duration::from_secs(budget));
        Self { rounds, window, retries, budget }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(args) = Args::of_bench("nbd", include_str!("main.rs")) else { return Ok(()) };
    let targets = Targets::of("nbd")?.and(Targets::of("nbd_cached")?);
    let targets = targets.and(Targets::of("nbd_writes")?).and(Targets::of("nbd_demo")?);
    let mut targets = targets.asked_for_by(&args);
    harness::header::print("nbd");
    harness::header::programs(&["qemu-nbd", "nbdkit", "fio"]);
    if let Err(error) = measure(&args, &mut targets) {
        println!("# not measured: {error}");
    }
    print!("{targets}");
    Ok(())
}

fn measure(args: &Args, targets: &mut Targets) -> Result<(), Box<dyn Error>> {
    if Command::new("fio").arg("--version").output().is_err() {
        return Err("fio is not installed: apt install fio".into());
    }
    let program = build_ours();
    let cpus = allowed_cpus();
    let (client, server) = (cpus[0], *cpus.last().ok_or("no CPU")?);

    let scratch = tempfile::Builder::new().prefix("nbd-bench-").tempdir_in(target_dir()?)?;
    let sockets = tempfile::Builder::new().prefix("nbd-bench-").tempdir()?;
    let image = scratch.path().join("image");
    let demo_image = scratch.path().join("demo");
    make_image(&image)?;

    let mut site = Site {
        program: program.map_err(|error| println!("# missing: our server: {error}")).ok(),
        image: &image,
        writable: false,
        sockets: sockets.path(),
        cpu: server,
    };
    let mut bench = Bench { client, server, scratch: scratch.path(), pace: Pace::new(args, false) };
    let reads = bench.measure(args, &site, &READS, targets)?;
    if !reads.is_empty() {
        print!("{}", summary(&reads));
    }
    site.writable = true;
    // A quick run has the rows that write if they are asked for: they take longer than it may.
    if !args.quick || args.only.is_some() || args.smoke {
        bench.pace = Pace::new(args, true);
        let rows = if args.smoke { &WRITES[..2] } else { &WRITES };
        bench.measure(args, &site, rows, targets)?;
        if args.wants(HUNG) && !args.smoke {
            let Pace { rounds, window, .. } = bench.pace;
            let ratio = hung::ratio(&site, client, rounds, window, scratch.path());
            let ratio = ratio.inspect_err(|error| println!("# not measured: {HUNG}: {error}"));
            targets.record(HUNG, ratio.ok().flatten())?;
        }
    }
    let wants_demo = demo::TARGETS.iter().any(|(id, _)| args.wants(id));
    if wants_demo && !args.smoke && (!args.quick || args.only.is_some()) {
        site.image = &demo_image;
        demo::measure(args, &site, client, targets)?;
    }
    Ok(())
}

struct Bench<'a> {
    client: usize,
    server: usize,
    scratch: &'a Path,
    pace: Pace,
}

impl Bench<'_> {
    /// Measures the rows that were asked for, prints their tables, and records their targets.
    fn measure(
        &mut self,
        args: &Args,
        site: &Site<'_>,
        rows: &'static [Row],
        targets: &mut Targets,
    ) -> Result<Measured, Box<dyn Error>> {
        let mut rows: Vec<_> =
            rows.iter().filter(|row| row.is_wanted(|id| args.wants(id))).collect();
        if self.client == self.server {
            println!("# missing: a second CPU");
            rows.retain(|row| row.cpus == 1);
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        if site.writable {
            for name in NAMES {
                let copy = site.image_of(name);
                fs::copy(site.image, &copy)?;
                File::open(&copy)?.sync_all()?;
            }
        }
        let mut servers = site.start_all();
        if !site.writable {
            site.warm(&mut servers, self.client);
        }
        let sides = |row: &'static Row| (row, Sides::new(row.name, row.servers));
        let mut rows: Measured = rows.into_iter().map(sides).collect();
        for round in 0..self.pace.rounds {
            let begun = Instant::now();
            for (row, sides) in &mut rows {
                sides.round(&mut servers, |server| {
                    let window = self.window(row, server)?;
                    if site.writable {
                        server.flush()?;
                    }
                    Ok(window)
                });
            }
            let next_ends = start.elapsed() + begun.elapsed();
            if round + 1 < self.pace.rounds && next_ends > self.pace.budget {
                println!("# {} of {} rounds fit", round + 1, self.pace.rounds);
                break;
            }
        }
        for (row, sides) in &rows {
            print!("{}", row.table(sides));
            for (id, measured) in row.targets(sides) {
                targets.record(id, measured)?;
            }
        }
        Ok(rows)
    }

    /// One window, repeated while it is disturbed; the least disturbed one.
    fn window(&self, row: &Row, server: &Server) -> io::Result<Window> {
        let mut best = self.once(row, server)?;
        for _ in 0..self.pace.retries {
            if best.foreign <= DISTURBED {
                break;
            }
            let window = self.once(row, server)?;
            best = if window.foreign < best.foreign { window } else { best };
        }
        if best.foreign > DISTURBED {
            println!("# disturbed: {} on {}: {:.0} %", row.name, server.name, best.foreign * 100.0);
        }
        Ok(best)
    }

    fn once(&self, row: &Row, server: &Server) -> io::Result<Window> {
        let client = if row.cpus == 1 { self.server } else { self.client };
        let used = if row.cpus == 1 { vec![client] } else { vec![client, self.server] };
        let window = self.pace.window;
        let busy = server.process.cpu_time()?;
        let foreign = Foreign::start(&used, &[server.process.id()])?;
        let mix = match row.client {
            Client::Light(connections, depth) => {
                let queues = (connections, depth);
                let reads = light::measure(&server.socket, queues, client, window)?;
                FioMix { reads: Some(reads), writes: None, all: None }
            }
            Client::Fio(args) => {
                let args = row.fio_args(args, &server.uri(), window);
                FioMix::measure(client, window, self.scratch, args)?
            }
        };
        let foreign = foreign.share()?;
        let busy = (server.process.cpu_time()? - busy).as_secs_f64() / window.as_secs_f64();
        Ok(Window { mix, foreign, busy })
    }
}

/// Writes an image of pseudo-random bytes, syncs it, and reads it once so that the page cache holds
/// all of it.
fn make_image(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut block = vec![0_u8; 1 << 20];
    let mut random = Random::new(1); // no two blocks alike, nothing to compress or to share
    for _ in 0..IMAGE / block.len() {
        for word in block.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes());
        }
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let mut file = File::open(path)?;
    while file.read(&mut block)? > 0 {}
    Ok(())
}
