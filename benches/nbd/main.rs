//! The block server beside `qemu-nbd` and `nbdkit`, on one image. The client is fio's nbd engine. In the
//! rows N7 and N8, which fio would limit, it is one of this bench that costs less CPU time ([`light`]).
//!
//! ```text
//! cargo bench --bench nbd                       every row, 9 rounds of 1 s windows: under 8 minutes
//! cargo bench --bench nbd -- --quick            the rows that decide a target: under 60 s
//! cargo bench --bench nbd -- --only N1          rows by part of a name or target
//! cargo bench --bench nbd -- --only W           the rows that write ([`writes`]); 3 rounds with `--quick`
//! cargo bench --bench nbd -- --only D           the demo's client before each server ([`demo`]); so, too
//! ```
//!
//! All servers are started once, kept on one CPU, and serve the same image read-only. Those on the page
//! cache are read whole once, beforehand: the image is in the kernel's memory, and in ours. In rows of
//! `1cpus` the client runs on that CPU too, in rows of `2cpus` on another. A round measures every server
//! once per row, next to each other and in an order that rotates; the figure is the median over the
//! rounds of the ratio inside a round. No round starts that would end past the time above.
//!
//! `server` and `client` are the parts of the time that these used a CPU: a client at 100 % is what bounds
//! its row. (Ours looks again for a moment before it sleeps, and waits for a busy client to read: its part
//! includes that.) `others` is the part of the used CPUs' time that went to processes outside the measurement. A
//! window with more than [`DISTURBED`] of it is measured again, and the less disturbed one counts.

mod demo;
mod hung;
mod light;
mod rows;
mod servers;
mod sides;
mod writes;

use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{Args, FioMix, Foreign, Random, Targets, allowed_cpus, target_dir};

use crate::rows::{Load, Window, loads, summary};
use crate::servers::{Server, Site, build_ours};
use crate::sides::Sides;

/// The image: large enough that the CPU's caches do not hold it, small enough for the page cache.
const IMAGE: usize = 1 << 30;
/// Below it, repeated windows of one server stay within a few percent of each other.
const DISTURBED: f64 = 0.15;

/// The length of the measurement.
struct Pace {
    rounds: usize,
    window: Duration,
    retries: usize,
    /// No round starts that would end later than this; the rest is for printing and for a slower round.
    budget: Duration,
}

impl Pace {
    fn new(args: &Args) -> Self {
        let (rounds, window, retries, budget) = match args {
            Args { smoke: true, .. } => (1, 50, 0, 0),
            Args { quick: true, .. } => (3, 500, 1, 55),
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
    measure_reads(args, &site, (client, server), scratch.path(), targets)?;
    site.writable = true;
    // A quick run has the rows that write if they are asked for: they take longer than it may.
    if !args.quick || args.only.is_some() || args.smoke {
        writes::measure(args, &site, (client, server), scratch.path(), targets)?;
    }
    let wants_demo = demo::TARGETS.iter().any(|(id, _)| args.wants(id));
    if wants_demo && !args.smoke && (!args.quick || args.only.is_some()) {
        site.image = &demo_image;
        demo::measure(args, &site, client, targets)?;
    }
    Ok(())
}

fn measure_reads(
    args: &Args,
    site: &Site<'_>,
    (client, server): (usize, usize),
    scratch: &Path,
    targets: &mut Targets,
) -> Result<(), Box<dyn Error>> {
    let mut loads = loads(args);
    if loads.is_empty() {
        return Ok(());
    }
    let start = Instant::now();
    let mut servers = site.start_all();
    site.warm(&mut servers, client);
    if client == server {
        println!("# missing: a second CPU");
        loads.retain(|load| load.cpus == 1);
    }
    let row = |load: Load| (load, Sides::new(load.name(), load.servers()));
    let mut rows: Vec<(Load, Sides<Window>)> = loads.into_iter().map(row).collect();
    let Pace { rounds, window, retries, budget } = Pace::new(args);
    let mut bench = Bench { client, server, scratch, window, retries, repeated: 0 };
    for round in 0..rounds {
        let begun = Instant::now();
        for (load, sides) in &mut rows {
            sides.round(&mut servers, |server| bench.window(load, server));
        }
        let next_ends = start.elapsed() + begun.elapsed();
        if round + 1 < rounds && next_ends > budget {
            println!("# {} of {rounds} rounds fit into {budget:?}", round + 1);
            break;
        }
    }
    for (load, sides) in &rows {
        print!("{}", load.table(sides));
        for (id, measured) in load.targets(sides) {
            targets.record(&id, measured)?;
        }
    }
    print!("{}", summary(&rows));
    let (limit, repeated) = (DISTURBED * 100.0, bench.repeated);
    println!(
        "# {repeated} windows repeated because others used more than {limit:.0} % of the CPUs"
    );
    Ok(())
}

struct Bench<'a> {
    client: usize,
    server: usize,
    scratch: &'a Path,
    window: Duration,
    retries: usize,
    repeated: usize,
}

impl Bench<'_> {
    /// One window, repeated while it is disturbed; the least disturbed one.
    fn window(&mut self, load: &Load, server: &Server) -> io::Result<Window> {
        let mut best = self.once(load, server)?;
        for _ in 0..self.retries {
            if best.foreign <= DISTURBED {
                break;
            }
            self.repeated += 1;
            let window = self.once(load, server)?;
            best = if window.foreign < best.foreign { window } else { best };
        }
        Ok(best)
    }

    fn once(&self, load: &Load, server: &Server) -> io::Result<Window> {
        let client = if load.cpus == 1 { self.server } else { self.client };
        let used = if load.cpus == 1 { vec![client] } else { vec![client, self.server] };
        let busy = server.process.cpu_time()?;
        let foreign = Foreign::start(&used, &[server.process.id()])?;
        let reads = if load.light {
            let queues = (load.connections, load.depth);
            light::measure(&server.socket, queues, client, self.window)?
        } else {
            let engine = ["--ioengine=nbd".to_string(), format!("--uri={}", server.uri())];
            let args = load.fio_args().into_iter().chain(engine);
            let measured = FioMix::measure(client, self.window, self.scratch, args)?;
            let mut reads = measured.reads.ok_or(io::ErrorKind::InvalidData)?;
            reads.busy *= load.connections as f64; // it is the mean over its jobs
            reads
        };
        let foreign = foreign.share()?;
        let busy = (server.process.cpu_time()? - busy).as_secs_f64() / self.window.as_secs_f64();
        Ok(Window { reads, foreign, busy })
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
