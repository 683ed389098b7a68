//! The rows O of `benches/targets.toml`: volumes beside s3backer and nbdkit's S3 plugin, on one S3 server with 10 ms
//! added to each request.
//!
//! ```text
//! apt-get install -y fio s3backer nbdkit-plugin-python
//! go run github.com/johannesboyne/gofakes3/cmd/gofakes3@v1.2.0 -backend memory -initialbucket bucket -host 127.0.0.1:9000
//! OFFLOCK_S3=http://127.0.0.1:9000 cargo test --release -p offlock-nbd --features objects \
//!     --test clients -- --ignored --nocapture measure_volume
//! ```
//!
//! Without `OFFLOCK_S3` it starts moto, which is slower. A peer that is not installed is left out.

use harness::{Ratio, Targets};

use crate::images::fio;
use crate::lab::*;
use crate::s3::{Answer, Proxy, environment, moto};

pub(crate) fn trials() -> Vec<Trial> {
    if !cfg!(feature = "objects") {
        return Vec::new();
    }
    let hour = Duration::from_secs(3600);
    ignored(trial_for(hour, "measure_volume", &[Need::Fio], measure))
}

const BLOCK: u64 = 4096;
const GIB: u64 = 1024 * MIB;
const DELAY: Duration = Duration::from_millis(10);
/// Bytes of the database's log and tables that the store has not confirmed.
const UNCONFIRMED: u64 = 128 * MIB;
const CACHE: u64 = 256 * MIB;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The disk of a server, by NBD or as a file.
enum Disk {
    Nbd(Client),
    File(File),
}

impl Disk {
    fn write(&mut self, at: u64, bytes: &[u8]) -> Res {
        match self {
            Self::Nbd(client) => client.write(at, bytes, 0)?.ok("WRITE"),
            Self::File(file) => Ok(file.write_all_at(bytes, at)?),
        }
    }

    fn flush(&mut self) -> Res {
        match self {
            Self::Nbd(client) => client.flush()?.ok("FLUSH"),
            Self::File(file) => Ok(file.sync_all()?),
        }
    }

    /// Writes `count` random blocks and flushes. Returns the seconds.
    fn random_writes(&mut self, count: u64, random: &mut Random) -> Res<f64> {
        let since = Instant::now();
        for _ in 0..count {
            self.write(random.below(GIB / BLOCK) * BLOCK, &random.bytes(BLOCK as usize))?;
        }
        self.flush()?;
        Ok(since.elapsed().as_secs_f64())
    }

    /// Writes a GiB in order and flushes. Returns the seconds.
    fn fill(&mut self, random: &mut Random) -> Res<f64> {
        let data = random.bytes(MIB as usize);
        let since = Instant::now();
        for at in 0..1024 {
            self.write(at * MIB, &data)?;
        }
        self.flush()?;
        Ok(since.elapsed().as_secs_f64())
    }
}

/// A peer that runs, until this is dropped.
struct Peer {
    disk: Disk,
    /// KiB of its blocks or objects.
    kib: u64,
    _process: Tracked,
    mounted: Option<PathBuf>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(path) = &self.mounted {
            self.disk = Disk::File(File::open("/dev/null").expect("a file of every system"));
            let _ = Command::new("umount").arg("-l").arg(path).status();
        }
    }
}

fn is_installed(command: &str) -> bool {
    let mut words = command.split(' ');
    let program = words.next().unwrap_or_default();
    Command::new(program).args(words).output().is_ok_and(|done| done.status.success())
}

/// Returns the seconds until the last request of a peer whose fsync does not wait for the store: until no request has
/// come for a second, which is four times as long as s3backer delays a write.
fn quiet(proxy: &Proxy, since: Instant) -> f64 {
    let (mut count, mut last) = (proxy.seen("").0, Instant::now());
    while last.elapsed() < Duration::from_secs(1) {
        thread::sleep(Duration::from_millis(5));
        let now = proxy.seen("").0;
        if now != count {
            (count, last) = (now, Instant::now());
        }
    }
    last.duration_since(since).as_secs_f64()
}

/// s3backer, with blocks of this many KiB and its other settings as they are; `None` if it is not installed.
fn s3backer(lab: &Lab, proxy: &Proxy, kib: u64) -> Res<Option<Peer>> {
    if !is_installed("s3backer --version") {
        return Ok(None);
    }
    // A folder and a prefix of its own: a disk that was mounted is refused.
    let name = format!("s3backer{}", proxy.seen("").0);
    let mounted = lab.path(&name);
    fs::create_dir(&mounted)?;
    let mut command = Command::new("s3backer");
    command.args(["-f", "--quiet", "--accessId=id", "--accessKey=key", "--size=100G"]);
    command.args([format!("--baseURL={}/", proxy.endpoint), format!("--blockSize={kib}K")]);
    command.args([format!("--prefix={name}-"), "bucket".to_owned()]);
    let log = File::create(lab.path("s3backer.log"))?;
    command.arg(&mounted).stdout(Stdio::null()).stderr(log);
    let process = lab.spawn(&mut command)?;
    let open = || File::options().read(true).write(true).open(mounted.join("file")).ok();
    let Some(file) = wait_until(open) else { fail!("s3backer does not run") };
    Ok(Some(Peer { disk: Disk::File(file), kib, _process: process, mounted: Some(mounted) }))
}

