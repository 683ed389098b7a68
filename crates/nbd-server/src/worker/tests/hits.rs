//! A request that the cache answers at once allocates nothing and frees nothing.

use super::*;
use std::time::Duration;
use testkit::alloc::{Calls, ThreadAllocator, calls};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// Requests at a time. The socket holds all their replies.
const BATCH: usize = 8;
const ROUNDS: usize = 64;
const NONE: CommandFlags = CommandFlags::NONE;

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
        let mut lab = Lab::caching(Limits { depth: MOST, most: MOST }, MOST + 1, "1M");
        let (id, client) = lab.client();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
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
    lab.ends_empty();
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
                let there = polling::unread(&conn.socket);
                assert!(there >= sent * batch.replies.len(), "the kernel counts {there}");
                assert!(conn.out.unread >= there, "{} of {there}, {len}", conn.out.unread);
            }
            for _ in 0..5 {
                hitter.read(&mut batch);
            }
        }
    }
}
