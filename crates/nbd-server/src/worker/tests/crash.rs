//! Invariant 20 of bufcache, end to end: a write that was acknowledged before a successful FLUSH,
//! or with FUA, survives a power cut at any moment, whichever other sectors survive.
//!
//! Two workers on threads of their own, with engines that do real I/O, serve an image. A device
//! below the cache records every change. Each sector that a client writes contains its version.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;

use offlock_sync::Mutex;
use testkit::rng::{Rng, seeded};

use super::*;

const SECTOR: usize = 512;
const CLIENTS: usize = 3;
const WORKERS: usize = 2;
/// Sectors of each client. No two clients share any.
const SECTORS: usize = 16 * 8;
/// Sixteen blocks, so that most are written back while the clients run. Requests of more than two
/// blocks bypass the cache.
const CACHE: &str = "64K";

/// The content that a request gave a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Version(u64),
    Zeros,
}

impl Content {
    fn bytes(self, sector: usize) -> [u8; SECTOR] {
        let mut bytes = [0; SECTOR];
        if let Self::Version(version) = self {
            bytes.fill(0xa5);
            bytes[..8].copy_from_slice(&(sector as u64).to_le_bytes());
            bytes[8..16].copy_from_slice(&version.to_le_bytes());
        }
        bytes
    }
}

struct History {
    /// The contents of each sector, in the order of the requests.
    contents: Vec<Vec<Content>>,
    /// For each sector the index of the last acknowledged content.
    acknowledged: Vec<usize>,
    /// From each moment on: the sectors, with the index of the oldest content that they may have.
    promised: Vec<(u64, BTreeMap<usize, usize>)>,
}

/// A client, with the state shared by all clients.
struct Player<'w> {
    stream: UnixStream,
    history: &'w Mutex<History>,
    disk: &'w FaultDevice<FileDevice>,
    random: Rng,
    version: u64,
    /// The first of its sectors.
    first: usize,
}

impl Player<'_> {
    fn below(&mut self, bound: usize) -> usize {
        self.random.usize(..bound)
    }

    /// Receives the greeting, and opens the default export.
    fn greet(&mut self) -> io::Result<()> {
        self.stream.read_exact(&mut [0; 18])?;
        self.stream.write_all(&3_u32.to_be_bytes())?; // fixed newstyle, no zeroes
        self.stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")?; // EXPORT_NAME, ""
        self.stream.read_exact(&mut [0; 10])
    }

    fn ask(
        &mut self,
        (command, flags): (u16, CommandFlags),
        sectors: Range<usize>,
        data: &[u8],
        back: &mut [u8],
    ) {
        let (offset, len) = ((sectors.start * SECTOR) as u64, (sectors.len() * SECTOR) as u64);
        let (offset, len) = if command == cmd::FLUSH { (0, 0) } else { (offset, len) };
        let request = Request { flags, command, cookie: 7, offset, len };
        self.stream
            .write_all(&[request.encode(HeaderStyle::Simple).unwrap().as_slice(), data].concat())
            .unwrap();
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4], "command {command}");
        self.stream.read_exact(back).unwrap();
    }

    /// Records and returns the content that a request, which is sent next, gives to the sectors.
    fn begin(&mut self, sectors: Range<usize>, zeros: bool) -> Vec<u8> {
        let mut history = self.history.lock();
        let mut bytes = Vec::new();
        for sector in sectors {
            self.version += 1;
            let content = if zeros { Content::Zeros } else { Content::Version(self.version) };
            history.contents[sector].push(content);
            bytes.extend(content.bytes(sector));
        }
        bytes
    }

    /// Records that a request was acknowledged. With FUA its content must be durable.
    fn acknowledge(&mut self, sectors: Range<usize>, fua: bool) {
        let mut history = self.history.lock();
        let now = self.disk.moments();
        let mut promised = BTreeMap::new();
        for sector in sectors {
            history.acknowledged[sector] = history.contents[sector].len() - 1;
            promised.insert(sector, history.acknowledged[sector]);
        }
        if fua {
            history.promised.push((now, promised));
        }
    }

    fn flush(&mut self) {
        let acknowledged = self.history.lock().acknowledged.clone();
        self.ask((cmd::FLUSH, CommandFlags::NONE), 0..0, &[], &mut []);
        let now = self.disk.moments();
        let promised = acknowledged.into_iter().enumerate().collect();
        self.history.lock().promised.push((now, promised));
    }

    fn play(&mut self, rounds: usize) {
        for _ in 0..rounds {
            let most = [8, 24, 64][self.below(3)]; // in a block, in the cache, past the cache
            let start = self.below(SECTORS);
            let count = 1 + self.below(most.min(SECTORS - start));
            let (mut start, mut end) = (self.first + start, self.first + start + count);
            if self.below(2) == 0 {
                (start, end) = (start / 8 * 8, end.next_multiple_of(8)); // whole blocks
            }
            let sectors = start..end;
            let fua = self.below(6) == 0;
            let flags = if fua { CommandFlags::FUA } else { CommandFlags::NONE };
            match self.below(12) {
                0..=5 => {
                    let data = self.begin(sectors.clone(), false);
                    self.ask((cmd::WRITE, flags), sectors.clone(), &data, &mut []);
                    self.acknowledge(sectors, fua);
                }
                6 => {
                    self.begin(sectors.clone(), true);
                    self.ask((cmd::WRITE_ZEROES, flags), sectors.clone(), &[], &mut []);
                    self.acknowledge(sectors, fua);
                }
                7 => {
                    // TRIM need not change the sectors, so nothing counts as acknowledged.
                    self.begin(sectors.clone(), true);
                    self.ask((cmd::TRIM, flags), sectors.clone(), &[], &mut []);
                }
                8 | 9 => self.flush(),
                _ => {
                    let mut there = vec![0; sectors.len() * SECTOR];
                    self.ask((cmd::READ, CommandFlags::NONE), sectors.clone(), &[], &mut there);
                    let history = self.history.lock();
                    for (sector, bytes) in sectors.zip(there.chunks(SECTOR)) {
                        history.fits(sector, bytes, history.acknowledged[sector], "read");
                    }
                }
            }
        }
    }
}

