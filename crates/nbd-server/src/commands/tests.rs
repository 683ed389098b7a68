//! Every kind of change through a small cache, compared with a plain image.

use std::fs;
use std::future::poll_fn;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use aio_reap_test::Build;
use aio_reap_test::sim::Script;
use bufcache::{BlockDevice, FileDevice};
use bufcache_test::{Fault, FaultDevice, Operation};
use nbd_protocol::CommandFlags;

use super::read::MAX_COPIED;
use super::*;
use crate::blocks::{Backing, Blocks};
use crate::memory::ALIGN;

type Faulty = Arc<FaultDevice<FileDevice>>;

const FLUSH: Command = Command::Flush;

fn write(fua: bool) -> Command {
    Command::Write { fua }
}

fn zeroes(fua: bool, no_hole: bool, fast: bool) -> Command {
    Command::WriteZeroes { fua, no_hole, fast }
}

fn request(offset: u64, len: u64) -> Request {
    Request { flags: CommandFlags::NONE, command: 0, cookie: 0, offset, len }
}

/// An image behind a cache, with its expected content.
struct Lab {
    file: fs::File,
    disk: Faulty,
    image: Arc<Image>,
    engine: Rc<Engine>,
    model: Vec<u8>,
}

/// What reads and writes the image past the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Engine,
    /// The engine reads, and the device writes.
    Both,
}

impl Lab {
    fn new(len: usize, cache: u64) -> Self {
        Self::with(len, cache, By::Both)
    }

    fn with(len: usize, cache: u64, by: By) -> Self {
        Self { model: vec![0; len], ..Self::without_model(len as u64, cache, by) }
    }

    fn without_model(len: u64, cache: u64, by: By) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        let device = FileDevice::new(file.try_clone().unwrap()).unwrap();
        let disk = Arc::new(FaultDevice::new(device));
        let source = match by {
            By::Engine => Source::File(file.try_clone().unwrap()),
            By::Both => Source::Device(disk.clone(), file.try_clone().unwrap()),
        };
        let backing = Backing { device: disk.clone(), source, len, is_buffered: by == By::Engine };
        let image = Blocks::new(cache).unwrap().attach("test".into(), backing).unwrap();
        let engine = Rc::new(Engine::new().unwrap());
        Self { file, disk, image, engine, model: vec![] }
    }

    fn job(&self, command: Command, request: Request) -> Job {
        Job {
            engine: Rc::clone(&self.engine),
            source: self.image.source.attach(&self.engine).unwrap(),
            image: Arc::clone(&self.image),
            unit: 1,
            style: HeaderStyle::Simple,
            command,
            request,
            written: 0,
        }
    }

    /// Runs a command as the server does, and waits for it.
    fn run(&self, command: Command, offset: u64, bytes: &mut [u8], len: u64) -> io::Result<()> {
        let request = request(offset, len);
        let is_read = matches!(command, Command::Read { .. });
        if is_read && self.image.try_read(offset, bytes) {
            return Ok(());
        }
        let job = self.job(command, request);
        let buf = (!bytes.is_empty()).then(|| {
            let room = self.image.read_range(offset, bytes.len() as u64).unwrap().len;
            let mut buf = AlignedBuf::zeroed(room, ALIGN);
            buf.set_len(bytes.len());
            buf.copy_from_slice(bytes);
            buf
        });
        let (result, buf) = self.engine.block_on(job.run(buf)).unwrap();
        if is_read && result.is_ok() {
            bytes.copy_from_slice(&buf.unwrap());
        }
        result
    }

    fn write(&mut self, offset: usize, len: usize, byte: u8, fua: bool) -> io::Result<()> {
        self.run(write(fua), offset as u64, &mut vec![byte; len], len as u64)?;
        self.model[offset..offset + len].fill(byte);
        Ok(())
    }

    fn zero(&mut self, command: Command, offset: usize, len: usize) -> io::Result<()> {
        self.run(command, offset as u64, &mut [], len as u64)?;
        let mut range = offset..offset + len;
        if matches!(command, Command::Trim { .. }) {
            let inner = self.image.inner(offset as u64, range.end as u64);
            let [start, end] = [inner.start, inner.end].map(|block| block as usize * BLOCK);
            range = start.min(range.end)..end.min(range.end);
        }
        self.model[range].fill(0);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.run(FLUSH, 0, &mut [], 0)
    }

    fn read(&self, offset: usize, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0xff; len];
        self.run(Command::Read { df: false }, offset as u64, &mut bytes, len as u64)?;
        Ok(bytes)
    }

    #[track_caller]
    fn check(&self, offset: usize, len: usize) {
        let found = self.read(offset, len).unwrap();
        assert!(found == self.model[offset..offset + len], "{offset}, {len}");
    }

    fn on_disk(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.model.len()];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }
}

