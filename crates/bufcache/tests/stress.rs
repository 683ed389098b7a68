//! Caches of a few buffers and many threads, on this kernel: every guard shows one version of its
//! block from the first byte to the last, as long as it lives, and none that was invalidated
//! before.
//!
//! Ignored by default: `OFFLOCK_STRESS_SECONDS` (3) says how long each test runs.
#![cfg(not(offlock_model))]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bufcache::{BlockDevice, Builder, Cache, Device, Eviction, GetError, Pin};

use testkit::rng::{self, Rng};
use testkit::stress::{keep_running, stress_time};

const BLOCKS: u64 = 24;

/// Each block is full of its number and version; a read now and then fails.
struct Disk {
    size: usize,
    /// How often each block was written.
    written: [AtomicU64; BLOCKS as usize],
    /// The version that was there before the last invalidation that is over began.
    valid: [AtomicU64; BLOCKS as usize],
    reads: AtomicU64,
    fails: bool,
}

impl Disk {
    fn new(size: usize, fails: bool) -> Arc<Self> {
        let zeros = || [(); BLOCKS as usize].map(|()| AtomicU64::new(0));
        let (written, valid) = (zeros(), zeros());
        Arc::new(Self { size, written, valid, reads: AtomicU64::new(0), fails })
    }

    fn value(block: u64, version: u64) -> u64 {
        block << 48 | version
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * self.size as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.reads.fetch_add(1, Ordering::Relaxed);
        let block = offset / self.size as u64;
        let version = self.written[block as usize].load(Ordering::Acquire);
        let value = Self::value(block, version).to_ne_bytes();
        for (at, bytes) in buf.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&value);
            if at == 8 && count.is_multiple_of(4) {
                thread::yield_now();
            }
        }
        if self.fails && count % 19 == 7 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(buf.len())
    }
}

/// The version, the same in all bytes.
fn version(bytes: &[u8], block: u64) -> u64 {
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "block {block} is torn");
    assert_eq!(first >> 48, block, "another block's bytes");
    first & ((1 << 48) - 1)
}

/// A cache under a storm, and what its threads pass on to each other.
struct Storm {
    cache: Cache,
    disks: Vec<(Arc<Disk>, Device)>,
    /// A pin, its block and version.
    shelf: Mutex<Vec<(Pin, u64, u64)>>,
    most: usize,
    got: AtomicU64,
}

impl Storm {
    fn new(builder: Builder, most: usize, devices: usize) -> Self {
        let cache = builder.patience(Duration::from_millis(2)).build().unwrap();
        let attach = |_| {
            let disk = Disk::new(512, true);
            let device = cache.attach(Arc::clone(&disk)).unwrap();
            (disk, device)
        };
        let disks = (0..devices).map(attach).collect();
        Self { cache, disks, shelf: Mutex::default(), most, got: AtomicU64::new(0) }
    }