impl History {
    /// Checks that the sector has the content with the index `least` or a later one.
    fn fits(&self, sector: usize, bytes: &[u8], least: usize, when: &str) {
        let contents = &self.contents[sector];
        assert!(
            contents[least..].iter().any(|content| bytes == content.bytes(sector)),
            "sector {sector} {when}: number {least} of {} was promised",
            contents.len()
        );
    }

    /// Checks images of a moment: with the fewest changes that may survive, with the most, and with
    /// random ones.
    fn check(&self, disk: &FaultDevice<FileDevice>, moment: u64, random: &mut Rng) {
        let mut least = vec![0; self.contents.len()];
        for (_, promised) in self.promised.iter().filter(|(since, _)| *since <= moment) {
            for (&sector, &number) in promised {
                least[sector] = number.max(least[sector]);
            }
        }
        for image in 0..4 {
            let bytes = disk.after_power_cut(moment, |_, versions| match image {
                0 => 0,
                1 => versions,
                _ => random.usize(..versions),
            });
            for (sector, bytes) in bytes.unwrap().chunks(SECTOR).enumerate() {
                self.fits(sector, bytes, least[sector], "after a power cut");
            }
        }
    }
}

/// Runs random clients, and then cuts the power at random moments.
fn crash(seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.img");
    let size = (CLIENTS * SECTORS * SECTOR).to_string();
    let image = image.to_str().unwrap();
    let args = ["offlock-nbd", "--cache", CACHE, "--size", &size, "--image", image];
    // Engines read the image; only the device, which records changes, writes it.
    let (exports, disk) = exports(&args, false);
    disk.record().unwrap();
    let connections = Arc::new(CtxTable::builder().max_contexts(8).build());
    let registry = Arc::new(Registry::new());
    let (workers, receivers): (Vec<_>, Vec<_>) =
        (0..WORKERS).map(|_| Inbox::new(Instant::now()).unwrap()).unzip();
    let shared = Shared { exports, connections, registry };
    let start = |(number, receiver): (usize, Receiver<Message>)| {
        let (shared, inbox) = (shared.clone(), (workers[number].clone(), receiver));
        thread::spawn(move || {
            let threads = aio_reap::BackendKind::Threads;
            let engine = Engine::builder().depth(16).threads(4).backend(threads).build().unwrap();
            let limits = Limits { depth: 16, most: 64 };
            let worker = Worker::new(shared, engine, limits, 0, true, inbox);
            worker.unwrap().run().unwrap();
        })
    };
    let threads: Vec<_> = receivers.into_iter().enumerate().map(start).collect();
    let sectors = CLIENTS * SECTORS;
    let history = Mutex::new(History {
        contents: vec![vec![Content::Zeros]; sectors],
        acknowledged: vec![0; sectors],
        promised: Vec::new(),
    });
    let played: Vec<_> = thread::scope(|scope| {
        let mut clients = Vec::new();
        for client in 0..CLIENTS {
            let (stream, server) = UnixStream::pair().unwrap();
            server.set_nonblocking(true).unwrap();
            let id = shared.connections.insert(Connection::default()).unwrap();
            let ctx = shared.connections.get_ref(id).unwrap();
            let worker = &workers[client % WORKERS];
            worker.load.reserve();
            assert!(worker.send(Message::Serve(Socket::from(server), ctx, permit())));
            let mut player = Player {
                stream,
                history: &history,
                disk: &disk,
                random: Rng::with_seed((seed << 8) + client as u64),
                version: 0,
                first: client * SECTORS,
            };
            clients.push(scope.spawn(move || {
                player.greet().unwrap();
                player.play(70);
            }));
        }
        clients.into_iter().map(|client| client.join()).collect()
    });
    assert!(workers.iter().all(|worker| worker.send(Message::Stop)));
    threads.into_iter().for_each(|worker| worker.join().unwrap());
    played.into_iter().for_each(|client| client.unwrap_or_else(|panic| resume_unwind(panic)));
    shared.exports.sync().unwrap();
    let history = {
        let mut history = history.into_inner();
        let all = history.acknowledged.clone().into_iter().enumerate().collect();
        history.promised.push((disk.moments(), all));
        history
    };
    let mut random = seeded(seed);
    let last = disk.moments();
    let promises: Vec<u64> = history.promised.iter().map(|(since, _)| *since).collect();
    // At moments after which a promise holds, and at random moments.
    for at in promises.into_iter().rev().take(60) {
        history.check(&disk, at, &mut random);
    }
    for _ in 0..60 {
        let at = random.u64(..=last);
        history.check(&disk, at, &mut random);
    }
}

/// `OFFLOCK_SOAK` multiplies the number of runs: the planted bugs in `tests/mutants` need some.
#[test]
fn inv20_what_was_flushed_or_had_fua_survives_every_power_cut() {
    let soak = std::env::var("OFFLOCK_SOAK").ok().and_then(|factor| factor.parse().ok());
    for seed in 1..=2 * soak.unwrap_or(1) {
        crash(seed);
    }
}
