//! A worker that the test drives, with a device that completes requests when told to.

mod caching;
mod crash;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use aio_reap_test::Build;
use aio_reap_test::sim::{Script, Transfer};
use bufcache::FileDevice;
use bufcache_test::{Fault, FaultDevice, Operation};
use clap::Parser;
use nbd_protocol::wire::cmd;
use nbd_protocol::{Agreed, CommandFlags, HeaderStyle, MAX_PAYLOAD, NbdError, Request};
use radix_ctx::CtxTable;
use tempfile::TempDir;

use super::*;
use crate::admission::SMALL;
use crate::args::Args;
use crate::blocks::{Backing, Blocks, Source};
use crate::conn::Session;
use crate::connection_limits::{ConnectionLimits, Peer};

/// The permit of the only connection of a server.
fn permit() -> Permit {
    let peer = Peer::User { user: 0, process: std::process::id() as libc::pid_t };
    ConnectionLimits::new(1, None).unwrap().admit(peer, false).expect("it has no other").0
}

const BLOCK: usize = 4096;
const NONE: CommandFlags = CommandFlags::NONE;
const MOST: usize = 8;

/// Opens the exports of a command line. The first image is on a device of the test, which is returned.
fn exports(args: &[&str], engines_write: bool) -> (Arc<ExportTable>, Arc<FaultDevice<FileDevice>>) {
    let args = Args::parse_from(args);
    let mut exports = ExportTable::open(&args).unwrap();
    let file = exports.fixed[0].image.file().unwrap().try_clone().unwrap();
    let disk = Arc::new(FaultDevice::new(FileDevice::new(file).unwrap()));
    exports.blocks = Blocks::new(args.cache).unwrap();
    for (nr, export) in exports.fixed.iter_mut().enumerate() {
        let file = export.image.file().unwrap();
        let mut backing = Backing::open(file).unwrap();
        // So that the scripted engine makes the reads, except of a third image.
        backing.is_buffered = nr == 2;
        if nr == 0 {
            backing.device = disk.clone();
            if !engines_write {
                backing.source = Source::Device(disk.clone(), file.try_clone().unwrap());
            }
        }
        export.image = exports.blocks.attach(export.info.name.clone(), backing).unwrap();
    }
    (Arc::new(exports), disk)
}

struct Lab {
    worker: Worker,
    script: Script,
    /// The device below the cache.
    disk: Arc<FaultDevice<FileDevice>>,
    connections: Arc<Connections>,
    registry: Arc<Registry>,
    image: std::path::PathBuf,
    _inbox: Inbox,
    _dir: TempDir,
}

/// A lab to be made. Without changes: one image of a MiB, no cache, and an engine for one request more than may run.
struct Setup {
    limits: Limits,
    /// The requests that the engine holds.
    capacity: usize,
    cache: &'static str,
    size: &'static str,
    images: usize,
    /// The engine, and not the device, writes the first image.
    engines_write: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let (limits, capacity) = (Limits { depth: MOST, most: MOST }, MOST + 1);
        Self { limits, capacity, cache: "0", size: "1M", images: 1, engines_write: true }
    }
}

impl Setup {
    fn make(self) -> Lab {
        let Self { limits, capacity, cache, size, images, engines_write } = self;
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..images).map(|nr| dir.path().join(format!("{nr}.img"))).collect();
        let mut args = vec!["offlock-nbd", "--cache", cache, "--size", size];
        args.extend(paths.iter().flat_map(|path| ["--image", path.to_str().unwrap()]));
        let (exports, disk) = exports(&args, engines_write);
        let connections = Arc::new(CtxTable::builder().max_contexts(8).build());
        let registry = Arc::new(Registry::new());
        let script = Script::new();
        let engine = Engine::builder().depth(capacity).capacity(capacity);
        let engine = engine.build_sim(&script).unwrap();
        let shared = Shared {
            exports,
            connections: Arc::clone(&connections),
            registry: Arc::clone(&registry),
        };
        let (inbox, receiver) = Inbox::new(Instant::now()).unwrap();
        let ends = (inbox.clone(), receiver);
        let worker = Worker::new(shared, engine, limits, 0, false, ends).unwrap();
        let image = paths[0].clone();
        Lab { worker, script, disk, connections, registry, image, _inbox: inbox, _dir: dir }
    }
}

