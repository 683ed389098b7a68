//! kill -9 of the server under write load, again and again on one image: what it acknowledged is
//! there, with a cache what it acknowledged before a FLUSH; and its successor serves. And SIGTERM.
//!
//! ```text
//! cargo test --release -p offlock-nbd --test clients -- --ignored stress_
//! OFFLOCK_TEARINGS=1000 cargo test --release -p offlock-nbd --test clients -- --ignored stress_
//! ```
//!
//! The kills are ignored by default; `OFFLOCK_TEARINGS` (5) is the number of kills on each backend. The page cache
//! outlives a process, so this says nothing about a power cut: it tests that no reply is sent before
//! the kernel has the data, that a late write of the dead server cannot fall on its successor's
//! data, and that a lock and a socket left behind keep no server out.

use std::ops::Range;

use crate::lab::*;

const WRITERS: usize = 3;
/// Blocks that each writer has to itself and cycles through.
const BLOCKS: usize = 512;
const BLOCK: usize = 4096;
/// Requests in flight per writer.
const DEPTH: usize = 16;
/// Most blocks in one request. The sum of a writer's requests stays below `BLOCKS`.
const MOST: usize = 16;
/// Kills in one trial, so that each stays within a trial's deadline.
const PER_TRIAL: usize = 25;

pub(crate) fn trials() -> Vec<Trial> {
    let asked = std::env::var("OFFLOCK_TEARINGS").ok();
    let tearings: usize = asked.map_or(5, |n| n.parse().expect("OFFLOCK_TEARINGS is a number"));
    let mut trials = Vec::new();
    for first in (0..tearings).step_by(PER_TRIAL) {
        let name = format!("stress_tearings_from_{first:04}");
        let end = tearings.min(first + PER_TRIAL);
        let body =
            move |lab: &Lab, backend: Backend| stress_tearings(lab, backend, first..end, "0");
        trials.extend(per_backend(ALL, &name, &[], body));
        // Large enough for all that is written, and for a part of it.
        let cache = if (first / PER_TRIAL).is_multiple_of(2) { "64M" } else { "1M" };
        let name = format!("stress_cached_tearings_from_{first:04}");
        let body =
            move |lab: &Lab, backend: Backend| stress_tearings(lab, backend, first..end, cache);
        trials.extend(per_backend(ALL, &name, &[], body));
    }
    all([ignored(trials), per_backend(ALL, "sigterm_loses_no_acknowledged_write", &[], sigterm)])
}

/// What may be found in a block after a kill: `base` if no write of this server's life is safe, or one
/// of its writes that is not older than the last that is.
#[derive(Clone, Copy, Default)]
struct Block {
    /// Version found after the last kill; 0 is all zero.
    base: u32,
    /// Last version sent, in this server's life or an earlier one: no version is sent twice.
    sent: u32,
    /// First version sent in this server's life.
    first: Option<u32>,
    acknowledged: Option<u32>,
    /// The last that must be there: acknowledged, and with a cache before a FLUSH was sent.
    safe: Option<u32>,
}

impl Block {
    fn next_version(&mut self) -> u32 {
        self.sent += 1;
        self.first.get_or_insert(self.sent);
        self.sent
    }

    fn in_flight(&self) -> bool {
        self.first.is_some() && self.acknowledged != Some(self.sent)
    }

    fn allows(&self, version: u32) -> bool {
        match (self.first, self.safe) {
            (None, _) => version == self.base,
            (Some(first), None) => version == self.base || (first..=self.sent).contains(&version),
            (Some(_), Some(safe)) => (safe..=self.sent).contains(&version),
        }
    }
}

/// The content of version `version` of block `block`.
fn content(block: usize, version: u32) -> Vec<u8> {
    if version == 0 {
        return vec![0; BLOCK];
    }
    let mut bytes = Random::new((block as u64) << 32 | u64::from(version)).bytes(BLOCK);
    bytes[..4].copy_from_slice(&version.to_le_bytes());
    bytes
}

