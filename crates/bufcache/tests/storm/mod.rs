//! Threads that write, read, discard, sync and reset blocks of devices that fail, in a cache that is too small for
//! them: what a reader sees, what the devices have, and what must be there after a loss of power.
//!
//! Each sector that is written says which version of which block it is; versions of a block only grow. A reader
//! sees one version of a block, none older than the last whose guard had dropped before. What a sync has returned
//! for must be there in any image of a later moment: that version, or a later one, sector by sector.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

use bufcache::{
    AttachOptions, BlockDevice, Cache, Device, Eviction, GetError, MemoryDevice, Pin, WriteError,
};
use bufcache_test::{Fault, FaultDevice, Operation};
use offlock_sync::{Mutex, MutexGuard};
use testkit::rng::Rng;
use testkit::wait::wait_for;

const SECTOR: usize = 512;
/// Kinds of [steps](World::step).
pub(crate) const KINDS: u64 = 64;

/// The devices, the cache and the faults of a storm.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) devices: usize,
    /// Blocks of a device, and bytes of a block.
    pub(crate) blocks: u64,
    pub(crate) size: usize,
    /// Blocks that fit into the cache.
    pub(crate) buffers: usize,
    pub(crate) eviction: Eviction,
    /// The devices record what a loss of power leaves.
    pub(crate) records: bool,
    /// Operations fail, and a failed write may have changed a part of its block.
    pub(crate) fails: bool,
}

impl Default for Shape {
    /// Two sectors are a block, so that it can be torn.
    fn default() -> Self {
        let (blocks, size, buffers) = (24, 2 * SECTOR, 12);
        let eviction = Eviction::Adaptive;
        Self { devices: 1, blocks, size, buffers, eviction, records: true, fails: true }
    }
}

/// The versions of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// The last that was begun.
    begun: u64,
    /// The last that was zeros, or may be.
    zeros: u64,
    /// The last that is over: what a reader sees at least.
    over: u64,
    /// What the next sync makes durable, and what one has.
    settled: u64,
    promised: u64,
    /// How often a reset has reported the block as lost.
    lost: u64,
}

/// A version that is being written, and how often its block had been lost when it was begun.
#[derive(Clone, Copy)]
struct Version {
    block: u64,
    number: u64,
    lost: u64,
}

/// A device and the versions of its blocks.
struct Disk {
    device: Arc<FaultDevice<MemoryDevice>>,
    /// Closed and attached anew now and then.
    handle: RwLock<Device>,
    blocks: Vec<Mutex<Block>>,
    /// What must be there from a moment on.
    promises: Mutex<Vec<(u64, BTreeMap<u64, u64>)>>,
    /// Locked for writing from a reset until its result is in `blocks`.
    resets: RwLock<()>,
    /// Locked while a fault is injected.
    faults: Mutex<()>,
}

/// A pin of a block, and the first eight bytes that it shows for ever.
struct Held {
    pin: Pin,
    which: usize,
    block: u64,
    first: [u8; 8],
}

/// A cache, its devices, and what is known of them.
pub(crate) struct World {
    cache: Cache,
    shape: Shape,
    disks: Vec<Disk>,
    /// Pins that any thread drops.
    shelf: Mutex<Vec<Held>>,
    writes: AtomicU64,
    reads: AtomicU64,
}

/// The bytes of a version of a block; version 0 is that of the device at its begin.
fn stamp(block: u64, version: u64, size: usize) -> Vec<u8> {
    (block << 48 | version << 1 | 1).to_le_bytes().repeat(size / 8)
}

fn attach(cache: &Cache, device: &Arc<FaultDevice<MemoryDevice>>) -> Device {
    // It is closed before it is let go of, unless a test has failed.
    let options = AttachOptions::new().on_loss(|error| println!("lost: {error}"));
    cache.attach_with(Arc::clone(device), options).unwrap()
}

/// A write that failed, told late or now, or a block that is in use. What it is about is dirty still.
fn told(result: Result<(), WriteError>) -> bool {
    use WriteError::{Busy, Earlier, Get, Io, Poisoned};
    match result {
        Ok(()) => true,
        Err(Io { errno: libc::EIO | libc::ENOSPC, .. }) => false,
        Err(Earlier { .. } | Busy { .. } | Poisoned { .. } | Get(_)) => false,
        Err(error) => panic!("{error:?}"),
    }
}