#[test]
fn anything_at_any_place_is_what_a_plain_image_would_have() {
    const LEN: usize = 40 * BLOCK + 1000;
    let sizes = [(1, 4 * BLOCK), (2, 8 * BLOCK), (3, 1 << 20), (4, 0)];
    let by = [By::Engine, By::Both];
    let all = sizes.into_iter().flat_map(|size| by.map(|by| (size, by)));
    for ((seed, cache), by) in all {
        let mut lab = Lab::with(LEN, cache as u64, by);
        // If the file system cannot punch holes, TRIM has no effect.
        let trims = lab.disk.inner().discard(0, BLOCK as u64).is_ok();
        let mut rng = testkit::rng::seeded(seed);
        let mut random = |below| rng.usize(..below);
        for round in 0..600 {
            let offset = random(LEN - 1);
            let most = [64, BLOCK + 1, 8 * BLOCK, LEN][random(4)];
            let mut len = 1 + random(most.min(LEN - offset));
            if random(4) == 0 {
                len = (LEN - offset).min(most); // often up to the end
            }
            let (offset, len) = match random(2) {
                0 => (offset, len),
                _ => (offset / BLOCK * BLOCK, len.div_ceil(BLOCK) * BLOCK),
            };
            let len = len.min(LEN - offset);
            let fua = random(16) == 0;
            match random(10) {
                0..=3 => lab.write(offset, len, round as u8, fua).unwrap(),
                4 => lab.zero(zeroes(fua, random(2) == 0, false), offset, len).unwrap(),
                5 if trims => lab.zero(Command::Trim { fua }, offset, len).unwrap(),
                6 if random(4) == 0 => lab.flush().unwrap(),
                _ => lab.check(offset, len),
            }
        }
        lab.check(0, LEN);
        lab.flush().unwrap();
        assert!(lab.on_disk() == lab.model);
    }
}

#[test]
fn what_fits_is_written_without_the_image_and_what_is_long_past_the_cache() {
    let mut lab = Lab::new(64 * BLOCK, 1 << 20);
    lab.write(0, BLOCK, 7, false).unwrap();
    assert_eq!(lab.disk.count(Operation::Write), 0);
    lab.check(0, BLOCK);
    lab.write(100, 10, 8, false).unwrap(); // the block is cached
    lab.check(0, BLOCK);
    assert_eq!((lab.disk.count(Operation::Write), lab.disk.count(Operation::Read)), (0, 0));
    lab.write(1000, 40 * BLOCK, 9, false).unwrap();
    assert!(lab.on_disk()[2 * BLOCK] == 9 && lab.disk.count(Operation::Write) == 1);
    lab.check(0, 64 * BLOCK);
    lab.flush().unwrap();
    assert!(lab.on_disk() == lab.model && lab.disk.count(Operation::Sync) == 1);
}

#[test]
fn a_write_of_whole_blocks_up_to_the_end_reads_nothing() {
    let mut lab = Lab::new(4 * BLOCK + 10, 1 << 20);
    lab.disk.inject(Operation::Read, .., Fault::Error(libc::EIO));
    for len in [BLOCK + 10, 3 * BLOCK + 10, 4 * BLOCK + 10] {
        lab.write(4 * BLOCK + 10 - len, len, 7, false).unwrap();
    }
    assert_eq!(lab.disk.count(Operation::Read), 0);
}