fn stress_tearings(lab: &Lab, backend: Backend, tearings: Range<usize>, cache: &str) -> Res {
    let path = lab.path("a.img");
    image::sparse(&path, (WRITERS * BLOCKS * BLOCK) as u64)?;
    let mut blocks = vec![Block::default(); WRITERS * BLOCKS];
    let mut random = Random::new(tearings.start as u64 + 1);
    let (mut torn, mut slowest) = (0, Duration::ZERO);
    let acknowledged = AtomicU64::new(0);
    let kills = tearings.len();

    let launch = || Launch::new(lab, backend).image(&path).arg("--cache").arg(cache);
    let mut server = launch().start()?;
    for tearing in tearings {
        let pause = Duration::from_micros(random.below(40_000));
        // SIGKILL, and waits until the server is gone.
        let kill = |server: Server| {
            drop(server);
            Ok(())
        };
        end_under_load(server, kill, &mut blocks, (pause, cache != "0"), &acknowledged)?;
        torn += blocks.iter().filter(|block| block.in_flight()).count();

        let dead = Instant::now();
        server = launch()
            .start()
            .map_err(|e| format!("tearing {tearing}: {}", e.message().unwrap_or("")))?;
        slowest = slowest.max(dead.elapsed());
        verify(&server, &mut blocks).map_err(|e| {
            format!("tearing {tearing}, killed after {pause:?}: {}", e.message().unwrap_or(""))
        })?;
    }
    server.stop()?;
    verify_file(&path, &blocks)?;
    let acknowledged = acknowledged.into_inner();
    println!(
        "{}: {kills} kills, {acknowledged} acknowledged writes, {torn} blocks in flight, next \
         server after at most {slowest:?}",
        backend.name()
    );
    check!(torn > 0, "no write was in flight at any of {kills} kills");
    Ok(())
}

/// SIGTERM instead: the server ends with 0, and what it acknowledged is in the image, although no FLUSH came.
fn sigterm(lab: &Lab, backend: Backend) -> Res {
    let path = lab.path("a.img");
    image::sparse(&path, (WRITERS * BLOCKS * BLOCK) as u64)?;
    let mut blocks = vec![Block::default(); WRITERS * BLOCKS];
    let server = Launch::new(lab, backend).image(&path).start()?;
    let (pause, acknowledged) = (Duration::from_millis(40), AtomicU64::new(0));
    end_under_load(server, Server::stop, &mut blocks, (pause, false), &acknowledged)?;
    verify_file(&path, &blocks)
}

/// Lets the writers go on for `pause` after their first hundred writes, then ends the server.
fn end_under_load(
    server: Server,
    end: impl FnOnce(Server) -> Res,
    blocks: &mut [Block],
    (pause, cached): (Duration, bool),
    acknowledged: &AtomicU64,
) -> Res {
    let before = acknowledged.load(Ordering::Relaxed);
    let mut clients = Vec::new();
    for _ in 0..WRITERS {
        clients.push(server.client()?);
    }
    thread::scope(|scope| {
        let mut writers = Vec::new();
        for (n, (client, mine)) in clients.into_iter().zip(blocks.chunks_mut(BLOCKS)).enumerate() {
            let start =
                move || write_until_killed(client, n * BLOCKS, (mine, cached), acknowledged);
            writers.push(scope.spawn(start));
        }
        let busy =
            wait_until(|| (acknowledged.load(Ordering::Relaxed) > before + 100).then_some(()));
        thread::sleep(pause);
        let ended = end(server);
        writers.into_iter().try_for_each(|w| w.join().expect("no panic"))?;
        ended?;
        check!(busy.is_some(), "the writers are hardly served");
        Ok(())
    })
}

