//! Threads that write, read, discard and sync blocks of two devices in a cache that is too small for
//! them, over devices that fail: a reader of a block sees one version of it, none older than the
//! last whose guard had dropped before, and the devices have the last of each in the end.
//!
//! Ignored by default: `OFFLOCK_STRESS_SECONDS` (3) says how long each test runs.
#![cfg(not(offlock_model))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use bufcache::{
    AttachOptions, BlockDevice, Cache, CacheStats, Device, Eviction, GetError, MemoryDevice,
    WriteError,
};
use bufcache_test::{Fault, FaultDevice, Operation};

use testkit::rng::{self, Rng};
use testkit::stress::stress_time;

const THREADS: u64 = 4;
/// Blocks of a device: as many of each thread's.
const BLOCKS: u64 = 16 * THREADS;
const SIZE: usize = 512;
/// Blocks of the largest size that the cache has room for.
const ROOM: usize = 8;

/// What a block is full of, in words of eight bytes; version 0 and what is discarded is zeros.
fn word(block: u64, version: u64, zeros: bool) -> u64 {
    if zeros || version == 0 { 0 } else { block << 48 | version }
}

struct Disk {
    size: usize,
    device: Arc<FaultDevice<MemoryDevice>>,
    /// Closed and attached anew now and then.
    handle: RwLock<Device>,
    /// Of each block: the version that was begun last, and the last whose guard dropped.
    begun: Vec<AtomicU64>,
    settled: Vec<AtomicU64>,
    /// The last version that was zeros, or may be.
    zeros: Vec<AtomicU64>,
}

struct Storm {
    cache: Cache,
    disks: Vec<Disk>,
    writes: AtomicU64,
    reads: AtomicU64,
    over: AtomicBool,
}

fn attach(cache: &Cache, device: &Arc<FaultDevice<MemoryDevice>>) -> Device {
    // It is closed before it is let go of, unless a test has failed.
    let options = AttachOptions::new().on_loss(|error| println!("lost: {error}"));
    cache.attach_with(Arc::clone(device), options).unwrap()
}

/// A write that failed, told late or now; what it is about is dirty still.
fn is_injected(error: WriteError) -> bool {
    matches!(
        error,
        WriteError::Io { errno: libc::EIO | libc::ENOSPC, .. }
            | WriteError::Earlier { .. }
            | WriteError::Panicked { .. }
            | WriteError::Busy { .. }
            | WriteError::Poisoned { .. }
            | WriteError::Get(_)
    )
}

impl Storm {
    fn new(eviction: Eviction) -> Self {
        let builder = Cache::builder(ROOM * SIZE).block_size(SIZE);
        let builder = builder.write_back_after(Duration::from_millis(20)).eviction(eviction);
        let cache = builder.patience(Duration::from_millis(5)).build().unwrap();
        let zeros = || (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let disk = |size: usize| {
            let inner = MemoryDevice::new(vec![0; size * BLOCKS as usize]);
            let device = Arc::new(FaultDevice::new(inner));
            let handle = RwLock::new(attach(&cache, &device));
            Disk { size, device, handle, begun: zeros(), settled: zeros(), zeros: zeros() }
        };
        let disks = [SIZE; 2].map(disk).into();
        let [writes, reads] = [0, 0].map(AtomicU64::new);
        Self { cache, disks, writes, reads, over: AtomicBool::new(false) }
    }

    /// One of the thread's own blocks, which no other thread writes.
    fn write(&self, disk: &Disk, device: &Device, block: u64, rng: &mut Rng) {
        let guard = match rng.u64(..3) {
            0 => device.create(block),
            1 => device.try_get_mut(block),
            _ => device.get_mut(block),
        };
        let mut guard = match guard {
            Ok(guard) => guard,
            // The device has refused the last write, and gets no more dirty buffers.
            Err(GetError::Io { errno: libc::EIO | libc::ENOSPC, .. }) => return,
            Err(error) => return assert_refused(error),
        };
        let at = block as usize;
        let version = disk.begun[at].load(Ordering::Relaxed) + 1;
        disk.begun[at].store(version, Ordering::Release);
        let word = word(block, version, false).to_ne_bytes();
        for (at, bytes) in guard.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&word);
            if at == 8 && rng.u64(..8) == 0 {
                thread::yield_now();
            }
        }
        drop(guard);
        disk.settled[at].store(version, Ordering::Release);
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// The thread's own blocks: they are zeros then, or what they were where the device fails.
    fn wipe(&self, disk: &Disk, device: &Device, first: u64, rng: &mut Rng) {
        let blocks = first..first + 1 + rng.u64(..3).min(first / 16 * 16 + 15 - first);
        let versions: Vec<_> = blocks
            .clone()
            .map(|block| {
                let at = block as usize;
                let version = disk.begun[at].load(Ordering::Relaxed) + 1;
                disk.zeros[at].store(version, Ordering::Release);
                disk.begun[at].store(version, Ordering::Release);
                (at, version)
            })
            .collect();
        let wiped = match rng.u64(..2) {
            0 => device.discard(blocks),
            _ => device.zero(blocks),
        };
        match wiped {
            Ok(()) => versions.iter().for_each(|&(at, version)| {
                disk.settled[at].store(version, Ordering::Release);
            }),
            Err(error) => assert!(is_injected(error), "{error:?}"),
        }
    }