impl Lab {
    fn new() -> Self {
        Setup::default().make()
    }

    /// Connects a client, which has not read the greeting.
    fn connect(&mut self) -> (Id, UnixStream) {
        let (client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let id = self.connections.insert(Connection::default()).unwrap();
        self.worker.load.reserve();
        self.worker.serve(Socket::from(server), self.connections.get_ref(id).unwrap(), permit());
        (id, client)
    }

    /// Connects a client that has finished its handshake.
    fn client(&mut self) -> (Id, UnixStream) {
        self.client_of(0)
    }

    fn client_of(&mut self, export: usize) -> (Id, UnixStream) {
        let (id, mut client) = self.connect();
        client.read_exact(&mut [0; 18]).expect("the greeting");
        let slot = self.worker.slot_of(id).unwrap();
        let export = self.worker.shared.exports.fixed[export].clone();
        let image = self.worker.requests.open(&export.image).unwrap();
        let conn = &mut self.worker.conns.open[slot];
        conn.listed.set_export(&export.info.name);
        conn.phase = Phase::Transmission(Session::new(export, image, Agreed::default()));
        conn.deadline = None;
        (id, client)
    }

    fn ask(&mut self, client: &mut (Id, UnixStream), command: u16, flags: CommandFlags) {
        self.ask_for(client, command, flags, 0xc0, BLOCK);
    }

    fn ask_for(
        &mut self,
        client: &mut (Id, UnixStream),
        command: u16,
        flags: CommandFlags,
        cookie: u64,
        len: usize,
    ) {
        self.request(client, Request { flags, command, cookie, offset: 0, len: len as u64 });
    }

    fn request(&mut self, (id, client): &mut (Id, UnixStream), request: Request) {
        client.write_all(request.encode(HeaderStyle::Simple).unwrap().as_slice()).unwrap();
        if request.command == cmd::WRITE {
            let payload = vec![0x5a; request.len as usize];
            let mut parts = payload.chunks(64 << 10); // the socket has room for one
            while let Some(part) = parts.next() {
                client.write_all(part).unwrap();
                if parts.len() > 0 {
                    self.receive(*id);
                }
            }
        }
        self.receive(*id);
    }

    /// Lets the worker receive, and start what it has received.
    fn receive(&mut self, id: Id) {
        self.worker.ready(id, epoll::EventFlags::IN);
        self.complete_round();
    }

    /// Completes the oldest request of the device, and lets the worker handle it.
    fn complete(&mut self) {
        assert_eq!(self.script.complete(1), 1, "nothing is in flight");
        let engine = Rc::clone(&self.worker.requests.engine);
        engine.turn();
        self.worker.complete_round(&engine);
    }

    /// Returns whether one more request of the first image may run or queue.
    fn has_room(&mut self) -> bool {
        let image = Arc::clone(&self.worker.shared.exports.fixed[0].image);
        let image = self.worker.requests.open(&image).unwrap();
        self.worker.requests.has_room(&image)
    }

    /// Returns the number of requests that ended after their connection.
    fn closed(&self) -> u64 {
        self.worker.requests.closed
    }

    /// Closes the clients, and checks that no context, no reference to one, and no buffer is left.
    fn ends_empty(mut self, clients: impl IntoIterator<Item = (Id, UnixStream)>) {
        for (id, _client) in clients {
            self.worker.close(id, "a test");
        }
        let Self { worker, connections, registry, .. } = self;
        assert!(worker.requests.is_idle() && worker.conns.open.is_empty());
        assert_eq!(worker.memory.used(), 0);
        assert_eq!(worker.load.connections(), 0);
        assert_eq!(worker.report().begun, []);
        drop(worker);
        assert_eq!(connections.len(), 0);
        connections.flush().unwrap();
        assert_eq!(connections.stats().pending, 0, "a reference was left");
        assert!(registry.is_empty(), "a connection is listed still");
    }
}

#[test]
fn a_completion_after_the_close_reaches_no_connection_and_frees_its_buffer_once() {
    let mut lab = Lab::new();
    let mut first = lab.client();
    lab.ask(&mut first, cmd::READ, CommandFlags::NONE);
    assert_eq!((lab.script.in_flight(), lab.worker.memory.used()), (1, BLOCK));
    let slot = lab.worker.slot_of(first.0);
    lab.worker.close(first.0, "a test");
    assert_eq!(lab.worker.memory.used(), BLOCK, "the device has the buffer yet");
    lab.connections.flush().unwrap();
    assert_eq!(lab.connections.stats().referenced, 1, "and the operation its connection's context");

    // Another client in the same slot must not get the reply.
    let mut second = lab.client();
    assert_eq!(lab.worker.slot_of(second.0), slot);
    lab.ask(&mut second, cmd::READ, CommandFlags::NONE);
    lab.complete();
    assert_eq!(lab.closed(), 1);
    assert_eq!(lab.worker.memory.used(), BLOCK, "one of two buffers came back");
    assert_eq!(lab.worker.conns.open[slot.unwrap()].active, 1);
    // Nor must an event of the first client's socket reach the second client.
    lab.worker.ready(first.0, epoll::EventFlags::HUP);
    assert_eq!(lab.worker.conns.open.len(), 1);
    lab.complete();
    assert_eq!(lab.closed(), 1);
    second.1.read_exact(&mut [0; 16 + BLOCK]).expect("its own reply");
    lab.ends_empty([second]);
}

#[test]
fn a_write_goes_on_to_its_end_after_the_close() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    lab.ask(&mut client, cmd::WRITE, CommandFlags::FUA);
    lab.worker.close(client.0, "a test");
    lab.disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    lab.complete();
    lab.rest();
    assert_eq!((lab.closed(), lab.worker.memory.used()), (1, 0));
    assert_eq!(std::fs::read(&lab.image).unwrap()[..BLOCK], [0x5a; BLOCK]);
    assert_eq!(lab.disk.count(Operation::Sync), 1);
    let mut next = lab.client();
    lab.ask_for(&mut next, cmd::FLUSH, CommandFlags::NONE, 1, 0);
    lab.rest();
    assert_eq!(reply(&mut next, 0), (1, 5), "EIO: the lost client's failure is remembered");
    lab.ends_empty([next]);
}

