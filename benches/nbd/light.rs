//! A client that costs little, so that a window shows the server.
//!
//! fio's engine makes several system calls for each read, and before our server it is busy all of the time:
//! its rows end where fio does. This client sends with one call the requests that there is room for, and
//! receives with one the replies that are there, as a proxy or a virtual machine's disk may. That takes it
//! about a microsecond for each read, so the server is what bounds the row. It does the same before every
//! server, and takes simple replies of all.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use harness::{FioSide, Random, percentile, thread_cpu_time, with_cpus};
use nbd_protocol::wire::cmd;
use nbd_protocol::{CommandFlags, HeaderStyle, Reply, ReplyContent, Request};

use crate::demo::Connection;

/// Bytes of a read.
pub(crate) const BLOCK: usize = 4096;
/// Received at a time, at most: more than all replies in flight.
const BUFFER: usize = 1 << 20;

/// A connection with so many reads in flight.
struct Client {
    connection: Connection,
    blocks: u64,
    /// The block of each read in flight, and the time at which it was sent; a cookie is an index.
    flights: Vec<(u64, Instant)>,
    free: Vec<usize>,
    requests: Vec<u8>,
    received: Vec<u8>,
    /// Bytes of `received` that are there.
    have: usize,
    /// The bytes that the replies must have; outside of a window only.
    expected: Option<File>,
}

impl Client {
    fn open(socket: &Path, depth: usize) -> io::Result<Self> {
        // One with an odd number asks for simple replies.
        let connection = Connection::open(socket, depth, 1).map_err(bad)?;
        Ok(Self {
            blocks: connection.export().size / BLOCK as u64,
            connection,
            flights: vec![(0, Instant::now()); depth],
            free: (0..depth).collect(),
            requests: Vec::new(),
            received: vec![0; BUFFER],
            have: 0,
            expected: None,
        })
    }

    /// Reads the blocks that `next` names until it names none. Returns how long each took, in seconds.
    fn run(&mut self, mut next: impl FnMut() -> Option<u64>) -> io::Result<Vec<f64>> {
        let mut times = Vec::new();
        loop {
            let now = Instant::now();
            self.requests.clear();
            while let Some(slot) = self.free.pop() {
                let Some(block) = next() else {
                    self.free.push(slot);
                    break;
                };
                self.flights[slot] = (block, now);
                let (flags, command) = (CommandFlags::NONE, cmd::READ);
                let (cookie, offset) = (slot as u64, block * BLOCK as u64);
                let request = Request { flags, command, cookie, offset, len: BLOCK as u64 };
                let header = request.encode(HeaderStyle::Simple).map_err(bad)?;
                self.requests.extend(header.as_slice());
            }
            // The requests in flight fit into the socket's buffer, so this never blocks.
            self.connection.stream.write_all(&self.requests)?;
            if self.free.len() == self.flights.len() {
                return Ok(times);
            }
            match self.connection.stream.read(&mut self.received[self.have..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.have += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            self.take(&mut times)?;
        }
    }

    /// Takes every reply that has come whole.
    fn take(&mut self, times: &mut Vec<f64>) -> io::Result<()> {
        let (now, mut at) = (Instant::now(), 0);
        while let Some((reply, len)) =
            Reply::parse(&self.received[at..self.have], HeaderStyle::Simple).map_err(bad)?
        {
            let Reply { cookie, content: ReplyContent::Simple(Ok(())), .. } = reply else {
                return Err(bad(format!("a read failed: {reply:?}")));
            };
            if self.have < at + len + BLOCK {
                break;
            }
            let slot = cookie as usize;
            if slot >= self.flights.len() || self.free.contains(&slot) {
                return Err(bad("a reply to nothing"));
            }
            let (block, sent) = self.flights[slot];
            if let Some(image) = &self.expected {
                let mut expected = [0; BLOCK];
                image.read_exact_at(&mut expected, block * BLOCK as u64)?;
                if self.received[at + len..][..BLOCK] != expected {
                    return Err(bad(format!("block {block} differs from the image")));
                }
            }
            times.push((now - sent).as_secs_f64());
            self.free.push(slot);
            at += len + BLOCK;
        }
        self.received.copy_within(at..self.have, 0);
        self.have -= at;
        Ok(())
    }
}

fn bad(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

/// Reads every block of the image once, in an order without neighbours, so that the server has in memory what it
/// keeps of the image. Fails if the export is not the image.
pub(crate) fn warm(socket: &Path, image: &Path, cpu: usize) -> io::Result<()> {
    with_cpus(&[cpu], || {
        let mut client = Client::open(socket, 32)?;
        let (image, blocks) = (File::open(image)?, client.blocks);
        if blocks != image.metadata()?.len() / BLOCK as u64 {
            return Err(bad("the export is not as long as the image"));
        }
        client.expected = Some(image);
        // An odd stride comes by each of so many blocks, which are a power of two, once.
        assert!(blocks.is_power_of_two());
        let step = blocks * 5 / 8 + 1;
        let mut order = (0..blocks).map(|number| number * step % blocks);
        client.run(|| order.next())?;
        client.connection.close().map_err(bad)
    })
}

/// Random reads for `window` over so many connections of so many reads each, by a thread for each on
/// `cpu`.
pub(crate) fn measure(
    socket: &Path,
    (connections, depth): (usize, usize),
    cpu: usize,
    window: Duration,
) -> io::Result<FioSide> {
    with_cpus(&[cpu], || {
        let open = |_| Client::open(socket, depth);
        let mut clients = (0..connections).map(open).collect::<io::Result<Vec<_>>>()?;
        let start = Instant::now();
        let end = start + window;
        let times = thread::scope(|scope| {
            let seeds = 1..;
            let threads: Vec<_> = clients
                .iter_mut()
                .zip(seeds)
                .map(|(client, seed)| scope.spawn(move || client.until(end, seed)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().map_err(|_| bad("a client's thread panicked"))?
            };
            threads.into_iter().map(join).collect::<io::Result<Vec<(Vec<f64>, Duration)>>>()
        })?;
        let took = start.elapsed().as_secs_f64();
        for client in clients {
            client.connection.close().map_err(bad)?;
        }
        let used: Duration = times.iter().map(|(_, used)| *used).sum();
        let times: Vec<f64> = times.into_iter().flat_map(|(times, _)| times).collect();
        let iops = times.len() as f64 / took;
        let p99 = percentile(&times, 99.0).map(Duration::from_secs_f64);
        Ok(FioSide { iops, p99, busy: used.as_secs_f64() / took })
    })
}

impl Client {
    /// Reads at random until `end`, and what is in flight then. How long each took, in seconds, and the
    /// thread's CPU time.
    fn until(&mut self, end: Instant, seed: u64) -> io::Result<(Vec<f64>, Duration)> {
        let (blocks, mut random) = (self.blocks as usize, Random::new(seed));
        let (mut batch, mut over, used) = (0_u32, false, thread_cpu_time());
        let next = || {
            // A look at the clock for every few: a batch is that long.
            batch += 1;
            over |= batch.is_multiple_of(16) && Instant::now() >= end;
            (!over).then(|| random.below(blocks) as u64)
        };
        let times = self.run(next)?;
        Ok((times, thread_cpu_time() - used))
    }
}