/// nbdkit's S3 plugin, with objects of this many KiB, but at most 64: the package of Debian does not run with larger
/// ones. `None` if it is not installed.
fn nbdkit(lab: &Lab, endpoint: &str, kib: u64) -> Res<Option<Peer>> {
    if !is_installed("nbdkit S3 --dump-plugin") {
        return Ok(None);
    }
    let kib = kib.min(64);
    let socket = lab.path(&format!("nbdkit{kib}"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-e", "vol", "-U"]).arg(&socket).arg("S3");
    command.args(["access-key=id", "secret-key=key", "bucket=bucket", "size=100G"]);
    command.arg(format!("endpoint-url={endpoint}")).arg(format!("key=nbdkit{kib}"));
    command.arg(format!("object-size={kib}K")).env("AWS_DEFAULT_REGION", "us-east-1");
    // The server that is asked may not know the checksums of newer clients.
    command.env("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required");
    command.env("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required");
    let log = File::create(lab.path("nbdkit.log"))?;
    let process = lab.spawn(command.stdout(Stdio::null()).stderr(log))?;
    let connect = || Client::connect(&socket).ok()?.opened("vol").ok();
    let Some(client) = wait_until(connect) else { fail!("nbdkit does not run") };
    Ok(Some(Peer { disk: Disk::Nbd(client), kib, _process: process, mounted: None }))
}

/// Prints the rows also if a later one fails.
fn measure(lab: &Lab) -> Res {
    let mut targets = Targets::of("nbd_objects")?;
    let done = measure_rows(lab, &mut targets);
    print!("{targets}");
    done
}

fn measure_rows(lab: &Lab, targets: &mut Targets) -> Res {
    let mut started = None;
    let store = match std::env::var("OFFLOCK_S3") {
        Ok(store) => store,
        Err(_) => started.insert(moto(lab)?).1.clone(),
    };
    let proxy = Proxy::new(&store, DELAY, |_| Answer::Pass)?;
    let of_peers = Proxy::new(&store, DELAY, |_| Answer::Pass)?;
    let start = |size: &str| -> Res<Server> {
        let launch = Launch::bare(lab).on_socket("s").through(environment(&proxy.endpoint));
        let launch = launch.through(["OFFLOCK_LOG=warn"]).with("--cache 256M");
        let name = std::process::id();
        launch.arg("--image").arg(format!("vol=s3://bucket/measured-{name}?size={size}")).start()
    };
    let mut random = Random::new(1);
    println!(
        "{DELAY:?} added to each request; ours with the default settings and a cache of 256 MiB"
    );

    // O2 and O3.
    let mut server = start("4T")?;
    let mut ours = Disk::Nbd(server.client()?);
    ours.random_writes(1, &mut random)?;
    for (writes, rounds) in [(1, 5), (100, 7)] {
        let (mut times, mut puts) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let before = proxy.seen("PUT").0;
            times.push(ours.random_writes(writes, &mut random)?);
            puts.push((proxy.seen("PUT").0 - before) as f64);
        }
        println!(
            "{writes} random writes of 4 KiB and a FLUSH: {:.1} ms, {} PUT",
            median(times.clone()) * 1e3,
            median(puts.clone())
        );
        if writes == 1 {
            targets.record("O2.flush_one_block.requests.n", Ratio::of(&puts))?;
            continue;
        }
        let mut best = f64::NAN; // until a peer is measured
        for kib in [4, 128] {
            for name in ["s3backer", "nbdkit S3"] {
                let peer = match name {
                    "s3backer" => s3backer(lab, &of_peers, kib)?,
                    _ => nbdkit(lab, &of_peers.endpoint, kib)?,
                };
                let Some(mut peer) = peer else { continue };
                let (mut its, before) = (Vec::new(), of_peers.seen("").0);
                for _ in 0..5 {
                    let since = Instant::now();
                    let time = peer.disk.random_writes(writes, &mut random)?;
                    let is_async = matches!(peer.disk, Disk::File(_));
                    its.push(if is_async { quiet(&of_peers, since) } else { time });
                }
                let time = median(its);
                let requests = (of_peers.seen("").0 - before) / 5;
                println!(
                    "  {name}, blocks of {} KiB: {:.1} ms, {requests} requests",
                    peer.kib,
                    time * 1e3
                );
                if name == "s3backer" {
                    best = best.min(time);
                }
            }
        }
        let ratios: Vec<f64> = times.iter().map(|time| best / time).collect();
        targets.record("O2.randwrite100_flush.s3backer.tput", Ratio::of(&ratios))?;
    }
    let before = proxy.seen("PUT").1;
    let time = ours.fill(&mut random)?;
    let ratio = |proxy: &Proxy| (proxy.seen("PUT").1 - before) as f64 / GIB as f64;
    println!("a GiB in order and a FLUSH: {time:.1} s, {:.2} bytes PUT per byte", ratio(&proxy));
    let mut best = f64::NAN;
    for kib in [128, 1024] {
        if let Some(mut peer) = s3backer(lab, &of_peers, kib)? {
            let since = Instant::now();
            peer.disk.fill(&mut random)?;
            let time = quiet(&of_peers, since);
            println!("  s3backer, blocks of {kib} KiB: {time:.1} s");
            best = best.min(time);
        }
    }
    targets.record("O3.seqwrite.s3backer.time", Some(time / best))?;
    thread::sleep(Duration::from_secs(170)); // two looks for tables to be merged
    targets.record("O3.bytes_put_per_byte.n", Some(ratio(&proxy)))?;
    let peak = server.memory("VmHWM")?;

    // O4.
    drop(ours);
    server.stop()?;
    server = start("4T")?;
    let mut client = server.client()?;
    let mut gets = Vec::new();
    // The first reads get the indexes of the tables, too.
    for number in 0..40 {
        let before = proxy.seen("GET").0;
        check!(client.read(random.below(1024) * MIB, BLOCK as u32)?.is_ok(), "a cold read");
        gets.push((proxy.seen("GET").0 - before) as f64);
        if number == 0 {
            println!("the first read of a server: {} GET", gets[0]);
        }
    }
    targets.record("O4.cold_read.gets.n", Ratio::of(&gets[31..]))?;
    let before = proxy.seen("").0;
    thread::sleep(Duration::from_secs(150));
    println!("idle: {:.1} requests a minute", (proxy.seen("").0 - before) as f64 / 2.5);
    for region in 0..2048 {
        client.write(region * GIB + BLOCK, &[1; BLOCK as usize], 0)?.ok("WRITE")?;
        client.write((region + 1) * GIB - BLOCK, &[1; BLOCK as usize], 0)?.ok("WRITE")?;
    }
    client.flush()?.ok("FLUSH")?;
    // As Linux sends a TRIM.
    let (since, before, part) = (Instant::now(), proxy.seen("PUT").1, 4 * GIB - BLOCK);
    for at in (0..2048 * GIB).step_by(part as usize) {
        client.plain(cmd::TRIM, 0, at, part.min(2048 * GIB - at))?.ok("TRIM")?;
    }
    client.flush()?.ok("FLUSH")?;
    targets.record("O4.trim2T.s", Some(since.elapsed().as_secs_f64()))?;
    println!("  its records have {} KiB", (proxy.seen("PUT").1 - before) >> 10);

    // O5. A TRIM of a block where there is data is a record of some bytes: the log has as many as fit.
    targets.record(
        "O5.memory_beyond_cache.MiB",
        Some(peak.saturating_sub(CACHE + UNCONFIRMED) as f64 / MIB as f64),
    )?;
    for at in (0..16 * GIB).step_by(16 * MIB as usize) {
        client.write(at, &[1; BLOCK as usize], 0)?.ok("WRITE")?;
    }
    for at in (0..16 * GIB).step_by(4 * BLOCK as usize).take(1_000_000) {
        client.plain(cmd::TRIM, 0, at, BLOCK)?.ok("TRIM")?;
    }
    client.flush()?.ok("FLUSH")?;
    server.kill();
    server.ended()?;
    let since = Instant::now();
    server = start("4T")?;
    targets.record("O5.recovery_1M_blocks.s", Some(since.elapsed().as_secs_f64()))?;

    // O1.
    let image = lab.path("local.img");
    image::sparse(&image, 64 * MIB)?;
    let local = Launch::bare(lab).on_socket("l").image(&image);
    let local = local.with("--cache 256M").start()?;
    let args = ["--rw=randread", "--bs=4k", "--iodepth=32", "--size=64M", "--time_based"];
    let last = ["--runtime=5", "--output-format=terse", "--terse-version=3"];
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..6 {
        let server = if round % 2 == 0 { &local } else { &server };
        let mut warm = server.client()?;
        for at in 0..64 {
            check!(warm.read(at * MIB, MIB as u32)?.is_ok(), "a read");
        }
        let text = lab.run_ok(&mut fio(server, &[&args[..], &last[..]].concat()))?;
        rates[round % 2].push(text.split(';').nth(7).and_then(|n| n.parse().ok()).unwrap_or(0.0));
    }
    let [local_rate, rate] = rates.map(median);
    println!(
        "cached random reads of 4 KiB, depth 32: {rate:.0} a second, {local_rate:.0} of an image"
    );
    targets.record("O1.cached_randread.local.tput", Some(rate / local_rate))?;
    local.stop()?;
    server.stop()
}