#[test]
fn operations_of_closed_connections_count_towards_the_limit() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    for _ in 0..MOST {
        lab.ask(&mut client, cmd::READ, CommandFlags::NONE);
    }
    lab.worker.close(client.0, "a test");
    // The operations of the closed connection count until they have ended.
    let mut next = lab.client();
    lab.ask(&mut next, cmd::READ, CommandFlags::NONE);
    assert_eq!((lab.script.in_flight(), lab.has_room()), (MOST, false));
    assert!(lab.worker.conns.blocked.contains(&next.0), "it waits for room");
    lab.complete();
    assert_eq!((lab.script.in_flight(), lab.has_room()), (MOST, false));
    for _ in 0..MOST {
        lab.complete();
    }
    next.1.read_exact(&mut [0; 16 + BLOCK]).expect("the reply");
    assert_eq!(lab.closed(), MOST as u64);
    lab.ends_empty([next]);
}

/// A READ of a device with units of 512 bytes gets the bytes that it asked for, also if it asks for
/// none, and one that would be too long in whole units is refused.
#[test]
fn a_reply_has_the_bytes_that_were_asked_for() {
    for cache in ["0", "1M"] {
        let mut lab = Setup { cache, size: "40M", ..Setup::default() }.make();
        let exports = Arc::get_mut(&mut lab.worker.shared.exports).unwrap();
        Arc::get_mut(&mut exports.fixed[0].image).unwrap().alignment = 512;
        let mut client = lab.client();
        let mut ask = |offset, len: u64| {
            let (flags, command, cookie) = (NONE, cmd::READ, offset + len);
            lab.request(&mut client, Request { flags, command, cookie, offset, len });
            while lab.script.in_flight() > 0 {
                lab.complete();
            }
            lab.rest();
            reply(&mut client, len as usize)
        };
        for offset in [0, 1, 511, 512, 513, 4095, 4096] {
            for len in [0, 1, 511, 512, 4096, 70_000, 0] {
                assert_eq!(ask(offset, len), (offset + len, 0), "{offset} {len}");
            }
        }
        let long = u64::from(MAX_PAYLOAD); // in whole units more
        assert_eq!(ask(1, long), (1 + long, NbdError::Inval as u32));
        assert_eq!(ask(1, 0), (1, 0));
        lab.ends_empty([client]);
    }
}

