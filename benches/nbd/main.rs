//! The block server beside `qemu-nbd` and `nbdkit`, on one image. The client is fio's nbd engine. In the
//! rows N7 and N8, which fio would limit, it is one of this bench that costs less CPU time ([`light`]).
//!
//! ```text
//! cargo bench --bench nbd                       every row, 9 rounds of 1 s windows: under 8 minutes
//! cargo bench --bench nbd -- --quick            the rows that decide a target: under 60 s
//! cargo bench --bench nbd -- --only N1          rows by part of a name or target
//! cargo bench --bench nbd -- --only W           the rows that write ([`writes`]); 3 rounds with `--quick`
//! cargo bench --bench nbd -- --only D           the demo's client before each server ([`demo`]); so, too
//! cargo bench --bench nbd -- --backend aio      our server on that engine: uring, aio or threads
//! cargo bench --bench nbd -- --only N --picture FILE    draws the rows that decide a target
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
mod picture;
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

use harness::{Args, FioMix, Foreign, Header, Random, Targets, allowed_cpus, target_dir};

use crate::picture::Picture;
use crate::rows::{Load, Row, Window, loads};
use crate::servers::{Server, Site, build_ours};

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
    let args = Args::from_env(include_str!("main.rs"));
    if !args.bench {
        println!("nbd: measures only under `cargo bench`");
        return Ok(());
    }
    let section = |name| Targets::parse(include_str!("../targets.toml"), name);
    let targets = section("nbd")?.and(section("nbd_cached")?).and(section("nbd_writes")?);
    let mut targets = targets.and(section("nbd_demo")?).asked_for_by(&args);
    let header = Header::take("nbd");
    print!("{header}");
    if let Err(error) = measure(&args, &header, &mut targets) {
        println!("# not measured: {error}");
    }
    print!("{targets}");
    Ok(())
}

fn measure(args: &Args, header: &Header, targets: &mut Targets) -> Result<(), Box<dyn Error>> {
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
        backend: args.backend.as_deref(),
        image: &image,
        writable: false,
        sockets: sockets.path(),
        cpu: server,
    };
    let rows = measure_reads(args, &site, (client, server), scratch.path(), targets)?;
    if let Some(file) = args.picture.as_ref().filter(|_| !rows.is_empty()) {
        // Cargo starts a bench in its own package; a relative path is one from the workspace.
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace")?;
        let file = workspace.join(file);
        std::fs::write(&file, Picture::new(&rows, header).to_string())?;
        println!("# drawn: {}", file.display());
    }
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
) -> Result<Vec<Row>, Box<dyn Error>> {
    let mut loads = loads(args);
    if loads.is_empty() {
        return Ok(Vec::new());
    }
    let start = Instant::now();
    let mut servers = site.start_all();
    site.warm(&mut servers, client)?;
    let running: Vec<&'static str> = servers.iter().map(|server| server.name).collect();

    if client == server {
        println!("# missing: a second CPU");
        loads.retain(|load| load.cpus == 1);
    }
    let mut rows: Vec<Row> = loads.into_iter().map(|load| Row::new(load, &running)).collect();
    let Pace { rounds, window, retries, budget } = Pace::new(args);
    let mut bench = Bench {
        servers: &mut servers,
        client,
        server,
        scratch,
        window,
        retries,
        repeated: 0,
        failed: 0,
    };
    for round in 0..rounds {
        let begun = Instant::now();
        for row in &mut rows {
            row.round(|load, name| bench.window(load, name));
        }
        let next_ends = start.elapsed() + begun.elapsed();
        if round + 1 < rounds && next_ends > budget {
            println!("# {} of {rounds} rounds fit into {budget:?}", round + 1);
            break;
        }
    }

    for row in &rows {
        print!("{}", row.table());
        for (id, measured) in row.targets() {
            targets.record(&id, measured)?;
        }
    }
    let done = rows.first().map_or(0, |row| row.rounds.done());
    println!(
        "# {done} rounds of {:?} windows; {} windows repeated because others used more than {:.0} % \
         of the CPUs, {} failed",
        bench.window,
        bench.repeated,
        DISTURBED * 100.0,
        bench.failed
    );
    Ok(rows)
}

struct Bench<'a> {
    servers: &'a mut [Server],
    client: usize,
    server: usize,
    scratch: &'a Path,
    window: Duration,
    retries: usize,
    repeated: usize,
    failed: usize,
}

impl Bench<'_> {
    /// One window, repeated while it is disturbed; the least disturbed one.
    fn window(&mut self, load: &Load, name: &'static str) -> Option<Window> {
        let mut best: Option<Window> = None;
        for attempt in 0..=self.retries {
            match self.once(load, name) {
                Ok(window) => {
                    if best.is_none_or(|best| window.foreign < best.foreign) {
                        best = Some(window);
                    }
                    if window.foreign <= DISTURBED {
                        break;
                    }
                    self.repeated += usize::from(attempt < self.retries);
                }
                Err(error) => {
                    println!("# failed: {} on {name}: {error}", load.name());
                    self.failed += 1;
                    break;
                }
            }
        }
        best
    }

    fn once(&mut self, load: &Load, name: &'static str) -> io::Result<Window> {
        let server = self.servers.iter_mut().find(|server| server.name == name);
        let server = server.ok_or(io::ErrorKind::NotFound)?;
        server.check()?;
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