/// Keeps `DEPTH` requests in flight until the server is gone, and counts every reply it left.
fn write_until_killed(
    mut client: Client,
    first: usize,
    (blocks, cached): (&mut [Block], bool),
    acknowledged: &AtomicU64,
) -> Res {
    let mut random = Random::new(first as u64 + u64::from(blocks[0].sent));
    // By cookie.
    let mut requests: Vec<Asked> = Vec::new();
    let (mut next, mut in_flight, mut open) = (0, 0, true);
    loop {
        while open && in_flight < DEPTH {
            let count = (1 + random.below(MOST as u64) as usize).min(BLOCKS - next);
            if blocks[next..next + count].iter().any(Block::in_flight) {
                break; // two writes of one block may overtake each other
            }
            let cookie = requests.len() as u64;
            let mut bytes = Vec::new();
            if random.below(32) == 0 {
                bytes.extend(header(0, cmd::FLUSH, cookie, 0, 0));
                let before = blocks.iter().map(|block| block.acknowledged).collect();
                requests.push(Asked::Flush(before));
            } else {
                let versions: Vec<u32> =
                    blocks[next..next + count].iter_mut().map(Block::next_version).collect();
                let flags = if random.below(16) == 0 { flag::FUA } else { 0 };
                let offset = ((first + next) * BLOCK) as u64;
                bytes.extend(header(flags, cmd::WRITE, cookie, offset, (count * BLOCK) as u32));
                for (block, &version) in (first + next..).zip(&versions) {
                    bytes.extend(content(block, version));
                }
                requests.push(Asked::Write(next, versions, flags == flag::FUA || !cached));
                next = (next + count) % BLOCKS;
            }
            open = client.send(&bytes).is_ok();
            in_flight += 1;
        }
        let mut head = [0; 16];
        match client.stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(e)
                if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&e.kind()) =>
            {
                return Ok(());
            }
            Err(e) => fail!("the dead server's connection does not end: {e}"),
        }
        let (answer, cookie) = parse_simple(&head)?;
        in_flight -= 1;
        if answer == Answer(err::ESHUTDOWN) {
            open = false; // refused because the server ends: not acknowledged
            continue;
        }
        answer.ok("a write or a flush under load")?;
        match requests.get(cookie as usize) {
            None => fail!("a reply to {cookie}, which was never sent"),
            Some(Asked::Flush(before)) => {
                for (block, &version) in blocks.iter_mut().zip(before) {
                    block.safe = block.safe.max(version);
                }
            }
            Some(Asked::Write(at, versions, safe)) => {
                for (block, &version) in blocks[*at..].iter_mut().zip(versions) {
                    block.acknowledged = Some(version);
                    if *safe {
                        block.safe = Some(version);
                    }
                }
                acknowledged.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// A request of a writer's.
enum Asked {
    /// With what was acknowledged before it was sent, of each block.
    Flush(Vec<Option<u32>>),
    /// The first block, the versions, and whether they are safe once it is answered.
    Write(usize, Vec<u32>, bool),
}

/// Reads every block from the new server. What it finds must stay until it is written again.
fn verify(server: &Server, blocks: &mut [Block]) -> Res {
    let mut client = server.client()?;
    for (n, part) in blocks.chunks_mut(BLOCKS).enumerate() {
        let start = n * BLOCKS;
        let found = client.read((start * BLOCK) as u64, (part.len() * BLOCK) as u32)?;
        let found = found.map_err(|error| format!("READ: error {error}"))?;
        for ((at, block), bytes) in (start..).zip(part).zip(found.chunks(BLOCK)) {
            let version = check_block(at, block, bytes)?;
            *block = Block { base: version, sent: block.sent, ..Block::default() };
        }
    }
    client.disconnect()
}

fn verify_file(path: &Path, blocks: &[Block]) -> Res {
    let file = File::open(path)?;
    let mut bytes = vec![0; BLOCK];
    for (at, block) in blocks.iter().enumerate() {
        file.read_exact_at(&mut bytes, (at * BLOCK) as u64)?;
        check_block(at, block, &bytes)?;
    }
    Ok(())
}

/// The version that `bytes` are, if the block may hold it and holds all of it.
fn check_block(at: usize, block: &Block, bytes: &[u8]) -> Res<u32> {
    let version = u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes"));
    let Block { base, sent, first, safe, .. } = *block;
    check!(
        block.allows(version),
        "block {at} holds version {version}; before {base}, since then sent {first:?} to {sent}, \
         safe {safe:?}"
    );
    check!(bytes == content(at, version), "block {at}: version {version} is torn");
    Ok(version)
}
