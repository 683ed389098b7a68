//! Requests that the cache answers: they read no device, and allocate and free nothing.

use std::time::Duration;

use bufcache_test::{Fault, Operation};
use testkit::alloc::{Calls, ThreadAllocator, calls};

use super::*;
use crate::admission::SMALL;

/// The protocol's error number of EIO.
const EIO: u32 = 5;

fn caching() -> Lab {
    Setup { cache: "1M", ..Setup::default() }.make()
}

impl Lab {
    /// Submits a request to the engine that does not belong to the worker.
    fn fill_engine(&self) -> aio_reap::Operation<Vec<u8>> {
        let file = std::fs::File::open(&self.image).unwrap();
        let engine = &self.worker.requests.engine;
        let file = engine.attach(file).unwrap();
        engine.read(&file, vec![0; BLOCK], 0).submit().unwrap()
    }

    /// Sends the replies of requests that the cache answered.
    pub(super) fn complete_round(&mut self) {
        let engine = Rc::clone(&self.worker.requests.engine);
        self.worker.complete_round(&engine);
    }

    /// Waits until every running operation has ended, except those that the script holds.
    pub(super) fn rest(&mut self) {
        self.complete_round();
        while self.worker.requests.running() > self.script.in_flight() {
            std::thread::yield_now();
            self.complete_round();
        }
    }

    /// Reads the first `len` bytes. Also returns whether the device was read.
    fn read(&mut self, client: &mut (Id, UnixStream), len: usize) -> (Vec<u8>, bool) {
        self.ask_for(client, cmd::READ, NONE, 1, len);
        let asked = self.script.in_flight() > 0;
        if asked {
            self.complete();
        }
        self.rest();
        let mut bytes = vec![0; 16 + len];
        client.1.read_exact(&mut bytes).expect("the reply");
        assert_eq!(bytes[4..8], [0; 4], "it failed");
        (bytes.split_off(16), asked)
    }

    /// Changes the first block, and returns the error of the request.
    fn change(&mut self, client: &mut (Id, UnixStream), command: u16, flags: CommandFlags) -> u32 {
        let len = if command == cmd::FLUSH { 0 } else { BLOCK };
        self.ask_for(client, command, flags, 2, len);
        assert_eq!(self.script.in_flight(), 0, "the cache writes");
        self.rest();
        reply(client, 0).1
    }
}

#[test]
fn a_second_read_needs_no_device_unless_it_is_long() {
    let mut lab = caching();
    std::fs::write(&lab.image, [7; 1 << 20]).unwrap();
    let (mut client, mut other) = (lab.client(), lab.client());
    let (kept, long) = (SMALL as usize, SMALL as usize + 1);
    for (len, asks) in [
        (BLOCK, true),
        (BLOCK, false),
        (100, false),
        (BLOCK + 1, true), // one block more
        (2 * BLOCK, false),
        (long, true),
        (long, true),
        (kept, true), // nor is a part of it kept
        (kept, false),
    ] {
        assert_eq!(lab.read(&mut client, len), (vec![7; len], asks), "{len}");
        std::mem::swap(&mut client, &mut other);
    }
    let counters = lab.worker.requests.counters;
    assert_eq!((counters.reads, counters.hits), (9, 4));
    lab.ends_empty([client, other]);
}

#[test]
fn a_read_that_failed_is_not_kept_and_fails_alone() {
    let mut lab = caching();
    let (mut client, mut other) = (lab.client(), lab.client());
    lab.script.on_transfer(Transfer::Fail(libc::EIO));
    lab.ask_for(&mut client, cmd::READ, NONE, 1, 2 * BLOCK);
    lab.ask(&mut other, cmd::READ, NONE); // while the first is in flight
    assert_eq!(lab.script.in_flight(), 2, "no READ waits for another's read");
    lab.complete();
    lab.complete();
    assert_eq!(reply(&mut client, 2 * BLOCK), (1, EIO));
    assert_eq!(reply(&mut other, BLOCK), (0xc0, 0));
    assert!(lab.read(&mut other, BLOCK).1, "whose claim failed is kept by the next");
    assert!(!lab.read(&mut other, BLOCK).1 && lab.read(&mut client, 2 * BLOCK).1);
    lab.ends_empty([client, other]);
}