    fn shelf(&self) -> std::sync::MutexGuard<'_, Vec<(Pin, u64, u64)>> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a buffer; what is no failure of the device is none of ours either.
    fn had<T>(&self, result: Result<T, GetError>) -> Option<T> {
        match result {
            Ok(buffer) => {
                self.got.fetch_add(1, Ordering::Relaxed);
                Some(buffer)
            }
            Err(GetError::NoFreeBuffers | GetError::WouldBlock) => None,
            Err(GetError::Io { errno: libc::EIO, .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn step(&self, rng: &mut Rng) {
        let (disk, device) = &self.disks[rng.u64(..self.disks.len() as u64) as usize];
        let block = rng.u64(..BLOCKS) & rng.u64(..BLOCKS);
        let at = block as usize;
        let oldest = disk.valid[at].load(Ordering::Acquire);
        match rng.u64(..64) {
            0..=3 => {
                let new = disk.written[at].fetch_add(1, Ordering::AcqRel) + 1;
                device.invalidate(block).unwrap();
                disk.valid[at].fetch_max(new, Ordering::AcqRel);
            }
            4 => {
                self.cache.shrink(rng.u64(..4) as usize);
            }
            5 => match self.cache.resize(self.most * (1 + rng.u64(..4) as usize) / 4) {
                Ok(()) | Err(GetError::NoFreeBuffers) => {}
                Err(error) => panic!("{error}"),
            },
            6..=12 => {
                let Some(guard) = self.had(device.get(block)) else { return };
                let seen = version(&guard, block);
                let pin = guard.pin().unwrap();
                drop(guard);
                self.shelf().push((pin, block, seen));
            }
            13..=18 => {
                // Up to two, or all buffers would be there.
                let taken = {
                    let mut shelf = self.shelf();
                    let keep = rng.u64(..3) as usize;
                    let from = keep.min(shelf.len());
                    shelf.split_off(from)
                };
                for (pin, block, seen) in taken {
                    assert_eq!(version(&pin, block), seen, "a pin");
                }
            }
            19 => {
                // More than a record has slots for.
                let held: Vec<_> =
                    (0..12).filter_map(|_| self.had(device.try_get(block))).collect();
                held.iter().for_each(|guard| assert!(version(guard, block) >= oldest));
            }
            roll => {
                let result = if roll < 30 { device.try_get(block) } else { device.get(block) };
                let Some(guard) = self.had(result) else { return };
                let seen = version(&guard, block);
                assert!(seen >= oldest, "block {block} is of before its invalidation");
                if roll.is_multiple_of(8) {
                    thread::yield_now();
                    assert_eq!(version(&guard, block), seen, "a guard");
                }
            }
        }
    }

    /// Threads come and go, so that what they had is others' later.
    fn rage(&self, until: Instant) {
        let mut seed = 1;
        let on = || keep_running(until, || self.is_enough());
        while on() {
            thread::scope(|scope| {
                for _ in 0..4 {
                    seed += 1;
                    let mut rng = rng::seeded(seed);
                    scope.spawn(move || {
                        for _ in 0..5_000 {
                            self.step(&mut rng);
                            if !on() {
                                break;
                            }
                        }
                    });
                }
            });
        }
    }

    fn is_enough(&self) -> bool {
        let evictions = self.cache.stats().evictions;
        self.got.load(Ordering::Relaxed) > 1000 && evictions > 100
    }

    /// All is let go: each buffer is of use again, all is counted.
    fn end(self) {
        self.shelf().clear();
        self.cache.resize(self.most).unwrap();
        let (disk, device) = self.disks.last().unwrap();
        let whole = self.most / disk.size;
        let mut held = Vec::new();
        for block in 0..whole as u64 {
            // A device that fails, or a machine that has others to run.
            let got = (0..10_000).find_map(|_| self.had(device.get(block)));
            held.push(got.expect("a buffer for each block"));
        }
        assert_eq!(held.len(), whole);
        drop(held);
        let stats = self.cache.stats();
        let reads: u64 =
            self.disks.iter().map(|(disk, _)| disk.reads.load(Ordering::Relaxed)).sum();
        let got = self.got.load(Ordering::Relaxed);
        println!("{got} got; {stats}");
        assert_eq!(stats.reads, reads);
    }
}

fn storm(builder: Builder, most: usize, devices: usize) {
    let storm = Storm::new(builder, most, devices);
    storm.rage(Instant::now() + stress_time(3));
    assert!(storm.is_enough(), "a storm in a teacup: {}", storm.cache.stats());
    storm.end();
}

#[test]
#[ignore = "stress"]
fn stress_inv06_guards_and_pins_in_a_cache_of_four_buffers() {
    let most = 4 * 512;
    storm(Cache::builder(most).block_size(512).eviction(Eviction::Clock), most, 1);
}

#[test]
#[ignore = "stress"]
fn stress_inv10_two_devices_and_a_cache_of_sixteen_buffers() {
    let most = 16 * 512;
    storm(Cache::builder(most).block_size(512), most, 2);
}

/// In each round, four threads get the same uncached block at once: it is read once. There are
/// buffers for all blocks, and for each thread that loses the race.
#[test]
#[ignore = "stress"]
fn stress_inv02_a_block_is_read_once_whoever_asks() {
    let cache = Cache::builder(64 * 512).block_size(512).build().unwrap();
    let disk = Disk::new(512, false);
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    let until = Instant::now() + stress_time(3);
    let (start, end, over) = (Barrier::new(4), Barrier::new(4), AtomicBool::new(false));
    let most = AtomicU64::new(0);
    thread::scope(|scope| {
        for first in [true, false, false, false] {
            let (start, end, over, disk, device) = (&start, &end, &over, &disk, &device);
            let most = &most;
            scope.spawn(move || {
                for round in 0.. {
                    let block = round % BLOCKS;
                    if first {
                        device.invalidate(block).unwrap();
                        let enough = || disk.reads.load(Ordering::Relaxed) > 100;
                        over.store(!keep_running(until, enough), Ordering::Relaxed);
                    }
                    start.wait();
                    let last = over.load(Ordering::Relaxed);
                    version(&device.get(block).unwrap(), block);
                    if end.wait().is_leader() {
                        // Not asserted here: the others would wait for this thread.
                        let reads = disk.reads.load(Ordering::Relaxed);
                        most.fetch_max(reads - round, Ordering::Relaxed);
                    }
                    start.wait();
                    if last {
                        break;
                    }
                }
            });
        }
    });
    assert_eq!(most.into_inner(), 1, "a block was read again");
    assert!(disk.reads.load(Ordering::Relaxed) > 100, "too few rounds");
    println!("{}", cache.stats());
}