    fn look(&self, disk: &Disk, block: u64, bytes: &[u8], oldest: u64, when: &str) {
        let words: Vec<_> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        let first = words[0];
        let torn = words.iter().position(|word| *word != first);
        assert!(
            torn.is_none(),
            "block {block} of {} is torn {when}: {first:#x}, {:#x} at {torn:?}; settled {oldest}",
            disk.size,
            words[torn.unwrap_or(0)],
        );
        let at = block as usize;
        if first == 0 {
            // Before anything was written, or as it was discarded, at the oldest version or since.
            let zeros = disk.zeros[at].load(Ordering::Acquire);
            assert!(oldest == 0 || zeros >= oldest, "block {block} is zeros, not {oldest}");
            return;
        }
        let version = first & ((1 << 48) - 1);
        let newest = disk.begun[at].load(Ordering::Acquire);
        assert_eq!(first >> 48, block, "another block's bytes");
        // A wipe that failed has a number, and leaves what was there.
        let fits = version >= oldest && version <= newest;
        assert!(fits, "block {block} of {}: {version}, not {oldest} to {newest}", disk.size);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self, disk: &Disk, device: &Device, block: u64, rng: &mut Rng) {
        let oldest = disk.settled[block as usize].load(Ordering::Acquire);
        let guard = match rng.u64(..4) {
            0 => device.try_get(block),
            _ => device.get(block),
        };
        let guard = match guard {
            Ok(guard) => guard,
            Err(error) => return assert_refused(error),
        };
        self.look(disk, block, &guard, oldest, "in a guard");
        if rng.u64(..8) == 0 {
            let pin = guard.pin().unwrap();
            drop(guard);
            thread::yield_now();
            self.look(disk, block, &pin, oldest, "in a pin");
        }
    }

    fn step(&self, thread: u64, rng: &mut Rng) {
        let disk = &self.disks[rng.u64(..2) as usize];
        let device = disk.handle.read().unwrap();
        let own = thread * 16 + rng.u64(..16);
        match rng.u64(..256) {
            0..100 => self.write(disk, &device, own, rng),
            100..220 => self.read(disk, &device, rng.u64(..BLOCKS), rng),
            220..230 => self.wipe(disk, &device, own, rng),
            230..236 => told(device.sync()),
            236..240 => told(device.flush()),
            240..244 => told(device.write_through(own..own + 1)),
            244 => drop(self.cache.shrink(rng.u64(..8) as usize)),
            245 => match self.cache.resize(SIZE * (3 + rng.u64(..ROOM as u64 - 2) as usize)) {
                Ok(()) | Err(GetError::NoFreeBuffers) => {}
                Err(error) => panic!("{error}"),
            },
            246..249 => device.readahead(own..own + 4),
            249 => {
                // What is claimed is read as it is on the device.
                if let Ok(Some(mut load)) = device.claim(own) {
                    let read = disk.device.inner().read(load.offset(), &mut load);
                    load.finish(read);
                }
            }
            250..253 => {
                let fault = match rng.u64(..3) {
                    0 => Fault::Error(libc::EIO),
                    1 => Fault::Short(100),
                    _ => Fault::Torn(rng.u64(..1 << 20)),
                };
                disk.device.heal();
                disk.device.inject_next(Operation::Write, fault);
            }
            253 => disk.device.inject_next(Operation::Discard, Fault::Error(libc::EIO)),
            // What was to be durable and failed has poisoned it. Blocks that may be lost are not:
            // the device has all it was given.
            254 => match device.reset() {
                Ok(_) => {}
                Err(error) => assert!(is_injected(error), "{error:?}"),
            },
            _ => {
                drop(device);
                self.reopen(disk);
            }
        }
    }