/// A read that began before a write may return the old content, and keeps it in the cache. So the
/// write waits for the end of the read, but the worker does not.
#[test]
fn a_write_waits_for_a_read_of_its_block() {
    let mut lab = caching();
    let (mut reader, mut writer) = (lab.client(), lab.client());
    lab.ask(&mut reader, cmd::READ, NONE);
    lab.ask_for(&mut writer, cmd::WRITE, NONE, 2, BLOCK);
    lab.complete_round();
    assert!(lab.worker.requests.running() > lab.script.in_flight());
    // Other requests continue, even for the same block.
    lab.ask_for(&mut writer, cmd::READ, NONE, 3, BLOCK);
    assert_eq!(lab.script.in_flight(), 2);
    assert!(lab.script.complete_nth(1));
    let engine = Rc::clone(&lab.worker.requests.engine);
    engine.turn();
    lab.complete_round();
    assert_eq!(reply(&mut writer, BLOCK), (3, 0));

    lab.complete(); // the older read
    assert_eq!(reply(&mut reader, BLOCK), (0xc0, 0));
    lab.rest();
    assert_eq!(reply(&mut writer, 0), (2, 0));
    assert_eq!(lab.read(&mut reader, BLOCK), (vec![0x5a; BLOCK], false));
    lab.ends_empty([reader, writer]);
}

/// A device that panics, on a thread of the cache or of the engine, has failed its image: the request fails, its buffer is
/// accounted for, and the worker goes on to read. Changes and FLUSHes fail from then on, also the last sync of
/// the server, whose exit code tells of it.
#[test]
fn a_device_that_panics_fails_the_image() {
    for (operation, first, cached) in [
        (Operation::Discard, cmd::TRIM, true),
        (Operation::Sync, cmd::FLUSH, true),
        (Operation::Write, cmd::WRITE, false),
    ] {
        let uncached = || Setup { engines_write: false, ..Setup::default() }.make();
        let mut lab = if cached { caching() } else { uncached() };
        let mut client = lab.client();
        assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), 0);
        assert_eq!(lab.worker.shared.exports.blocks.failed(), Vec::<String>::new());
        lab.disk.inject_next(operation, Fault::Panic);
        for command in [first, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::FLUSH] {
            assert_eq!(lab.change(&mut client, command, NONE), EIO, "{first}, {command}");
        }
        assert_eq!(lab.worker.memory.used(), 0);
        assert_eq!(lab.read(&mut client, BLOCK), (vec![0x5a; BLOCK], !cached), "reads go on");
        // After a sync that failed the cache refuses changes: it has not to be told.
        let failed: &[&str] = if first == cmd::FLUSH { &[] } else { &["0.img"] };
        assert_eq!(lab.worker.shared.exports.blocks.failed(), failed);
        assert!(lab.worker.shared.exports.sync().is_err(), "the last sync");
        lab.ends_empty([client]);
    }
}