/// The length of the shortest large transfer.
const LARGE: usize = SMALL as usize + BLOCK;

/// Makes a lab whose engine works on one request at a time.
fn narrow() -> Lab {
    Setup { limits: Limits { depth: 1, most: 32 }, capacity: 1, ..Setup::default() }.make()
}

impl Lab {
    fn waiting(&self) -> usize {
        self.worker.report().waiting
    }
}

/// Returns the cookie and the error of the next reply, which is that of a READ of `len` bytes or
/// has no payload.
fn reply((_, client): &mut (Id, UnixStream), len: usize) -> (u64, u32) {
    let mut header = [0; 16];
    client.read_exact(&mut header).expect("a reply");
    let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
    if error == 0 {
        client.read_exact(&mut vec![0; len]).expect("its payload");
    }
    (u64::from_be_bytes(header[8..].try_into().unwrap()), error)
}

#[test]
fn queued_requests_are_admitted_by_class_and_in_order_within_it() {
    let mut lab = narrow();
    let mut client = lab.client();
    let asked = [
        (cmd::WRITE, LARGE),
        (cmd::WRITE, LARGE),
        (cmd::READ, LARGE),
        (cmd::READ, LARGE),
        (cmd::WRITE, SMALL as usize),
        (cmd::READ, BLOCK),
        (cmd::READ, SMALL as usize),
    ];
    for (nr, (command, len)) in asked.into_iter().enumerate() {
        lab.ask_for(&mut client, command, NONE, nr as u64, len);
        assert_eq!((lab.script.in_flight(), lab.waiting()), (1, nr), "one at a time");
    }
    // The first request was in the engine before the others came.
    for nr in [0, 5, 6, 4, 2, 3, 1] {
        let (command, len) = asked[nr];
        assert_eq!(lab.script.in_flight(), 1, "a free place is taken at once");
        lab.complete();
        lab.rest();
        let len = if command == cmd::READ { len } else { 0 };
        assert_eq!(reply(&mut client, len), (nr as u64, 0));
    }
    assert_eq!(lab.waiting(), 0);
    lab.ends_empty([client]);
}

#[test]
fn the_buffers_of_queued_requests_come_back_at_the_close() {
    let mut lab = narrow();
    let (mut first, mut second) = (lab.client(), lab.client());
    lab.ask(&mut first, cmd::READ, NONE);
    for _ in 0..3 {
        lab.ask(&mut first, cmd::READ, NONE);
        lab.ask(&mut second, cmd::WRITE, NONE);
        lab.ask_for(&mut first, cmd::WRITE, NONE, 1, LARGE);
    }
    assert_eq!(lab.waiting(), 9);
    lab.worker.close(first.0, "a test");
    assert_eq!(lab.waiting(), 3);
    assert_eq!(lab.worker.memory.used(), 4 * BLOCK, "one is in the engine, three are the other's");
    lab.complete();
    assert_eq!(lab.closed(), 1, "the one that was in the engine");
    for _ in 0..3 {
        lab.complete();
        assert_eq!(reply(&mut second, 0), (0xc0, 0));
    }
    lab.ends_empty([second]);
}

#[test]
fn a_request_of_many_steps_goes_on_after_the_close() {
    let mut lab = narrow();
    let mut client = lab.client();
    std::fs::write(&lab.image, vec![0xee; 1 << 20]).unwrap();
    // If the file system cannot make zeros, they are written.
    for operation in [Operation::Discard, Operation::Zero] {
        lab.disk.inject(operation, .., Fault::Error(libc::EOPNOTSUPP));
    }
    lab.ask_for(&mut client, cmd::WRITE_ZEROES, NONE, 1, LARGE + 100);
    lab.worker.close(client.0, "a test");
    while !lab.worker.requests.is_idle() {
        lab.rest();
        if lab.script.in_flight() > 0 {
            lab.complete(); // the partial block at the end
        }
    }
    let image = std::fs::read(&lab.image).unwrap();
    assert!(image[..LARGE + 100].iter().all(|&byte| byte == 0), "it was not done to the end");
    assert!(image[LARGE + 100..].iter().all(|&byte| byte == 0xee));
    lab.ends_empty([]);
}

