//! A cache driven by bytes, beside a model of what it may answer: two devices, which change, fail in
//! every way and panic; guards, pins and buffers that are kept; a cache that is shrunk and resized.
//! One thread.
//!
//! What is evicted is the cache's business: the model asks `is_cached` and holds it to that.

mod disk;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bufcache::{AttachOptions, Cache, Device, Eviction, GetError, Pin, ReadGuard};

use disk::{BLOCKS, Disk, Fault, check, is_whole};

/// The number of blocks that fit into the cache.
const MOST: usize = 8;
const SIZE: usize = 512;

/// Something that keeps a buffer.
enum Kept<'d> {
    Guard(ReadGuard<'d>),
    Pin(Pin),
}

impl Deref for Kept<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Guard(guard) => guard,
            Self::Pin(pin) => pin,
        }
    }
}

/// What it says, for ever.
struct Holding<'d> {
    kept: Kept<'d>,
    block: u64,
    version: u8,
}

impl Holding<'_> {
    fn check(&self) {
        assert_eq!(check(&self.kept), (self.block as u8, self.version), "a kept buffer changed");
    }
}

/// What the cache counted, as it should.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    get: u64,
    misses: u64,
    busy: u64,
    reads: u64,
}

struct Machine<'d> {
    cache: &'d Cache,
    disks: &'d [(Arc<Disk>, Device); 2],
    /// What was read when it was read last, of blocks that may be cached.
    read: HashMap<(usize, u64), u8>,
    kept: Vec<Holding<'d>>,
    /// Buffers that may be in use.
    limit: usize,
    counts: Counts,
}

/// Drives a cache by `input` and returns how many steps it were.
///
/// # Panics
///
/// Panics if the cache does what it must not.
pub(crate) fn run(input: &[u8]) -> usize {
    let mut bytes = input.iter().copied();
    let eviction = match bytes.next() {
        Some(byte) if byte % 2 == 1 => Eviction::Clock,
        _ => Eviction::A2,
    };
    let cache = Cache::builder(MOST * SIZE)
        .block_size(SIZE)
        .eviction(eviction)
        .patience(Duration::from_micros(100))
        .build()
        .unwrap();
    let disks = [SIZE; 2].map(|size| {
        let disk = Arc::new(Disk::new(size));
        let options = AttachOptions::new().verify(|_, bytes| is_whole(bytes));
        let device = cache.attach_with(Arc::clone(&disk), options);
        (disk, device.unwrap())
    });
    let mut machine = Machine {
        cache: &cache,
        disks: &disks,
        read: HashMap::new(),
        kept: Vec::new(),
        limit: MOST,
        counts: Counts::default(),
    };
    let mut steps = 0;
    while let (Some(op), Some(arg)) = (bytes.next(), bytes.next()) {
        machine.step(op, arg);
        steps += 1;
    }
    machine.end();
    steps
}

impl<'d> Machine<'d> {
    fn step(&mut self, op: u8, arg: u8) {
        let (which, block) = (usize::from(arg & 1), u64::from(arg >> 1) % BLOCKS);
        match op % 16 {
            0..=3 => drop(self.get(which, block)),
            4 | 5 => {
                if let Some(holding) = self.get(which, block) {
                    self.keep(holding);
                }
            }
            6 => self.try_get(which, block),
            7 => self.let_go(arg),
            8 => self.pin(arg),
            9 => self.invalidate(which, block),
            10 => self.disks[which].0.change(block),
            11 => self.disks[which].0.arm(Fault::of(arg >> 1)),
            12 => self.shrink(usize::from(arg % 5)),
            13 => self.resize(usize::from(arg) % MOST + 1),
            _ => self.others(which, arg),
        }
    }