#[test]
fn a_full_disk_is_told_and_forgets_nothing() {
    let mut lab = Lab::new(64 * BLOCK, 16 * BLOCK as u64);
    let len = 2 * BLOCK;
    lab.write(0, len, 7, false).unwrap();
    lab.disk.inject(Operation::Write, .., Fault::Error(libc::ENOSPC));
    let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error().unwrap();
    assert_eq!(errno(lab.flush()), libc::ENOSPC);
    lab.check(0, len);
    // With FUA the error is the same, and the write is not lost.
    assert_eq!(errno(lab.write(0, BLOCK, 8, true)), libc::ENOSPC);
    lab.model[..BLOCK].fill(8); // cached, but not durable
    lab.check(0, len);
    // A long READ covers blocks that cannot be written back.
    lab.check(0, 40 * BLOCK);
    // Once all buffers are dirty, a WRITE fails too.
    let told = (0..32).find_map(|at| lab.write(2 * at * BLOCK, len, at as u8, false).err());
    assert_eq!(told.unwrap().raw_os_error(), Some(libc::ENOSPC));
    lab.disk.heal();
    lab.flush().unwrap();
    lab.write(0, BLOCK, 9, true).unwrap();
    assert!(lab.on_disk()[..BLOCK].iter().all(|byte| *byte == 9));
}

#[test]
fn a_failed_sync_is_remembered_and_what_is_lost_is_not_read() {
    for fua in [false, true] {
        let mut lab = Lab::new(64 * BLOCK, 1 << 20);
        lab.write(0, BLOCK, 7, false).unwrap();
        lab.flush().unwrap();
        lab.write(BLOCK, BLOCK, 8, false).unwrap();
        lab.write(40 * BLOCK, 20 * BLOCK, 9, false).unwrap(); // past the cache
        lab.disk.inject_next(Operation::Sync, Fault::Error(libc::ENOSPC));
        let eio = |result: io::Result<()>| {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
        };
        eio(if fua { lab.write(0, 10, 7, true) } else { lab.flush() });
        eio(lab.flush());
        for offset in [0, 2] {
            eio(lab.write(offset * BLOCK, BLOCK, 1, false));
            eio(lab.write(offset * BLOCK, 20 * BLOCK, 1, false));
            eio(lab.zero(Command::Trim { fua: false }, offset * BLOCK, BLOCK));
            eio(lab.zero(zeroes(false, true, false), offset * BLOCK, BLOCK));
        }
        lab.check(0, 2 * BLOCK); // cached
        lab.check(30 * BLOCK, BLOCK); // never written
        eio(lab.read(41 * BLOCK, BLOCK).map(drop));
        eio(lab.read(20 * BLOCK, 40 * BLOCK).map(drop));
        assert_eq!(lab.disk.count(Operation::Sync), 2, "and not once more");
    }
}