    /// Closes it, which makes it durable or leaves it open.
    fn reopen(&self, disk: &Disk) {
        let mut handle = disk.handle.write().unwrap();
        match handle.clone().close() {
            Ok(()) => {
                self.check_device(disk); // no thread writes now
                *handle = attach(&self.cache, &disk.device);
            }
            Err(error) => assert!(is_injected(error.error), "{error:?}"),
        }
    }

    /// The device has the last version of each block.
    fn check_device(&self, disk: &Disk) {
        let mut bytes = vec![0; disk.size];
        for block in 0..BLOCKS {
            disk.device.inner().read(block * disk.size as u64, &mut bytes).unwrap();
            let oldest = disk.settled[block as usize].load(Ordering::Acquire);
            self.look(disk, block, &bytes, oldest, "on the device");
        }
    }

    /// The numbers of writes and of reads.
    fn calls(&self) -> [u64; 2] {
        [&self.writes, &self.reads].map(|of| of.load(Ordering::Relaxed))
    }

    fn rage(&self, until: Instant) {
        thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || {
                    let mut rng = rng::seeded(thread + 1);
                    while !self.over.load(Ordering::Relaxed) {
                        self.step(thread, &mut rng);
                    }
                });
            }
            // Until it was one, on a machine that has others to run.
            let enough = |stats: &CacheStats| {
                let [writes, reads] = self.calls();
                stats.evictions > 500 && stats.written > 500 && writes > 1000 && reads > 1000
            };
            while Instant::now() < until
                || (!enough(&self.cache.stats())
                    && Instant::now() < until + Duration::from_secs(60))
            {
                thread::sleep(Duration::from_millis(10));
            }
            self.over.store(true, Ordering::Relaxed);
        });
    }

    fn end(self) {
        for disk in &self.disks {
            disk.device.heal();
            let device = disk.handle.read().unwrap().clone();
            let _ = device.reset().unwrap();
            let _ = device.sync(); // what it was not told of yet
            device.sync().unwrap();
            self.check_device(disk);
            assert_eq!(device.reset().unwrap().blocks(), []);
        }
        let stats = self.cache.stats();
        let [writes, reads] = self.calls();
        println!("{writes} writes, {reads} reads; {stats}");
        assert_eq!(stats.dirty, 0);
        assert!(writes > 1000 && reads > 1000, "a storm in a teacup: {writes}, {reads}, {stats}");
    }
}

fn told(result: Result<(), WriteError>) {
    if let Err(error) = result {
        assert!(is_injected(error), "{error:?}");
    }
}

fn assert_refused(error: GetError) {
    let refused = matches!(
        error,
        GetError::NoFreeBuffers | GetError::Busy | GetError::WouldBlock | GetError::Poisoned { .. }
    );
    assert!(refused, "{error:?}");
}

fn storm(eviction: Eviction) {
    let storm = Storm::new(eviction);
    storm.rage(Instant::now() + stress_time(3));
    storm.end();
}

#[test]
#[ignore = "stress"]
fn stress_inv17_writers_of_two_devices_lose_nothing() {
    storm(Eviction::A2);
}

#[test]
#[ignore = "stress"]
fn stress_inv17_writers_of_two_devices_lose_nothing_by_the_clock() {
    storm(Eviction::Clock);
}