    fn device(&self, which: usize) -> &'d Device {
        &self.disks[which].1
    }

    fn keep(&mut self, holding: Holding<'d>) {
        if self.kept.len() < MOST + 2 {
            self.kept.push(holding);
        }
    }

    /// What a device that is not read says the block is.
    fn cached(&self, which: usize, block: u64) -> Option<u8> {
        let version = self.read.get(&(which, block)).copied();
        if self.device(which).is_cached(block) {
            Some(version.expect("what is cached was read, and not invalidated since"))
        } else {
            None
        }
    }

    /// Whether all chunks may be in use.
    fn may_be_full(&self) -> bool {
        self.kept.len() >= self.limit
    }

    /// Runs `f` until it has a buffer, or there may be none.
    fn patiently<T>(&self, mut f: impl FnMut() -> Result<T, GetError>) -> Result<T, GetError> {
        // It waits for a moment; a machine that has others to run may take that away.
        for _ in 0..5_000 {
            match f() {
                Err(GetError::NoFreeBuffers) if !self.may_be_full() => {}
                result => return result,
            }
        }
        panic!("{} are kept of {}, and none is free", self.kept.len(), self.limit);
    }

    fn get(&mut self, which: usize, block: u64) -> Option<Holding<'d>> {
        let (disk, device) = &self.disks[which];
        let mut gets = 0;
        let cached = self.cached(which, block);
        let result = self.patiently(|| {
            gets += 1;
            device.get(block)
        });
        self.counts.get += gets;
        if let (Some(version), Ok(guard)) = (cached, &result) {
            assert_eq!(check(guard), (block as u8, version), "a hit");
            let guard = result.ok()?;
            return Some(Holding { kept: Kept::Guard(guard), block, version });
        }
        assert_eq!(cached, None, "what is cached is had: {result:?}");
        if let Err(GetError::NoFreeBuffers) = result {
            return None;
        }
        self.counts.misses += 1;
        self.counts.reads += 1;
        let expected = disk.last_fault().error(block);
        assert_eq!(self.device(which).is_cached(block), expected.is_none());
        match (result, expected) {
            (Ok(guard), None) => {
                let version = disk.version(block);
                assert_eq!(check(&guard), (block as u8, version), "a miss");
                self.read.insert((which, block), version);
                Some(Holding { kept: Kept::Guard(guard), block, version })
            }
            (Err(error), Some(expected)) => {
                assert_eq!(error, expected);
                None
            }
            (result, expected) => panic!("{result:?} instead of {expected:?}"),
        }
    }

    fn try_get(&mut self, which: usize, block: u64) {
        self.counts.get += 1;
        match (self.cached(which, block), self.device(which).try_get(block)) {
            (Some(version), Ok(guard)) => assert_eq!(check(&guard), (block as u8, version)),
            (None, Err(GetError::WouldBlock)) => self.counts.busy += 1,
            (cached, result) => panic!("{result:?} of what is cached as {cached:?}"),
        }
    }

    fn let_go(&mut self, arg: u8) {
        if !self.kept.is_empty() {
            let holding = self.kept.swap_remove(usize::from(arg) % self.kept.len());
            holding.check();
        }
    }

    /// Of a guard, with or without the guard.
    fn pin(&mut self, arg: u8) {
        if self.kept.is_empty() {
            return;
        }
        let at = usize::from(arg >> 1) % self.kept.len();
        let Holding { kept: Kept::Guard(guard), block, version } = &self.kept[at] else { return };
        let pin = guard.pin().unwrap();
        let pinned = Holding { kept: Kept::Pin(pin), block: *block, version: *version };
        if arg & 1 == 0 {
            self.kept[at] = pinned;
        } else {
            self.keep(pinned);
        }
    }

    fn invalidate(&mut self, which: usize, block: u64) {
        let cached = self.cached(which, block).is_some();
        assert_eq!(self.device(which).invalidate(block), Ok(cached));
        assert!(!self.device(which).is_cached(block));
        self.read.remove(&(which, block));
    }

    fn shrink(&mut self, buffers: usize) {
        let before = self.cache.stats().bytes;
        let freed = self.cache.shrink(buffers);
        assert!(freed <= buffers, "{freed} of {buffers}");
        assert!(self.cache.stats().bytes <= before);
    }

    fn resize(&mut self, buffers: usize) {
        self.limit = buffers;
        let cache = self.cache;
        let result = self.patiently(|| cache.resize(buffers * SIZE));
        let stats = cache.stats();
        assert_eq!(stats.capacity, buffers * SIZE);
        match result {
            Ok(()) => assert!(stats.bytes <= stats.capacity, "{stats}"),
            Err(error) => assert!(error == GetError::NoFreeBuffers && self.may_be_full()),
        }
    }

    fn others(&mut self, which: usize, arg: u8) {
        match arg % 4 {
            0 => {
                let error = GetError::OutOfRange { block: BLOCKS, blocks: BLOCKS };
                let device = self.device(which);
                assert_eq!(device.get(BLOCKS).err(), Some(error));
                assert_eq!(device.invalidate(BLOCKS), Err(error));
                assert!(device.try_get(BLOCKS).is_err() && device.get(u64::MAX).is_err());
            }
            _ => self.look_around(),
        }
    }

    /// What is kept is what it was, and all is counted.
    fn look_around(&self) {
        self.kept.iter().for_each(Holding::check);
        let stats = self.cache.stats();
        let counts =
            Counts { get: stats.get, misses: stats.misses, busy: stats.busy, reads: stats.reads };
        assert_eq!(counts, self.counts);
        assert!(stats.waited == 0 && stats.evictions <= stats.misses);
    }

    /// When all is let go, every buffer is of use again.
    fn end(mut self) {
        self.look_around();
        self.kept.clear();
        self.resize(MOST);
        self.disks.iter().for_each(|(disk, _)| disk.arm(Fault::None));
        let gets: Vec<_> = (0..MOST as u64).map(|block| self.get(1, block).unwrap()).collect();
        gets.iter().for_each(Holding::check);
        drop(gets);
        self.look_around();
    }
}