#[test]
fn what_the_file_system_cannot_do_is_written_or_left() {
    let mut lab = Lab::new(64 * BLOCK + 10, 1 << 20);
    let not_there = Fault::Error(libc::EOPNOTSUPP);
    for operation in [Operation::Discard, Operation::Zero] {
        lab.disk.inject(operation, .., not_there);
    }
    lab.write(0, 64 * BLOCK, 7, false).unwrap();
    lab.write(5, 64 * BLOCK, 8, false).unwrap();
    // TRIM may have no effect.
    let trim = |fua| Command::Trim { fua };
    lab.run(trim(true), 10, &mut [], 5 * BLOCK as u64).unwrap();
    lab.check(0, 64 * BLOCK + 10);
    for no_hole in [false, true] {
        let fast = lab.zero(zeroes(false, no_hole, true), 10, 5 * BLOCK);
        assert_eq!(fast.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        lab.check(0, 64 * BLOCK + 10);
        lab.zero(zeroes(true, no_hole, false), 10 + BLOCK, 50 * BLOCK).unwrap();
        lab.check(0, 64 * BLOCK + 10);
    }
    lab.zero(zeroes(false, true, false), 0, 64 * BLOCK + 10).unwrap();
    lab.flush().unwrap();
    assert!(lab.on_disk() == lab.model);
}

/// Zeros are written for ranges that a compact header can express, not for terabytes.
#[test]
fn long_zeroes_that_the_file_system_cannot_make_are_invalid() {
    const LEN: u64 = 1 << 40;
    let lab = Lab::without_model(LEN, 1 << 20, By::Both);
    for operation in [Operation::Discard, Operation::Zero] {
        lab.disk.inject(operation, .., Fault::Error(libc::EOPNOTSUPP));
    }
    for (no_hole, len) in [(false, LEN), (true, LEN), (false, (1 << 32) + 2 * BLOCK as u64)] {
        let long = lab.run(zeroes(false, no_hole, false), 10, &mut [], len - 10);
        assert_eq!(long.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    assert_eq!(lab.disk.count(Operation::Write), 0);
    lab.run(zeroes(false, false, false), 0, &mut [], 8 * BLOCK as u64).unwrap();
    assert_eq!(lab.disk.count(Operation::Write), 1);
}

#[test]
fn what_the_disk_refuses_changes_nothing_that_was_written_before() {
    let mut lab = Lab::new(64 * BLOCK, 1 << 20);
    lab.write(0, 4 * BLOCK, 7, false).unwrap();
    let refusals = [
        (Operation::Discard, Command::Trim { fua: false }),
        (Operation::Discard, zeroes(false, false, false)),
        (Operation::Zero, zeroes(false, true, false)),
    ];
    let mut has_panicked = false;
    for (operation, command) in refusals {
        for fault in [Fault::Error(libc::EIO), Fault::Panic] {
            lab.disk.inject_next(operation, fault);
            lab.zero(command, 0, 2 * BLOCK).unwrap_err();
            lab.check(0, 64 * BLOCK);
            has_panicked |= matches!(fault, Fault::Panic);
            assert_eq!(lab.image.has_failed(), has_panicked);
        }
    }
    lab.disk.inject_next(Operation::Write, Fault::Error(libc::EIO));
    lab.write(0, 30 * BLOCK, 8, false).unwrap_err();
    lab.check(0, 4 * BLOCK);
    lab.flush().unwrap();
}

/// A long READ copies some dirty blocks, and has the rest written back first. It copies those that
/// cannot be written.
#[test]
fn a_long_read_of_dirty_blocks_copies_few_of_them() {
    // So large a cache that the cleaner leaves 512 dirty blocks alone.
    let mut lab = Lab::new(512 * BLOCK, 256 << 20);
    for fails in [false, true] {
        for at in 0..512 {
            lab.write(at * BLOCK, BLOCK, at as u8 | 1, false).unwrap();
        }
        if fails {
            lab.disk.inject(Operation::Write, .., Fault::Error(libc::ENOSPC));
        }
        lab.check(10, 500 * BLOCK);
        assert!(lab.image.device.is_newer(0..1), "what is copied is not written");
        assert_eq!(lab.image.device.is_newer(MAX_COPIED as u64..500), fails);
    }
    lab.disk.heal();
    lab.flush().unwrap();
    assert!(lab.on_disk() == lab.model);
}

/// The ends of ZEROES, whole blocks and partial ones, get a buffer although all buffers are dirty.
#[test]
fn the_ends_of_zeroes_are_written_while_all_buffers_are_dirty() {
    let mut lab = Lab::new(64 * BLOCK, 4 * BLOCK as u64);
    for at in 0..16 {
        lab.write(at * BLOCK, BLOCK, 7, false).unwrap();
    }
    lab.zero(zeroes(false, false, false), 100, 20 * BLOCK).unwrap();
    lab.zero(zeroes(true, true, false), 30 * BLOCK + 1, BLOCK).unwrap();
    lab.check(0, 64 * BLOCK);
    lab.flush().unwrap();
    assert!(lab.on_disk() == lab.model);
}

/// Requests that wait for each other leave threads to what they wait for: more writes with FUA than
/// the cache has threads for an image, beside FLUSHes, BLOCK_STATUS and long READs of dirty blocks.
#[test]
fn many_durable_writes_end_beside_a_flush() {
    const MANY: u64 = 40;
    let (tell, told) = channel();
    thread::spawn(move || {
        let lab = Lab::new(512 * BLOCK, 4 << 20);
        lab.disk.inject(Operation::Sync, .., Fault::Delay(Duration::from_millis(5)));
        for round in 0..5 {
            let ask = |command, request: Request, len: usize| {
                let mut buf = AlignedBuf::zeroed(len.max(1), ALIGN);
                buf.set_len(len);
                let job = lab.job(command, request);
                Box::pin(async move { job.run(Some(buf)).await })
            };
            let write = |nr: u64| ask(write(true), request((100 + nr) * BLOCK as u64, 100), 100);
            let flush = |_| ask(FLUSH, request(0, 0), 0);
            let status = |_| ask(Command::BlockStatus { one: false }, request(0, 1 << 20), 4096);
            let read = |_| ask(Command::Read { df: false }, request(0, 1 << 20), 1 << 20);
            let mut all: Vec<_> = (0..2).map(flush).collect();
            all.extend((0..MANY).map(write));
            all.extend((0..2).map(flush));
            all.extend((0..MANY / 2).map(status));
            all.extend((0..MANY / 2).map(read));
            let ended = poll_fn(|context| {
                all.retain_mut(|one| match one.as_mut().poll(context) {
                    Poll::Ready((result, _)) => {
                        result.unwrap();
                        false
                    }
                    Poll::Pending => true,
                });
                if all.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            });
            lab.engine.block_on(ended).unwrap();
            tell.send(round).unwrap();
        }
    });
    for round in 0..5 {
        assert_eq!(told.recv_timeout(Duration::from_secs(120)), Ok(round), "they wait for ever");
    }
}

/// The future of a long write is dropped while the engine has the bytes. The blocks stay excluded
/// until the write ends.
#[test]
fn a_write_that_is_dropped_excludes_others_until_the_engine_ends_it() {
    let script = Script::new();
    let mut lab = Lab::with(64 * BLOCK, 1 << 20, By::Engine);
    lab.engine = Rc::new(Engine::builder().build_sim(&script).unwrap());
    let job = lab.job(write(false), request(0, 40 * BLOCK as u64));
    let mut future = Box::pin(job.run(Some(AlignedBuf::zeroed(40 * BLOCK, ALIGN))));
    let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll.is_pending() && script.in_flight() == 1);
    drop(future);
    let can_write = |lab: &Lab| lab.image.device.try_create(20).is_ok();
    assert!(!can_write(&lab), "the engine still writes it");
    while script.in_flight() > 0 {
        script.complete_nth(0);
        lab.engine.turn();
    }
    assert!(can_write(&lab));
}

/// The engine makes a long write, unless it must wait for a block that a read has claimed.
#[test]
fn a_long_write_is_the_engines_unless_a_block_of_it_is_taken() {
    let mut lab = Lab::with(64 * BLOCK, 1 << 20, By::Engine);
    lab.write(0, 2 * BLOCK, 6, false).unwrap(); // dirty
    lab.write(0, 40 * BLOCK, 7, false).unwrap();
    lab.check(0, 64 * BLOCK);
    assert_eq!(lab.disk.count(Operation::Write), 0, "the device was asked");
    assert!(!lab.image.device.is_newer(0..64));
    let load = lab.image.device.claim(20).unwrap().unwrap();
    let mut buf = AlignedBuf::zeroed(40 * BLOCK, ALIGN);
    buf.fill(8);
    let job = lab.job(write(true), request(0, 40 * BLOCK as u64));
    let mut long = Box::pin(job.run(Some(buf)));
    assert!(long.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    load.finish(Err(os(libc::EIO)));
    lab.engine.block_on(long).unwrap().0.unwrap();
    lab.model[..40 * BLOCK].fill(8);
    assert_eq!(lab.disk.count(Operation::Write), 1, "a thread of the cache waited, and wrote");
    lab.check(0, 64 * BLOCK);
}