#[test]
fn a_request_waits_while_the_engine_has_no_room() {
    // The engine holds one request less than the worker's depth, because of the stranger's.
    let limits = Limits { depth: 1, most: MOST };
    let mut lab = Setup { limits, capacity: 1, cache: "1M", ..Setup::default() }.make();
    let mut client = lab.client();
    let stranger = lab.fill_engine();
    lab.ask(&mut client, cmd::READ, NONE);
    lab.complete_round();
    assert_eq!(lab.script.in_flight(), 1, "the stranger's");
    lab.complete();
    drop(stranger);
    lab.complete_round();
    lab.complete();
    assert_eq!(reply(&mut client, BLOCK), (0xc0, 0));
    assert!(!lab.read(&mut client, BLOCK).1, "it was kept");
    lab.ends_empty([client]);
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// Requests at a time. The socket holds all their replies.
const BATCH: usize = 8;
const ROUNDS: usize = 64;

/// A client of a worker. It is prepared so that a round of the worker allocates nothing in the test
/// itself.
struct Hitter {
    lab: Lab,
    id: Id,
    client: UnixStream,
    events: Vec<epoll::Event>,
    engine: Rc<Engine>,
}

/// Requests that are sent at once, and space for their replies.
struct Batch {
    count: usize,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

impl Batch {
    fn new(command: u16, offset: u64, len: usize, count: usize) -> Self {
        let mut requests = Vec::new();
        for cookie in 0..count as u64 {
            let request = Request { flags: NONE, command, cookie, offset, len: len as u64 };
            requests.extend(request.encode(HeaderStyle::Simple).unwrap().as_slice());
            if command == cmd::WRITE {
                requests.resize(requests.len() + len, cookie as u8);
            }
        }
        let reply = if command == cmd::READ { 16 + len } else { 16 };
        Self { count, requests, replies: vec![0; count * reply] }
    }
}

impl Hitter {
    fn new() -> Self {
        let mut lab = caching();
        let (id, client) = lab.client();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let engine = Rc::clone(&lab.worker.requests.engine);
        Self { lab, id, client, events: Vec::with_capacity(256), engine }
    }

    /// Runs one round of the worker. Returns its allocations, unless a request had to wait.
    fn round(&mut self, batch: &mut Batch) -> Option<Calls> {
        let calls = self.send(batch);
        self.read(batch);
        calls
    }

    fn read(&mut self, batch: &mut Batch) {
        self.client.read_exact(&mut batch.replies).expect("the replies");
        let each = batch.replies.chunks(batch.replies.len() / batch.count);
        assert!(each.map(|reply| &reply[4..8]).all(|error| error == [0; 4]), "one failed");
    }

    fn send(&mut self, batch: &Batch) -> Option<Calls> {
        self.client.write_all(&batch.requests).unwrap();
        let Self { lab, events, engine, .. } = self;
        let (result, calls) = calls(|| lab.worker.round(engine, events));
        result.unwrap();
        let at_once = lab.worker.requests.is_idle();
        while !lab.worker.requests.is_idle() {
            lab.script.complete(MOST);
            engine.turn();
            lab.worker.complete_round(engine);
            std::thread::yield_now();
        }
        at_once.then_some(calls)
    }

    fn warm_rounds(&mut self, batch: &mut Batch, what: &str) {
        for _ in 0..4 {
            self.round(batch);
        }
        // Some rounds may wait, because the cleaner holds a block for a moment.
        let rounds: Vec<_> = (0..ROUNDS).filter_map(|_| self.round(batch)).collect();
        assert!(rounds.len() > ROUNDS / 2, "{what}: answered at once {} times", rounds.len());
        let spent = rounds.iter().find(|&&calls| calls != Calls::NONE);
        assert_eq!(spent, None, "{what}");
    }
}

#[test]
fn a_hit_allocates_nothing_and_frees_nothing() {
    let mut hitter = Hitter::new();
    let cases = [
        (cmd::READ, 0, BLOCK, "a block"),
        (cmd::READ, 100, 5000, "parts of two"),
        (cmd::READ, 0, 3 * BLOCK, "three"),
        (cmd::WRITE, 0, BLOCK, "a block written"),
        (cmd::WRITE, 100, 5000, "parts of two written"),
        (cmd::READ, 0, BLOCK, "a dirty block"),
    ];
    for (command, offset, len, what) in cases {
        for count in [1, BATCH] {
            let mut batch = Batch::new(command, offset, len, count);
            hitter.warm_rounds(&mut batch, what);
        }
    }

    // The first write to a block after it was written back.
    let mut batch = Batch::new(cmd::WRITE, 0, BLOCK, 1);
    let mut flush = Batch::new(cmd::FLUSH, 0, 0, 1);
    let mut spent = Vec::new();
    for _ in 0..ROUNDS {
        hitter.round(&mut flush);
        spent.extend(hitter.round(&mut batch));
    }
    assert!(
        spent.len() > ROUNDS / 2 && spent.iter().all(|&calls| calls == Calls::NONE),
        "{spent:?}"
    );

    // The count notices a new buffer, of a size that was not allocated yet, ...
    hitter.round(&mut Batch::new(cmd::READ, 3 * BLOCK as u64, 3 * BLOCK, 1));
    let hits = hitter.lab.worker.requests.counters.hits;
    let first = hitter.round(&mut Batch::new(cmd::READ, 0, 6 * BLOCK, 1)).expect("a hit");
    assert_eq!(hitter.lab.worker.requests.counters.hits, hits + 1);
    assert!(first.allocated > 0 && first.freed == 0, "{first:?}");
    // ... and the buffers that a closed connection frees.
    let Hitter { mut lab, id, .. } = hitter;
    let ((), last) = calls(|| lab.worker.close(id, "a test"));
    assert!(last.freed > 0, "{last:?}");
    lab.ends_empty([]);
}

#[test]
fn what_a_client_has_not_read_is_never_taken_for_less() {
    let mut hitter = Hitter::new();
    let cases = [(cmd::READ, 1), (cmd::READ, BLOCK), (cmd::READ, 5000), (cmd::WRITE, BLOCK)];
    for (command, len) in cases {
        for count in [1, 3] {
            let mut batch = Batch::new(command, 0, len, count);
            hitter.round(&mut batch); // the range is cached from now on
            for sent in 1..=5 {
                hitter.send(&batch);
                let conn = &hitter.lab.worker.conns.open[0];
                let there = unread(&conn.socket);
                assert!(there >= sent * batch.replies.len(), "the kernel counts {there}");
                assert!(conn.out.unread >= there, "{} of {there}, {len}", conn.out.unread);
            }
            for _ in 0..5 {
                hitter.read(&mut batch);
            }
        }
    }
}