#[test]
fn a_stop_answers_what_waits_and_greets_no_client() {
    let mut lab = narrow();
    let (mut busy, mut idle) = (lab.client(), lab.client());
    for nr in 0..4 {
        lab.ask_for(&mut busy, cmd::READ, NONE, nr, BLOCK);
    }
    lab.registry.close().unwrap();
    lab.worker.stop();
    lab.worker.stop(); // a second time changes nothing
    assert_eq!(idle.1.read(&mut [0; 1]).unwrap(), 0, "it had asked for nothing");
    assert_eq!(lab.connect().1.read(&mut [0; 18]).unwrap(), 0, "a greeting");
    assert_eq!((lab.worker.conns.open.len(), lab.script.in_flight()), (1, 1));
    for nr in 0..4 {
        assert!(!lab.worker.has_stopped() && !lab.worker.requests.is_idle());
        lab.complete();
        assert_eq!(reply(&mut busy, BLOCK), (nr, 0));
    }
    assert_eq!(busy.1.read(&mut [0; 1]).unwrap(), 0, "the end");
    assert!(lab.worker.has_stopped());
    lab.ends_empty([]);
}

#[test]
fn a_flush_that_waited_while_another_failed_does_not_succeed() {
    let mut lab = narrow();
    let mut client = lab.client();
    lab.disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    // All are sent before the worker receives, and the delay keeps the first from ending before the
    // last is seen. Four may run.
    lab.disk.inject_next(Operation::Sync, Fault::Delay(Duration::from_secs(3)));
    for cookie in 0..5 {
        let flush = Request { flags: NONE, command: cmd::FLUSH, cookie, offset: 0, len: 0 };
        client.1.write_all(flush.encode(HeaderStyle::Simple).unwrap().as_slice()).unwrap();
    }
    lab.receive(client.0);
    assert_eq!(lab.waiting(), 1);
    lab.rest();
    for _ in 0..5 {
        assert_eq!(reply(&mut client, 0).1, 5, "EIO");
    }
    assert_eq!(lab.disk.count(Operation::Sync), 1, "the kernel reported what it lost already");
    lab.ends_empty([client]);
}

/// Makes a lab of `images` images, with as many slots as a server has.
fn images(images: usize, cache: &'static str, limits: Limits) -> Lab {
    let capacity = crate::server::slots(limits.depth);
    Setup { images, cache, limits, capacity, ..Setup::default() }.make()
}

/// One image answers nothing, from the engine or from the queue. Requests of a second image begin
/// nevertheless.
#[test]
fn an_image_that_hangs_leaves_slots_and_room_to_others() {
    const DEPTH: usize = 64;
    const LEN: usize = 16; // so that a socket holds all replies
    let mut lab = images(2, "0", Limits { depth: DEPTH, most: 4 * DEPTH });
    let mut hung = lab.client_of(0);
    let mut asked = 0;
    while !lab.worker.conns.blocked.contains(&hung.0) {
        lab.ask_for(&mut hung, cmd::READ, NONE, 3, LEN);
        asked += 1;
    }
    let (held, waiting) = (lab.script.in_flight(), lab.worker.report().waiting);
    assert!((DEPTH / 2..DEPTH).contains(&held), "{held} in flight");
    assert!(held + waiting == asked && asked < 4 * DEPTH, "{waiting} wait");

    let mut other = lab.client_of(1);
    lab.ask_for(&mut other, cmd::READ, NONE, 7, LEN);
    assert_eq!(lab.script.in_flight(), held + 1, "it does not wait");
    assert_eq!(lab.worker.report().waiting, waiting);
    // The script completes its oldest requests, those of the hung image. Each is followed by the
    // image's next one.
    for _ in 0..held {
        lab.complete();
    }
    lab.complete();
    let read = |client: &mut _| reply(client, LEN);
    assert_eq!(read(&mut other), (7, 0));
    for _ in 0..asked {
        if lab.script.in_flight() > 0 {
            lab.complete();
        }
        assert_eq!(read(&mut hung), (3, 0));
    }
    for client in [hung, other] {
        lab.worker.close(client.0, "a test");
    }
    lab.ends_empty([]);
}

