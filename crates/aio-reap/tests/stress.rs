//! Some seconds of mixed I/O on every real backend. Every byte is compared.
//!
//! ```sh
//! cargo test --release -p aio-reap --test stress -- --ignored --test-threads 1
//! OFFLOCK_SOAK=60 cargo test --release -p aio-reap --test stress -- --ignored --test-threads 1
//! ```
//!
//! `OFFLOCK_STRESS_SECONDS` (2) is the time for each backend and kind of file. `OFFLOCK_SOAK`
//! multiplies it.
#![cfg(not(offlock_model))]

mod common;

use std::cell::{Cell, RefCell};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use aio_reap::{AlignedBuf, AllocateMode, Engine, File};
use common::engines;
use testkit::stress::{keep_running, stress_time};

const DEPTH: usize = 32;
const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
/// The least number of requests for each backend and kind of file, also on a busy machine.
const ENOUGH: u64 = 100;

/// The expected content of the file, and the blocks in use.
struct World {
    engine: Rc<Engine>,
    file: File,
    /// The stamp of each block's content; 0 means zeros.
    stamps: RefCell<Vec<u64>>,
    busy: RefCell<Vec<bool>>,
    seed: Cell<u64>,
    outstanding: Cell<usize>,
    made: Cell<u64>,
    until: Instant,
}

impl World {
    fn random(&self, below: usize) -> usize {
        let seed = self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.seed.set(seed);
        (seed >> 33) as usize % below
    }

    /// Finds a range that no request uses, and marks it as in use.
    fn claim(&self) -> Option<(usize, usize)> {
        let (first, count) = (self.random(BLOCKS - 8), 1 + self.random(8));
        let mut busy = self.busy.borrow_mut();
        let range = &mut busy[first..first + count];
        (!range.contains(&true)).then(|| {
            range.fill(true);
            (first, count)
        })
    }

    fn release(&self, first: usize, count: usize) {
        self.busy.borrow_mut()[first..first + count].fill(false);
        self.outstanding.set(self.outstanding.get() - 1);
    }

    /// Makes one request. Its callback makes the next.
    fn next(self: &Rc<Self>) {
        if !keep_running(self.until, || self.made.get() > ENOUGH) {
            return;
        }
        let Some((first, count)) = self.claim() else { return };
        let (world, at, len) = (Rc::clone(self), (first * BLOCK) as u64, count * BLOCK);
        self.outstanding.set(self.outstanding.get() + 1);
        self.made.set(self.made.get() + 1);
        let stamp = self.made.get();
        let refused = match self.random(20) {
            0..=8 => {
                let done = move |result: Result<usize, aio_reap::RequestError>, buf: AlignedBuf| {
                    assert_eq!(result.unwrap(), len);
                    let stamps = world.stamps.borrow()[first..first + count].to_vec();
                    for (block, (stamp, bytes)) in stamps.iter().zip(buf.chunks(BLOCK)).enumerate()
                    {
                        assert!(
                            *bytes == *content(*stamp, first + block),
                            "block {}",
                            first + block
                        );
                    }
                    world.release(first, count);
                    world.next();
                };
                let mut buf = AlignedBuf::zeroed(len, BLOCK);
                buf.fill(0xee);
                self.engine.read(&self.file, buf, at).callback(done).is_err()
            }
            9..=16 => {
                let mut buf = AlignedBuf::zeroed(len, BLOCK);
                for (block, bytes) in buf.chunks_mut(BLOCK).enumerate() {
                    bytes.copy_from_slice(&content(stamp, first + block)[..]);
                }
                let done = move |result: Result<usize, aio_reap::RequestError>, _| {
                    assert_eq!(result.unwrap(), len);
                    world.stamps.borrow_mut()[first..first + count].fill(stamp);
                    world.release(first, count);
                    world.next();
                };
                self.engine.write(&self.file, buf, at).callback(done).is_err()
            }
            17 => {
                let punch = AllocateMode::PunchHole;
                let done = move |result: Result<usize, aio_reap::RequestError>, ()| {
                    if result.is_ok() {
                        world.stamps.borrow_mut()[first..first + count].fill(0);
                    }
                    world.release(first, count);
                    world.next();
                };
                self.engine.allocate(&self.file, punch, at, len as u64).callback(done).is_err()
            }
            _ => {
                let done = move |result: Result<usize, aio_reap::RequestError>, ()| {
                    result.unwrap();
                    world.release(first, count);
                    world.next();
                };
                self.engine.fdatasync(&self.file).callback(done).is_err()
            }
        };
        assert!(!refused, "the capacity is four times the depth");
    }
}

/// Fills a block so that all its groups of 8 bytes differ from each other and from those of any
/// other write.
fn content(stamp: u64, block: usize) -> Box<[u8; BLOCK]> {
    let mut bytes = Box::new([0; BLOCK]);
    if stamp != 0 {
        for (word, chunk) in bytes.chunks_mut(8).enumerate() {
            let value = (stamp << 24) ^ ((block as u64) << 10) ^ word as u64;
            chunk.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

#[test]
#[ignore = "takes seconds per backend"]
fn stress_mixed_io_on_every_backend() {
    let soak = std::env::var("OFFLOCK_SOAK").ok();
    let times = soak.map_or(1, |times| times.parse::<u32>().expect("a number"));
    for flags in [libc::O_DIRECT, 0] {
        for engine in engines(Engine::builder().depth(DEPTH)) {
            let engine = Rc::new(engine);
            let temp = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            temp.as_file().set_len((BLOCKS * BLOCK) as u64).unwrap();
            let mut options = OpenOptions::new();
            let opened = options.read(true).write(true).custom_flags(flags).open(temp.path());
            let Ok(opened) = opened else { continue }; // the file system has no O_DIRECT
            let world = Rc::new(World {
                file: engine.attach(opened).unwrap(),
                engine: Rc::clone(&engine),
                stamps: RefCell::new(vec![0; BLOCKS]),
                busy: RefCell::new(vec![false; BLOCKS]),
                seed: Cell::new(7),
                outstanding: Cell::new(0),
                made: Cell::new(0),
                until: Instant::now() + stress_time(2) * times,
            });
            while keep_running(world.until, || world.made.get() > ENOUGH) {
                let plug = engine.plug();
                while world.outstanding.get() < DEPTH + 8 {
                    let before = world.outstanding.get();
                    world.next();
                    if world.outstanding.get() == before {
                        break; // the range is in use, so try again after a turn
                    }
                }
                drop(plug);
                engine.wait(Some(Duration::from_millis(10))).unwrap();
            }
            engine.drain().unwrap();
            engine.validate();
            assert_eq!(world.outstanding.get(), 0);
            let stats = engine.stats();
            assert_eq!((stats.stray, stats.accepted), (0, world.made.get()));
            assert!(stats.max_in_flight <= DEPTH && stats.completed == stats.accepted);
            assert!(stats.accepted > ENOUGH, "{stats}");
            println!("{}, flags {flags:#o}: {stats}", engine.backend());
            for block in 0..BLOCKS {
                let at = (block * BLOCK) as u64;
                let buf = AlignedBuf::zeroed(BLOCK, BLOCK);
                let (result, buf) = engine.read(&world.file, buf, at).submit().unwrap().wait();
                assert_eq!(result.unwrap(), BLOCK);
                assert!(*buf == *content(world.stamps.borrow()[block], block), "block {block}");
            }
        }
    }
}