/// The buffer, unless there is none, it is in use, or the device fails.
fn had<T>(result: Result<T, GetError>) -> Option<T> {
    use GetError::{Busy, Io, NoFreeBuffers, Poisoned, WouldBlock};
    match result {
        Ok(buffer) => Some(buffer),
        Err(NoFreeBuffers | Busy | WouldBlock | Poisoned { .. }) => None,
        Err(Io { errno: libc::EIO | libc::ENOSPC, .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

impl Disk {
    fn block(&self, block: u64) -> MutexGuard<'_, Block> {
        self.blocks[block as usize].lock()
    }

    fn begin(&self, block: u64, zeros: bool) -> Version {
        let mut of = self.block(block);
        of.begun += 1;
        if zeros {
            of.zeros = of.begun;
        }
        Version { block, number: of.begun, lost: of.lost }
    }

    /// The version is over. What was reported as lost since it was begun is not settled.
    fn settle(&self, Version { block, number, lost }: Version) {
        let mut of = self.block(block);
        of.over = number;
        if of.lost == lost {
            of.settled = number;
        }
    }

    /// Runs what makes blocks durable. Where it does, what was settled before it began must survive, but for what
    /// a reset has reported as lost meanwhile.
    fn makes_durable(&self, blocks: impl Iterator<Item = u64>, run: impl FnOnce() -> bool) -> bool {
        let before: Vec<_> = {
            let _no_reset = self.resets.read().unwrap();
            blocks.map(|block| (block, *self.block(block))).collect()
        };
        if !run() {
            return false;
        }
        let now = self.device.moments();
        let _no_reset = self.resets.read().unwrap();
        let promised = before.into_iter().filter_map(|(block, before)| {
            let mut of = self.block(block);
            let is_lost = of.lost != before.lost;
            (!is_lost).then(|| {
                of.promised = of.promised.max(before.settled);
                (block, before.settled)
            })
        });
        let promised = promised.collect();
        if now > 0 {
            self.promises.lock().push((now, promised));
        }
        true
    }

    /// After a sync that failed. Nothing that was promised before is taken back; of the blocks that are reported
    /// as lost nothing else is.
    fn reset(&self, device: &Device) {
        self.device.heal();
        let _alone = self.resets.write().unwrap();
        let Ok(lost) = device.reset().map_err(|error| told(Err(error))) else { return };
        for block in lost.blocks().iter().cloned().flatten() {
            let mut of = self.block(block);
            of.settled = of.promised;
            of.lost += 1;
        }
    }

    /// Returns the version of sectors of a block, which must be that version or a later one than `least`.
    fn version(&self, block: u64, bytes: &[u8], least: u64, when: &str) -> u64 {
        let mut words =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let first = words.next().unwrap();
        let torn = words.position(|word| word != first);
        assert!(torn.is_none(), "block {block} is torn {when}, behind word {torn:?}");
        let of = *self.block(block);
        if first == 0 {
            assert!(of.zeros >= least.max(1), "block {block} {when}: zeros, {least} was promised");
            return of.zeros;
        }
        assert_eq!(first >> 48, block, "another block's bytes {when}");
        let version = first << 16 >> 17;
        // A wipe that failed has a number, and leaves what was there.
        let fits = (least..=of.begun).contains(&version);
        assert!(fits, "block {block} {when}: version {version}, {least} was promised of {of:?}");
        version
    }
}

#[allow(dead_code, reason = "not every test program uses all of it")]
impl World {
    pub(crate) fn new(shape: Shape) -> Self {
        let Shape { size, buffers, blocks, .. } = shape;
        let builder = Cache::builder(buffers * size).block_size(size).eviction(shape.eviction);
        let builder = builder.write_back_after(Duration::from_millis(20)).dirty_limits(100, 100);
        let cache = builder.patience(Duration::from_millis(5)).build().unwrap();
        let disk = |_| {
            let bytes = (0..blocks).flat_map(|block| stamp(block, 0, size)).collect();
            let device = Arc::new(FaultDevice::new(MemoryDevice::new(bytes)));
            if shape.records {
                device.record().unwrap();
            }
            let handle = RwLock::new(attach(&cache, &device));
            let blocks = (0..blocks).map(|_| Mutex::default()).collect();
            let (promises, resets, faults) = Default::default();
            Disk { device, handle, blocks, promises, resets, faults }
        };
        let disks = (0..shape.devices).map(disk).collect();
        let (shelf, [writes, reads]) = (Mutex::default(), [0, 0].map(AtomicU64::new));
        Self { cache, shape, disks, shelf, writes, reads }
    }

    /// Makes one operation of that kind. Only the calling thread writes to `blocks`.
    pub(crate) fn step(&self, kind: u64, which: usize, blocks: Range<u64>, rng: &mut Rng) {
        let disk = &self.disks[which];
        let device = disk.handle.read().unwrap();
        let own = rng.u64(blocks.clone());
        let any = rng.u64(..self.shape.blocks) & rng.u64(..self.shape.blocks);
        match kind % KINDS {
            0..22 => self.write(disk, &device, own, rng),
            22..43 => self.read(which, &device, any, rng),
            // A write that fails in part leaves a torn block on the device.
            43 if !self.shape.fails => self.read_past(disk, &device, any),
            44..46 => {
                let few = own..(own + 1 + rng.u64(..3)).min(blocks.end);
                self.wipe(disk, &device, few, rng);
            }
            46 => self.write_past(disk, &device, own, rng),
            47 => self.change_beside(disk, &device, own),
            48..51 => self.sync(disk, &device),
            51 => _ = told(device.flush()),
            52..54 => {
                let through = || told(device.write_through(own..own + 1));
                disk.makes_durable([own].into_iter(), through);
            }
            54 => _ = self.cache.shrink(rng.usize(..8)),
            55..57 => device.readahead(any..any + 4),
            57 => {
                // What is claimed is read as it is on the device.
                if let Some(Some(mut load)) = had(device.claim(any)) {
                    let read = disk.device.read(load.offset(), &mut load);
                    load.finish(read);
                }
            }
            58 => {
                let kept = rng.usize(..3);
                let taken: Vec<_> = self.shelf.lock().drain(..).skip(kept).collect();
                taken.into_iter().for_each(|held| self.check_held(held));
            }
            59..62 if self.shape.fails => self.fail(disk, rng),
            62 => disk.reset(&device),
            63 => {
                drop(device);
                self.reopen(disk);
            }
            _ => {}
        }
    }

    fn fail(&self, disk: &Disk, rng: &mut Rng) {
        let (operation, fault) = match rng.u64(..8) {
            0 => (Operation::Sync, Fault::Error(libc::EIO)),
            1 => (Operation::Discard, Fault::Error(libc::EIO)),
            2 => (Operation::Read, Fault::Error(libc::EIO)),
            3 => (Operation::Read, Fault::Delay(Duration::from_micros(200))),
            4 => (Operation::Write, Fault::Error(libc::EIO)),
            5 => (Operation::Write, Fault::Error(libc::ENOSPC)),
            6 => (Operation::Write, Fault::Short(100)),
            _ => (Operation::Write, Fault::Torn(rng.u64(..1 << 20))),
        };
        let _alone = disk.faults.lock();
        disk.device.heal();
        disk.device.inject_next(operation, fault);
    }

    /// A new version of the block, read before or not.
    fn write(&self, disk: &Disk, device: &Device, block: u64, rng: &mut Rng) {
        let guard = match rng.u64(..4) {
            0 => device.create(block),
            1 => device.try_create(block),
            2 => device.try_get_mut(block),
            _ => device.get_mut(block),
        };
        let Some(mut guard) = had(guard) else { return };
        let version = disk.begin(block, false);
        let bytes = stamp(block, version.number, self.shape.size);
        let (first, rest) = bytes.split_at(64);
        guard[..64].copy_from_slice(first);
        if rng.u64(..8) == 0 {
            thread::yield_now();
        }
        guard[64..].copy_from_slice(rest);
        drop(guard);
        disk.settle(version);
        self.writes.fetch_add(1, Relaxed);
    }

    fn read(&self, which: usize, device: &Device, block: u64, rng: &mut Rng) {
        let disk = &self.disks[which];
        let least = disk.block(block).over;
        let guard = if rng.u64(..4) == 0 { device.try_get(block) } else { device.get(block) };
        let Some(guard) = had(guard) else { return };
        let version = disk.version(block, &guard, least, "in a guard");
        self.reads.fetch_add(1, Relaxed);
        match rng.u64(..16) {
            0 => {
                let pin = guard.pin().unwrap();
                drop(guard);
                let first = *pin.first_chunk().unwrap();
                self.shelf.lock().push(Held { pin, which, block, first });
            }
            1 => {
                // More than a record has slots for.
                let held: Vec<_> = (0..12).filter_map(|_| had(device.try_get(block))).collect();
                held.iter().for_each(|held| _ = disk.version(block, held, least, "in a guard"));
            }
            2 => {
                thread::yield_now();
                let again = disk.version(block, &guard, least, "in a guard");
                assert!(again >= version, "a guard");
            }
            _ => {}
        }
    }

    /// Reads the device itself, unless the cache has newer bytes.
    fn read_past(&self, disk: &Disk, device: &Device, block: u64) {
        let least = disk.block(block).over;
        if !device.is_newer(block..block + 1) || told(device.flush_range(block..block + 1)) {
            let mut bytes = vec![0; self.shape.size];
            disk.device.inner().read(block * self.shape.size as u64, &mut bytes).unwrap();
            disk.version(block, &bytes, least, "past the cache");
        }
    }

    /// A pin shows what it has shown, whatever has become of its block.
    fn check_held(&self, Held { pin, which, block, first }: Held) {
        self.disks[which].version(block, &pin, 0, "in a pin");
        assert_eq!(pin[..8], first, "a pin of block {block}");
    }

    /// Zeros, or what was there where the device fails.
    fn wipe(&self, disk: &Disk, device: &Device, blocks: Range<u64>, rng: &mut Rng) {
        let versions: Vec<_> = blocks.clone().map(|block| disk.begin(block, true)).collect();
        let wiped = match rng.u64(..2) {
            0 => device.discard(blocks),
            _ => device.zero(blocks),
        };
        if told(wiped) {
            versions.into_iter().for_each(|version| disk.settle(version));
        }
    }

    /// A write past the cache that fails changes nothing here: a torn one would leave a torn block.
    fn write_past(&self, disk: &Disk, device: &Device, block: u64, rng: &mut Rng) {
        let _no_other_fault = disk.faults.lock();
        disk.device.heal();
        if self.shape.fails && rng.u64(..4) == 0 {
            disk.device.inject_next(Operation::Write, Fault::Error(libc::EIO));
        }
        let version = disk.begin(block, false);
        if told(device.write_around(block, &stamp(block, version.number, self.shape.size))) {
            disk.settle(version);
        }
    }

    /// Changes a block of the device that is not dirty, and forgets the one of the cache.
    fn change_beside(&self, disk: &Disk, device: &Device, block: u64) {
        // A reset would write what the cache has.
        let _no_reset = disk.resets.read().unwrap();
        if !told(device.flush_range(block..block + 1)) {
            return;
        }
        let version = disk.begin(block, false);
        let bytes = stamp(block, version.number, self.shape.size);
        disk.device.inner().write(block * self.shape.size as u64, &bytes).unwrap();
        while had(device.invalidate(block)).is_none() {} // a writer, or the end of a load
        disk.block(block).over = version.number;
    }

    fn sync(&self, disk: &Disk, device: &Device) {
        let all = 0..self.shape.blocks;
        disk.makes_durable(all, || match device.sync() {
            Err(WriteError::Earlier { .. }) => true,
            result => told(result),
        });
    }

    /// Counts a flush as a sync: the checks must find that its blocks are not durable.
    pub(crate) fn take_a_flush_for_a_sync(&self) {
        let disk = &self.disks[0];
        let flush = || disk.handle.read().unwrap().flush().is_ok();
        assert!(disk.makes_durable(0..self.shape.blocks, flush));
    }

    /// Closes the device, which makes it durable or leaves it open.
    fn reopen(&self, disk: &Disk) {
        let mut handle = disk.handle.write().unwrap();
        let close = || told(handle.close());
        if disk.makes_durable(0..self.shape.blocks, close) {
            self.check_device(disk); // no thread writes now
            *handle = attach(&self.cache, &disk.device);
        }
    }

    /// The device has the last version of each block.
    fn check_device(&self, disk: &Disk) {
        let mut bytes = vec![0; self.shape.size];
        for block in 0..self.shape.blocks {
            disk.device.inner().read(block * self.shape.size as u64, &mut bytes).unwrap();
            let least = disk.block(block).over;
            disk.version(block, &bytes, least, "on the device");
        }
    }

    /// The numbers of writes, of reads, and of evictions.
    pub(crate) fn done(&self) -> [u64; 3] {
        [self.writes.load(Relaxed), self.reads.load(Relaxed), self.cache.stats().evictions]
    }

    /// Runs `threads` threads of so many steps, or until `is_over` returns true.
    pub(crate) fn rage(
        &self,
        threads: u64,
        seed: u64,
        steps: u64,
        is_over: impl Fn() -> bool + Sync,
    ) {
        let (is_over, share) = (&is_over, self.shape.blocks / threads);
        thread::scope(|scope| {
            for number in 0..threads {
                scope.spawn(move || {
                    let mut rng = testkit::rng::seeded(seed * 1000 + number);
                    for _ in (0..steps).take_while(|_| !is_over()) {
                        let which = rng.usize(..self.shape.devices);
                        let own = number * share..(number + 1) * share;
                        self.step(rng.u64(..KINDS), which, own, &mut rng);
                    }
                });
            }
        });
    }

    /// Nothing is wrong any more: all that was written is on the devices, and each buffer is of use again.
    pub(crate) fn calm(&self) {
        self.shelf.lock().drain(..).for_each(|held| self.check_held(held));
        for disk in &self.disks {
            let device = disk.handle.read().unwrap();
            // The cleaner may have a block marked for longer than the cache waits.
            wait_for("a reset and a sync", || {
                disk.reset(&device);
                disk.makes_durable(0..self.shape.blocks, || told(device.sync()))
                    && device.reset().is_ok_and(|lost| lost.is_empty())
            });
            self.check_device(disk);
        }
        assert_eq!(self.cache.stats().dirty, 0);
        let reads = |disk: &Disk| disk.device.count(Operation::Read);
        wait_for("the end of what is read ahead", || {
            self.cache.stats().reads == self.disks.iter().map(reads).sum::<u64>()
        });
        let device = self.disks[0].handle.read().unwrap();
        let mut held = Vec::new();
        for block in 0..(self.shape.buffers as u64).min(self.shape.blocks) {
            wait_for("a buffer for each block", || {
                held.extend(had(device.get(block)));
                held.len() as u64 > block
            });
        }
    }

    /// Looks at the images of so many moments of the first device, as many of each, and of the last one.
    pub(crate) fn check(&self, moments: usize, images: usize, rng: &mut Rng) {
        let last = self.disks[0].device.moments();
        for round in 0..moments {
            let moment = if round == 0 { last } else { rng.u64(..=last) };
            self.check_moment(moment, images, rng);
        }
    }

    /// Looks at the images of every moment.
    pub(crate) fn check_all(&self, images: usize, rng: &mut Rng) {
        let last = self.disks[0].device.moments();
        (0..=last).for_each(|moment| self.check_moment(moment, images, rng));
    }

    /// The image with the least that may be there, that with the most, and others at random.
    fn check_moment(&self, moment: u64, images: usize, rng: &mut Rng) {
        let disk = &self.disks[0];
        let mut least = BTreeMap::new();
        let promises = disk.promises.lock();
        for (_, promised) in promises.iter().filter(|(since, _)| *since <= moment) {
            for (&block, &version) in promised {
                let least = least.entry(block).or_insert(0);
                *least = version.max(*least);
            }
        }
        for image in 0..images {
            let bytes = disk.device.after_power_cut(moment, |_, versions| match image {
                0 => 0,
                1 => versions,
                _ => rng.usize(..versions),
            });
            for (block, bytes) in (0..).zip(bytes.unwrap().chunks(self.shape.size)) {
                let least = least.get(&block).copied().unwrap_or(0);
                for sector in bytes.chunks(SECTOR) {
                    disk.version(block, sector, least, "after a power cut");
                }
            }
        }
    }
}
