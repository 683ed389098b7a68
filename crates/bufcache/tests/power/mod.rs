//! Threads that write blocks, and what must be there after a loss of power.
//!
//! Each sector that is written says which version of which block it is; versions of a block only
//! grow. What a sync has returned for must be there in any image of a later moment: that version, or
//! a later one, sector by sector.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::RwLock;

use bufcache::{AttachOptions, Cache, Device, MemoryDevice};
use bufcache_test::{Fault, FaultDevice, Operation};
use offlock_sync::{Arc, Mutex};

/// Two sectors, so that a block can be torn.
pub(crate) const SIZE: usize = 1024;
const SECTOR: usize = 512;

pub(crate) type Disk = std::sync::Arc<FaultDevice<MemoryDevice>>;

/// What was put into a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Stamped,
    Zeros,
}

#[derive(Default)]
struct History {
    /// Of each block: its versions, and what they are. The first is that of the device.
    versions: BTreeMap<u64, Vec<Content>>,
    /// Of each block: the last version whose guard was dropped.
    settled: BTreeMap<u64, usize>,
    /// What must be there from a moment on.
    promised: Vec<(u64, BTreeMap<u64, usize>)>,
    /// Of each block: how often a reset has reported it as lost.
    lost: BTreeMap<u64, u64>,
}

/// A version that is being written, and how often the block had been lost when it was begun.
#[derive(Clone, Copy)]
struct Version {
    block: u64,
    number: usize,
    lost: Option<u64>,
}

/// What was settled at a time, and what had been lost until then.
struct Settled {
    versions: BTreeMap<u64, usize>,
    lost: BTreeMap<u64, u64>,
}

/// A cache over a device that records, and what was promised of it.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) device: Device,
    pub(crate) disk: Disk,
    history: Arc<Mutex<History>>,
    /// Locked for writing from a reset until its result is in the history.
    resets: Arc<RwLock<()>>,
}

fn stamp(block: u64, version: usize) -> [u8; SECTOR] {
    let mut sector = [0xa5; SECTOR];
    sector[..8].copy_from_slice(&block.to_le_bytes());
    sector[8..16].copy_from_slice(&(version as u64).to_le_bytes());
    sector
}

impl World {
    /// So many blocks on the device, and buffers for so many.
    pub(crate) fn new(blocks: u64, buffers: usize) -> Self {
        let builder = Cache::builder(buffers * SIZE).block_size(SIZE);
        let patience = std::time::Duration::from_secs(10);
        let builder = builder.dirty_limits(100, 100).patience(patience);
        let cache = builder.build().unwrap();
        let whole = (0..blocks).flat_map(|block| stamp(block, 0).repeat(SIZE / SECTOR)).collect();
        let disk = std::sync::Arc::new(FaultDevice::new(MemoryDevice::new(whole)));
        disk.record().unwrap();
        let options = AttachOptions::new().on_loss(|_| {});
        let device = cache.attach_with(std::sync::Arc::clone(&disk), options).unwrap();
        let mut history = History::default();
        for block in 0..blocks {
            history.versions.insert(block, vec![Content::Stamped]);
            history.settled.insert(block, 0);
        }
        Self { device, disk, history: Arc::new(Mutex::new(history)), resets: Arc::default() }
    }

    fn begin(&self, block: u64, content: Content) -> Version {
        let mut history = self.history.lock();
        let lost = history.lost.get(&block).copied();
        let versions = history.versions.get_mut(&block).unwrap();
        versions.push(content);
        Version { block, number: versions.len() - 1, lost }
    }

    /// What was reported as lost since it was begun is not settled.
    fn settle(&self, Version { block, number, lost }: Version) {
        let mut history = self.history.lock();
        if history.lost.get(&block).copied() == lost {
            let settled = history.settled.get_mut(&block).unwrap();
            *settled = number.max(*settled);
        }
    }

    /// A new version of a block, read before or not. Whether it could be had.
    pub(crate) fn write(&self, block: u64, whole: bool) -> bool {
        let guard = if whole { self.device.create(block) } else { self.device.get_mut(block) };
        let Ok(mut guard) = guard else { return false };
        let version = self.begin(block, Content::Stamped);
        for sector in guard.chunks_mut(SECTOR) {
            sector.copy_from_slice(&stamp(block, version.number));
        }
        drop(guard);
        self.settle(version);
        true
    }

    /// Whatever is read is the latest that was written, or one that is being written.
    pub(crate) fn read(&self, block: u64) {
        let before = self.history.lock().settled[&block];
        let Ok(guard) = self.device.get(block) else { return };
        self.fits(block, &guard, before, "read");
    }

