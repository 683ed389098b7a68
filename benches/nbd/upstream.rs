//! U1 to U4: an export of another server, through ours and through its peers.
//!
//! ```text
//!  client ─► offlock --cache .. | nbdkit nbd --filter=cache | qemu-nbd ─► upstream: nbdkit, in memory, with a delay
//!  client ─────────────────────────── direct ──────────────────────────►
//! ```
//!
//! Each server in front has an upstream of its own. The client has a CPU, all servers have all of them. The CPU time of
//! both servers for each operation is printed beside the rate: what ours spends, and what it makes the upstream spend.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harness::{Args, FioMix, FioReads, Process, TargetError, Targets, allowed_cpus, median};

use crate::light;
use crate::servers::{Site, greets};

/// Bytes of the upstream export.
const SIZE: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    Ours,
    /// nbdkit's nbd plugin behind its cache filter.
    NbdkitCache,
    /// qemu-nbd with its nbd driver, which keeps nothing.
    Qemu,
    Direct,
}

const FRONTS: [(Front, &str); 4] = [
    (Front::Ours, "offlock"),
    (Front::NbdkitCache, "nbdkit nbd + cache"),
    (Front::Qemu, "qemu-nbd"),
    (Front::Direct, "direct"),
];

struct Row {
    id: &'static str,
    /// Of the upstream, with each read and write.
    delay: &'static str,
    /// Our server's.
    cache: &'static str,
    /// What ours is compared with.
    peer: Front,
    /// Every block is read once before.
    warm: bool,
    /// fio's; none: random reads of 4 KiB by the light client, 32 at a time.
    fio: &'static [&'static str],
}

const ROWS: [Row; 4] = [
    Row {
        id: "U1.cached_randread.nbdkit_cache.tput",
        delay: "0",
        cache: "300M",
        peer: Front::NbdkitCache,
        warm: true,
        fio: &[],
    },
    Row {
        id: "U2.cold_seqread_1ms.direct.tput",
        delay: "1ms",
        cache: "300M",
        peer: Front::Direct,
        warm: false,
        fio: &["--rw=read", "--bs=128k", "--iodepth=8"],
    },
    Row {
        id: "U3.randwrite_flush1000_1ms.direct.tput",
        delay: "1ms",
        cache: "300M",
        peer: Front::Direct,
        warm: false,
        fio: &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--fsync=1000"],
    },
    Row {
        id: "U4.passthrough.direct.tput",
        delay: "0",
        cache: "0",
        peer: Front::Direct,
        warm: false,
        fio: &[],
    },
];

/// A server, and the upstream behind it.
struct Chain {
    socket: PathBuf,
    // In this order they end.
    front: Option<Process>,
    back: Process,
}

/// Of a window.
#[derive(Clone, Copy)]
struct Measured {
    /// Operations per second.
    rate: f64,
    /// CPU time of the server in front and of the upstream, in microseconds for each operation.
    cpu: (f64, f64),
}

impl Chain {
    /// CPU time so far, in microseconds.
    fn cpu_time(&self) -> io::Result<(f64, f64)> {
        let of = |process: &Process| Ok::<_, io::Error>(process.cpu_time()?.as_secs_f64() * 1e6);
        Ok((self.front.as_ref().map_or(Ok(0.0), of)?, of(&self.back)?))
    }
}

/// Measures the rows that were asked for.
pub(crate) fn measure(
    args: &Args,
    site: &Site<'_>,
    client: usize,
    scratch: &Path,
    targets: &mut Targets,
) -> Result<(), TargetError> {
    let (rounds, window) = match args {
        Args { smoke: true, .. } => (1, 50),
        Args { quick: true, .. } => (3, 1_000),
        _ => (5, 3_000),
    };
    let window = Duration::from_millis(window);
    for row in ROWS.iter().filter(|row| args.wants(row.id)) {
        let measured = row.measure(site, client, scratch, (rounds, window));
        let ratio = measured.inspect_err(|error| println!("# not measured: {}: {error}", row.id));
        targets.record(row.id, ratio.ok().flatten())?;
    }
    Ok(())
}