/// The write-backs of five images hang in the engine. A READ of a third image begins nevertheless.
#[test]
fn write_backs_that_hang_leave_slots_to_others() {
    const DEPTH: usize = 16;
    let mut lab = images(7, "64M", Limits { depth: DEPTH, most: 4 * DEPTH });
    let engine = Rc::clone(&lab.worker.requests.engine);
    let _lent = bufcache::lend_engine(&engine);
    let mut hung: Vec<_> = (1..6).map(|image| lab.client_of(image)).collect();
    for (client, image) in hung.iter_mut().zip(1..) {
        let device = lab.worker.shared.exports.fixed[image].image.device.clone();
        for block in (0..256).step_by(2) {
            device.create(block).unwrap().fill(1);
        }
        lab.ask_for(client, cmd::FLUSH, NONE, 1, 0);
    }
    let held = lab.script.in_flight();
    assert!(held > DEPTH, "{held} in flight");
    let mut other = lab.client_of(6);
    lab.ask_for(&mut other, cmd::READ, NONE, 7, 16);
    assert_eq!(lab.script.in_flight(), held + 1, "it does not wait");
    while !lab.worker.requests.is_idle() {
        lab.script.complete(1);
        engine.turn();
        lab.worker.complete_round(&engine);
    }
    assert_eq!(reply(&mut other, 16), (7, 0));
    for client in &mut hung {
        assert_eq!(reply(client, 0), (1, 0));
    }
    hung.push(other);
    lab.ends_empty(hung);
}

/// More slow TRIMs than places are requested. A READ gets a place nevertheless, and all requests
/// are answered.
#[test]
fn blocking_operations_leave_slots_to_reads() {
    const DEPTH: usize = 32;
    const TRIMS: u64 = 40;
    let limits = Limits { depth: DEPTH, most: 4 * DEPTH };
    let mut lab = Setup { limits, capacity: DEPTH + 1, ..Setup::default() }.make();
    let (mut client, mut closed) = (lab.client(), lab.client());
    lab.disk.inject(Operation::Discard, .., Fault::Delay(std::time::Duration::from_millis(20)));
    for cookie in 0..TRIMS {
        lab.ask_for(&mut client, cmd::TRIM, NONE, cookie, BLOCK);
        lab.ask_for(&mut closed, cmd::TRIM, NONE, cookie, BLOCK);
    }
    lab.ask_for(&mut client, cmd::READ, NONE, TRIMS, 16);
    assert_eq!(lab.script.in_flight(), 1, "the READ waits");
    lab.worker.close(closed.0, "a test");
    lab.complete();
    lab.rest();
    let mut answered: Vec<u64> = (0..=TRIMS)
        .map(|_| {
            let mut header = [0; 16];
            client.1.read_exact(&mut header).unwrap();
            let cookie = u64::from_be_bytes(header[8..].try_into().unwrap());
            client.1.read_exact(&mut [0; 16][..if cookie == TRIMS { 16 } else { 0 }]).unwrap();
            cookie
        })
        .collect();
    answered.sort_unstable();
    assert!(answered.into_iter().eq(0..=TRIMS));
    lab.ends_empty([client]);
}

/// Returns a WRITE: its header and payload.
fn write(len: usize) -> Vec<u8> {
    let (flags, command) = (CommandFlags::NONE, cmd::WRITE);
    let request = Request { flags, command, cookie: 0xc0, offset: 0, len: len as u64 };
    let mut bytes = request.encode(HeaderStyle::Simple).unwrap().as_slice().to_vec();
    bytes.resize(bytes.len() + len, 0x5a);
    bytes
}

impl Lab {
    /// Sends bytes to the worker. Returns whether the worker then expects long WRITEs from the
    /// client.
    fn send(&mut self, (id, client): &mut (Id, UnixStream), bytes: &[u8]) -> bool {
        client.write_all(bytes).unwrap();
        self.receive(*id);
        let conn = &self.worker.conns.open[self.worker.slot_of(*id).unwrap()];
        conn.writes_long()
    }
}