    /// Discards blocks, or writes them past the cache. No other thread may write these meanwhile.
    pub(crate) fn overwrite(&self, blocks: Range<u64>, discards: bool) -> bool {
        let content = if discards { Content::Zeros } else { Content::Stamped };
        let all: Vec<_> = blocks.clone().map(|block| self.begin(block, content)).collect();
        let bytes = |of: &Version| stamp(of.block, of.number).repeat(SIZE / SECTOR);
        let done = match discards {
            true => self.device.discard(blocks),
            false => {
                let bytes: Vec<u8> = all.iter().flat_map(bytes).collect();
                self.device.write_around(blocks.start, &bytes)
            }
        };
        // One that failed may have done it or not: nothing is promised of it.
        if done.is_ok() {
            all.into_iter().for_each(|version| self.settle(version));
        }
        done.is_ok()
    }

    fn settled(&self) -> Settled {
        let _no_reset = self.resets.read().unwrap();
        let history = self.history.lock();
        Settled { versions: history.settled.clone(), lost: history.lost.clone() }
    }

    pub(crate) fn sync(&self) -> bool {
        let settled = self.settled();
        let synced = self.device.sync().is_ok();
        if synced {
            self.promise(settled);
        }
        synced
    }

    pub(crate) fn take_a_flush_for_a_sync(&self) {
        let settled = self.settled();
        self.device.flush().unwrap();
        self.promise(settled);
    }

    pub(crate) fn write_through(&self, block: u64) -> bool {
        let mut settled = self.settled();
        settled.versions.retain(|of, _| *of == block);
        let durable = self.device.write_through(block..block + 1).is_ok();
        if durable {
            self.promise(settled);
        }
        durable
    }

    /// A block that was reported as lost since need not be there.
    fn promise(&self, Settled { mut versions, lost }: Settled) {
        let now = self.disk.moments();
        let _no_reset = self.resets.read().unwrap();
        let mut history = self.history.lock();
        versions.retain(|block, _| history.lost.get(block) == lost.get(block));
        history.promised.push((now, versions));
    }

    /// After a sync that failed. Nothing that was promised before is taken back; of the blocks that are
    /// reported as lost nothing else is.
    pub(crate) fn reset(&self) {
        self.disk.heal();
        let _alone = self.resets.write().unwrap();
        let Ok(lost) = self.device.reset() else { return };
        let History { settled, promised, lost: losses, .. } = &mut *self.history.lock();
        for block in lost.blocks().iter().cloned().flatten() {
            let of_block =
                |(_, promised): &(u64, BTreeMap<u64, usize>)| promised.get(&block).copied();
            settled.insert(block, promised.iter().filter_map(of_block).max().unwrap_or(0));
            *losses.entry(block).or_default() += 1;
        }
    }

    pub(crate) fn fail_next(&self, operation: Operation) {
        self.disk.inject_next(operation, Fault::Error(libc::EIO));
    }

    /// Looks at the images of so many moments, as many of each, and of the last one.
    pub(crate) fn check(&self, moments: usize, images: usize, mut random: impl FnMut() -> u64) {
        let last = self.disk.moments();
        for round in 0..moments {
            let moment = if round == 0 { last } else { random() % (last + 1) };
            self.check_moment(moment, images, &mut random);
        }
    }

    /// The image with the least that may be there, that with the most, and others at random.
    pub(crate) fn check_moment(
        &self,
        moment: u64,
        images: usize,
        random: &mut impl FnMut() -> u64,
    ) {
        for image in 0..images {
            let bytes = self.disk.after_power_cut(moment, |_, versions| match image {
                0 => 0,
                1 => versions,
                _ => (random() % versions as u64) as usize,
            });
            self.check_image(moment, &bytes.unwrap());
        }
    }

    fn check_image(&self, moment: u64, image: &[u8]) {
        let mut least = BTreeMap::new();
        for (since, promised) in &self.history.lock().promised {
            if *since <= moment {
                for (&block, &version) in promised {
                    let least = least.entry(block).or_insert(0);
                    *least = version.max(*least);
                }
            }
        }
        for (block, bytes) in image.chunks(SIZE).enumerate() {
            let least = least.get(&(block as u64)).copied().unwrap_or(0);
            self.fits(block as u64, bytes, least, "after a power cut");
        }
    }

    /// Each sector is of that version of the block, or of a later one.
    fn fits(&self, block: u64, bytes: &[u8], least: usize, when: &str) {
        let history = self.history.lock();
        let versions = &history.versions[&block];
        for sector in bytes.chunks(SECTOR) {
            let fits = (least..versions.len()).any(|version| match versions[version] {
                Content::Stamped => sector == stamp(block, version),
                Content::Zeros => sector.iter().all(|byte| *byte == 0),
            });
            let there = u64::from_le_bytes(sector[8..16].try_into().unwrap());
            assert!(
                fits,
                "block {block} {when}: version {there} of {}, where {least} was promised",
                versions.len()
            );
        }
    }
}