impl Row {
    fn measure(
        &self,
        site: &Site<'_>,
        client: usize,
        scratch: &Path,
        (rounds, window): (usize, Duration),
    ) -> io::Result<Option<f64>> {
        let mut chains = Vec::new();
        for (front, name) in FRONTS {
            match self.start(site, front) {
                Ok(chain) => chains.push((front, name, chain)),
                Err(error) => println!("# missing: {name}: {error}"),
            }
        }
        if self.warm {
            let zeros = File::create(scratch.join("zeros"))?;
            zeros.set_len(SIZE)?;
            let zeros = File::open(scratch.join("zeros"))?;
            for (_, _, chain) in &chains {
                light::warm(&chain.socket, &zeros, client)?;
            }
        }
        let mut all = vec![Vec::new(); chains.len()];
        let mut ratios = Vec::new();
        for round in 0..rounds {
            for step in 0..chains.len() {
                let at = (round + step) % chains.len();
                let (_, name, chain) = &chains[at];
                match self.window(chain, client, window, scratch) {
                    Ok(measured) => all[at].push(measured),
                    Err(error) => println!("# failed: {} on {name}: {error}", self.id),
                }
            }
            let of = |wanted| {
                let at = chains.iter().position(|(front, ..)| *front == wanted)?;
                all[at].get(round).map(|measured: &Measured| measured.rate)
            };
            ratios.extend(of(Front::Ours).zip(of(self.peer)).map(|(ours, peer)| ours / peer));
        }
        println!("{}, operations per second; CPU us each: in front, upstream", self.id);
        for ((_, name, _), all) in chains.iter().zip(&all) {
            let of = |part: fn(&Measured) -> f64| {
                median(&all.iter().map(part).collect::<Vec<_>>()).unwrap_or(f64::NAN)
            };
            let (front, back) = (of(|measured| measured.cpu.0), of(|measured| measured.cpu.1));
            println!("  {name:<20}{:>12.0}{front:>10.2}{back:>10.2}", of(|measured| measured.rate));
        }
        Ok(median(&ratios))
    }

    fn window(
        &self,
        chain: &Chain,
        client: usize,
        window: Duration,
        scratch: &Path,
    ) -> io::Result<Measured> {
        let before = chain.cpu_time()?;
        let rate = self.rate(&chain.socket, client, window, scratch)?;
        let (after, count) = (chain.cpu_time()?, rate * window.as_secs_f64());
        let cpu = ((after.0 - before.0) / count, (after.1 - before.1) / count);
        Ok(Measured { rate, cpu })
    }

    fn rate(
        &self,
        socket: &Path,
        client: usize,
        window: Duration,
        scratch: &Path,
    ) -> io::Result<f64> {
        if self.fio.is_empty() {
            return light::measure(socket, (1, 32), client, window).map(|reads| reads.iops);
        }
        let engine = [
            "--ioengine=nbd".to_string(),
            format!("--uri=nbd+unix:///?socket={}", socket.display()),
        ];
        let args = self.fio.iter().map(ToString::to_string).chain(engine);
        if self.fio[0] == "--rw=read" {
            return FioReads::measure(client, window, scratch, args).map(|reads| reads.iops);
        }
        let iops = FioMix::measure(client, window, scratch, args).map(|mix| mix.iops());
        light::flush(socket)?; // nothing of this window is left to the next
        iops
    }

    fn start(&self, site: &Site<'_>, front: Front) -> io::Result<Chain> {
        let path = |end: &str| {
            let row = &self.id[..2];
            site.sockets.join(format!("{row}-{}.{end}", front as usize))
        };
        let (up, own) = (path("up"), path("front"));
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&up);
        command.args((self.delay != "0").then_some("--filter=delay"));
        match self.warm {
            true => command.arg("memory").arg(SIZE.to_string()),
            // All data: readers ask for holes, and read none of them.
            false => command.arg("data").arg(format!("(0xaa)*{SIZE}")),
        };
        if self.delay != "0" {
            command.args([format!("rdelay={}", self.delay), format!("wdelay={}", self.delay)]);
        }
        let back = spawn(command, &up)?;
        let uri = format!("nbd+unix:///?socket={}", up.display());
        let mut command = match front {
            Front::Direct => return Ok(Chain { socket: up, front: None, back }),
            Front::Ours => {
                let missing = || io::Error::other("it was not built");
                let mut command = Command::new(site.program.as_ref().ok_or_else(missing)?);
                command.arg("--image").arg(format!("vol={uri}")).args(["--cache", self.cache]);
                command.arg("--socket");
                command
            }
            Front::NbdkitCache => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--filter=cache", "nbd"]).arg(format!("uri={uri}"));
                command.args(["cache=writeback", "cache-on-read=true", "--unix"]);
                command
            }
            Front::Qemu => {
                let mut command = Command::new("qemu-nbd");
                command.args(["--persistent", "--shared=0", "--format=raw", "--cache=none"]);
                command.arg(&uri).arg("--socket");
                command
            }
        };
        command.arg(&own);
        Ok(Chain { front: Some(spawn(command, &own)?), socket: own, back })
    }
}

/// Starts a server on all CPUs, and waits until it greets.
fn spawn(mut command: Command, socket: &Path) -> io::Result<Process> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = Process::spawn_on(&mut command, &allowed_cpus()?)?;
    let since = Instant::now();
    while !greets(socket) {
        if let Some(status) = process.try_wait()? {
            return Err(io::Error::other(format!("{command:?} ended: {status}")));
        }
        if since.elapsed() > PATIENCE {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it greets no client"));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(process)
}