#[test]
fn a_payload_is_received_in_place_by_its_length_and_not_by_what_is_missing() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let long = write(64 << 10);
    assert!(!lab.send(&mut client, &long[..20]), "a part of a header");
    for part in [20..8 << 10, 8 << 10..48 << 10, 48 << 10..60 << 10, 60 << 10..long.len()] {
        assert!(lab.send(&mut client, &long[part.clone()]), "{part:?}");
    }
    assert_eq!(lab.script.in_flight(), 1);
    assert!(lab.send(&mut client, &long[..28]));
    assert!(lab.send(&mut client, &long[28..]));
    assert_eq!(lab.script.in_flight(), 2);

    let short = write(BLOCK);
    assert!(!lab.send(&mut client, &short[..BLOCK / 2]));
    assert!(!lab.send(&mut client, &short[BLOCK / 2..]));
    assert!(!lab.send(&mut client, &short.repeat(2)));
    assert_eq!(lab.worker.conns.open[lab.worker.slot_of(client.0).unwrap()].active, 5);
    lab.worker.close(client.0, "a test");
    while lab.script.in_flight() > 0 {
        lab.complete();
    }
    lab.rest();
    lab.ends_empty([]);
}

/// The server, not the client, holds up the rest of a payload: the client is not one that stands still.
#[test]
fn a_client_whose_request_waits_for_room_does_not_stand_still() {
    let mut lab = narrow();
    let (mut first, mut other) = (lab.client(), lab.client());
    let long = write(64 << 10);
    let stuck = |lab: &Lab, id| {
        let conn = &lab.worker.conns.open[lab.worker.slot_of(id).unwrap()];
        (conn.blocked.is_some(), conn.stuck().is_some())
    };
    lab.send(&mut first, &long[..32 << 10]);
    assert_eq!(stuck(&lab, first.0), (false, true), "it stands still while it sends no more");
    while lab.has_room() {
        lab.ask(&mut other, cmd::READ, NONE);
    }
    lab.send(&mut first, &long[32 << 10..]);
    assert_eq!(stuck(&lab, first.0), (true, false));
    for id in [first.0, other.0] {
        lab.worker.close(id, "a test");
    }
    while lab.script.in_flight() > 0 {
        lab.complete();
    }
    lab.rest();
    lab.ends_empty([]);
}

/// Returns the number of polls until something is found or the time is over.
fn polls(busy_poll: &mut BusyPoll, found_at: u32) -> u32 {
    let mut polls = 0;
    let found = busy_poll.run(|| {
        polls += 1;
        Ok::<_, ()>((polls == found_at).then_some(()))
    });
    assert_eq!(found.unwrap().is_some(), polls == found_at);
    polls
}

#[test]
fn polls_in_vain_become_rare_and_success_brings_them_back() {
    const NEVER: u32 = u32::MAX;
    let mut busy_poll = BusyPoll::default();
    assert_eq!(polls(&mut busy_poll, 2), 2);
    let spun = (0..10_000).filter(|_| polls(&mut busy_poll, NEVER) > 0).count();
    assert!((10..30).contains(&spun), "{spun}");
    // An event that is ready at once changes nothing.
    while polls(&mut busy_poll, 1) == 0 {}
    assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 2) == 0);
    while polls(&mut busy_poll, 2) == 0 {}
    for _ in 0..100 {
        assert_eq!(polls(&mut busy_poll, 2), 2);
    }
    assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 1) == 0);
    assert_eq!(polls(&mut busy_poll, 2), 2, "a single poll in vain costs one sleep");
}

#[test]
fn a_worker_polls_except_while_threads_of_the_kernel_work_for_it() {
    let reads = (2, cmd::READ, SMALL as usize + 1); // too large to be copied at once
    let writes = |export, len| (export, cmd::WRITE, len);
    let long = writes(2, (256 << 10) + BLOCK);
    let rows = [(writes(0, BLOCK), true), (reads, true), (writes(2, BLOCK), false), (long, true)];
    for ((export, command, len), polls) in rows {
        let mut lab = images(3, "0", Limits { depth: MOST, most: MOST });
        let mut client = lab.client_of(export);
        lab.ask_for(&mut client, command, NONE, 1, len);
        assert_eq!(lab.script.in_flight(), 1);
        lab.worker.deadlines.watch(); // so that the wait ends
        for running in [1, 0] {
            lab.worker.busy_poll = BusyPoll::default();
            lab.worker.wait(&mut Vec::with_capacity(8)).unwrap();
            let polled = lab.worker.busy_poll.penalty > 0;
            assert_eq!(polled, polls || running == 0, "{export} {command} {running}");
            (0..running).for_each(|_| lab.complete());
        }
        lab.ends_empty([client]);
    }
}
