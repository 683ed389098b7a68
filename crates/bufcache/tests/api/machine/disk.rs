//! A device that fails as it is told to and records what a loss of power leaves, and the versions of its blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Condvar, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Cache, Device, MemoryDevice, WriteError};
use bufcache_test::{Fault, FaultDevice, Operation};
use offlock_sync::{Mutex, MutexGuard};
use testkit::rng::Rng;

use super::Shape;

/// Two sectors, so that a block can be torn.
pub(super) const SIZE: usize = 1024;
const SECTOR: usize = 512;
pub(super) const PARTS: usize = SIZE / SECTOR;
/// How long the cache of one thread waits.
pub(super) const PATIENCE: Duration = Duration::from_micros(100);

/// The name of the thread whose operations stand still.
pub(super) const BESIDE: &str = "beside";
/// The name of the cleaner's threads.
const CLEANER: &str = "bufcache";

pub(super) fn is_thread(name: &str) -> bool {
    thread::current().name() == Some(name)
}

/// The versions of a block, of which version 0 is that of the device at its begin.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Block {
    /// The last that was begun.
    pub(super) begun: u64,
    /// The last that was zeros, or may be.
    zeros: u64,
    /// Of each sector: the last that is over, which a reader sees at least.
    pub(super) over: [u64; PARTS],
    /// What the next sync makes durable, and what one has.
    settled: u64,
    promised: u64,
    /// How often the block was lost.
    lost: u64,
}

/// A version that is being written, and how often its block had been lost when it was begun.
#[derive(Clone, Copy)]
pub(super) struct Version {
    pub(super) block: u64,
    pub(super) number: u64,
    lost: u64,
}

/// A sector is one word throughout, of its number and its version; or zeros.
fn word(block: u64, part: usize, version: u64) -> u64 {
    (block * PARTS as u64 + part as u64) << 48 | version << 1 | 1
}

/// The bytes of a version of a block.
pub(super) fn stamp(block: u64, version: u64) -> Vec<u8> {
    let sector = |part| word(block, part, version).to_le_bytes().repeat(SECTOR / 8);
    (0..PARTS).flat_map(sector).collect()
}

/// The word of each sector of a block. Returns `None` if a sector is torn, or another's.
pub(super) fn words(block: u64, bytes: &[u8]) -> Option<[u64; PARTS]> {
    let mut words = [0; PARTS];
    for (part, bytes) in bytes.chunks(SECTOR).enumerate() {
        let first = u64::from_le_bytes(*bytes.first_chunk()?);
        let is_own = first == 0 || first >> 48 == word(block, part, 0) >> 48;
        let is_whole = bytes[8..] == bytes[..SECTOR - 8]; // each word is the one before
        if !is_own || !is_whole {
            return None;
        }
        words[part] = first;
    }
    Some(words)
}

/// What the device has done, and the operation that stands still in it.
#[derive(Debug, Default)]
struct State {
    failures: [u64; 5],
    /// A write of the cleaner has failed.
    cleaner_failed: bool,
    /// How often unsynced writes were given up.
    reverts: u64,
    gate: Gate,
}

/// An operation of [`BESIDE`]'s thread that stands still in the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Gate {
    #[default]
    Open,
    /// The next operation of this kind stands still, before the device does it or after that.
    Closed(Operation, bool),
    Reached,
}

#[derive(Debug, Default)]
struct Known {
    state: std::sync::Mutex<State>,
    changed: Condvar,
}

impl Known {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits where the gate is closed for an operation, before it or `after` it.
    fn pass(&self, operation: Operation, after: bool) {
        let mut state = self.state();
        if state.gate == Gate::Closed(operation, after) && is_thread(BESIDE) {
            state.gate = Gate::Reached;
            self.changed.notify_all();
            let is_closed = |state: &mut State| state.gate == Gate::Reached;
            drop(self.changed.wait_while(state, is_closed));
        }
    }
}

/// What one thread knows of the device's handle.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) closed: bool,
    pub(super) poisoned: bool,
    /// Writes that had failed when the handle was told of such last.
    pub(super) failures: u64,
    /// Syncs that have failed.
    pub(super) syncs: u64,
    /// How often the device had given up unsynced writes at the last reset.
    pub(super) reverts: u64,
    /// Blocks that were read from the device after it had given up what was written of them.
    pub(super) owed: BTreeSet<u64>,
    /// Blocks that were read from the device since the last good sync, or perhaps before.
    pub(super) loaded: BTreeSet<u64>,
}

/// A device, what is known of its operations, and the versions of its blocks.
pub(super) struct Disk {
    pub(super) device: Arc<FaultDevice<MemoryDevice>>,
    known: Arc<Known>,
    shape: Shape,
    told: Mutex<Told>,
    /// The loss that the drop of the last handle has reported.
    pub(super) loss: Arc<OnceLock<WriteError>>,
    blocks: Vec<Mutex<Block>>,
    /// What must be there from a moment on.
    promises: Mutex<Vec<(u64, BTreeMap<u64, u64>)>>,
    /// Locked for writing from a reset until its result is in `blocks`.
    pub(super) resets: RwLock<()>,
}

impl Disk {
    pub(super) fn new(shape: Shape) -> Self {
        let bytes = (0..shape.blocks).flat_map(|block| stamp(block, 0)).collect();
        let device = Arc::new(FaultDevice::new(MemoryDevice::new(bytes)));
        if shape.records {
            device.record().expect("memory is read");
        }
        if let Some(lies) = shape.lies {
            device.inject(lies, .., Fault::Skipped);
        }
        let known = Arc::new(Known::default());
        let [begins, ends] = [(); 2].map(|()| Arc::clone(&known));
        device.on_operation(move |operation, _| {
            if shape.cleans_slowly && operation == Operation::Write && is_thread(CLEANER) {
                thread::sleep(20 * PATIENCE); // longer than the cache waits
            }
            begins.pass(operation, false);
        });
        device.on_end(move |operation, has_failed| {
            let is_revert = shape.reverts && has_failed && operation == Operation::Sync;
            ends.state().reverts += u64::from(is_revert);
            ends.pass(operation, true);
            let mut state = ends.state();
            state.failures[operation as usize] += u64::from(has_failed);
            let is_write = has_failed && operation == Operation::Write;
            state.cleaner_failed |= is_write && is_thread(CLEANER);
        });
        let blocks = (0..shape.blocks).map(|_| Mutex::default()).collect();
        let (told, loss, promises, resets) = Default::default();
        Self { device, known, shape, told, loss, blocks, promises, resets }
    }

    pub(super) fn attach(&self, cache: &Cache) -> Device {
        let loss = Arc::clone(&self.loss);
        let is_whole = |block: u64, bytes: &[u8]| words(block, bytes).is_some();
        let options = AttachOptions::new().verify(is_whole).before_write(is_whole);
        let options = options.on_loss(move |error| _ = loss.set(error));
        cache.attach_with(Arc::clone(&self.device), options).unwrap()
    }

    /// Lets something go wrong with the next operation of a kind.
    pub(super) fn arm(&self, kind: u8, what: u8) {
        let kinds = [Operation::Read, Operation::Write, Operation::Zero, Operation::Discard];
        let operation = kinds.get(usize::from(kind % 5)).copied().unwrap_or(Operation::Sync);
        let is_read = operation == Operation::Read;
        let fault = match what % 10 {
            6 if self.shape.reverts && operation == Operation::Sync => {
                self.device.give_up_writes().expect("memory is written");
                self.known.state().reverts += 1;
                return;
            }
            0 | 1 => Fault::Error(libc::EIO),
            2 => Fault::Error(libc::ENOSPC),
            3 => Fault::Error(libc::EINTR),
            4 => Fault::Error(libc::ENXIO),
            5 => Fault::Error(libc::EOPNOTSUPP),
            6 => Fault::Short(SECTOR),
            // A read has zeros for what it lacks, which is whole, too.
            7 if !is_read => Fault::Torn(1),
            8 if !is_read => Fault::Torn(2),
            _ => Fault::Panic,
        };
        self.fail(operation, fault);
    }

    /// Lets the next operation of the kind fail; a sync of a device that reverts, by a loss of its writes.
    pub(super) fn fail(&self, operation: Operation, fault: Fault) {
        if !self.shape.exact {
            self.device.heal(); // faults that other threads have overtaken
        }
        let is_kept = matches!(fault, Fault::Panic | Fault::Error(libc::EINTR));
        let is_revert = self.shape.reverts && operation == Operation::Sync && !is_kept;
        self.device.inject_next(operation, if is_revert { Fault::Revert } else { fault });
    }

    /// How many operations of the kind have failed, but for those that were interrupted.
    pub(super) fn failures(&self, operation: Operation) -> u64 {
        self.known.state().failures[operation as usize]
    }

    /// Whether a write has failed on the cleaner's thread, at any time between two steps.
    pub(super) fn has_cleaner_failed(&self) -> bool {
        self.known.state().cleaner_failed
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock()
    }

    /// A sync that failed poisons.
    pub(super) fn see_failures(&self) {
        let (mut told, syncs) = (self.told(), self.failures(Operation::Sync));
        told.poisoned |= syncs > told.syncs;
        told.syncs = syncs;
    }

    /// Whether the device has given up unsynced writes since the last reset.
    pub(super) fn has_reverted(&self) -> bool {
        self.told().reverts < self.reverts()
    }

    /// How often it has given up unsynced writes.
    pub(super) fn reverts(&self) -> u64 {
        self.known.state().reverts
    }

    /// Lets the next operation of the kind stand still, if the thread [`BESIDE`] makes it.
    pub(super) fn close_gate(&self, operation: Operation, after: bool) {
        self.known.state().gate = Gate::Closed(operation, after);
    }

    /// Waits until an operation stands still, or until `is_over` returns true.
    pub(super) fn wait_for_gate(&self, is_over: impl Fn() -> bool) {
        let mut state = self.known.state();
        while state.gate != Gate::Reached && !is_over() {
            let wait = self.known.changed.wait_timeout(state, PATIENCE);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets the operation that stands still go on.
    pub(super) fn open_gate(&self) {
        self.known.state().gate = Gate::Open;
        self.known.changed.notify_all();
    }

    pub(super) fn block(&self, block: u64) -> MutexGuard<'_, Block> {
        self.blocks[block as usize].lock()
    }

    /// What the device has of a block.
    pub(super) fn bytes(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        self.device.inner().read(block * SIZE as u64, &mut bytes).expect("memory is read");
        bytes
    }

    pub(super) fn begin(&self, block: u64, zeros: bool) -> Version {
        let mut of = self.block(block);
        of.begun += 1;
        if zeros {
            of.zeros = of.begun;
        }
        Version { block, number: of.begun, lost: of.lost }
    }

    /// The version is over. What was lost since it was begun is not settled.
    pub(super) fn settle(&self, Version { block, number, lost }: Version) {
        let mut of = self.block(block);
        of.over = [number; PARTS];
        if of.lost == lost {
            of.settled = number;
        }
    }

    /// What was written since the last good sync may be lost.
    pub(super) fn lose(&self, block: u64) {
        let mut of = self.block(block);
        of.settled = of.promised;
        of.lost += 1;
    }

    /// The block has these versions, of the device, instead of those that were over.
    pub(super) fn forget(&self, block: u64, there: [u64; PARTS]) {
        self.lose(block);
        self.block(block).over = there;
    }

    /// The versions of the sectors of a block, whatever they are.
    pub(super) fn versions(&self, block: u64, bytes: &[u8], when: &str) -> [u64; PARTS] {
        self.check(block, bytes, [0; PARTS], None, when)
    }

    /// Returns the versions of the sectors of a block. Fails unless each is between `least` and `most`; without a
    /// `most`, the last version that was begun.
    pub(super) fn check(
        &self,
        block: u64,
        bytes: &[u8],
        least: [u64; PARTS],
        most: Option<[u64; PARTS]>,
        when: &str,
    ) -> [u64; PARTS] {
        let words = words(block, bytes);
        let words = words.unwrap_or_else(|| panic!("block {block} is torn {when}, or another's"));
        let of = *self.block(block);
        let mut versions = [0; PARTS];
        for (part, word) in words.into_iter().enumerate() {
            let version = if word == 0 { of.zeros } else { word << 16 >> 17 };
            // A wipe that failed has a number, and leaves what was there.
            let (least, most) = (least[part], most.map_or(of.begun, |most| most[part]));
            let fits = (least..=most).contains(&version) && (word != 0 || of.zeros > 0);
            assert!(fits, "block {block} {when}: {version}, {least} was promised of {of:?}");
            versions[part] = version;
        }
        versions
    }

    /// Whether the device has what is over of a block.
    pub(super) fn is_there(&self, block: u64) -> bool {
        self.versions(block, &self.bytes(block), "on the device") == self.block(block).over
    }

    /// Runs what makes blocks durable. Where it does, what was settled before it began must survive, but for what
    /// was lost meanwhile.
    pub(super) fn makes_durable(&self, blocks: Range<u64>, run: impl FnOnce() -> bool) -> bool {
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
            let is_news = of.lost == before.lost && of.promised < before.settled;
            is_news.then(|| {
                of.promised = before.settled;
                (block, before.settled)
            })
        });
        let promised = promised.collect();
        if now > 0 {
            self.promises.lock().push((now, promised));
        }
        true
    }

    /// Looks at images of a moment: that with the least that may be there, that with the most, and others at random.
    pub(super) fn check_power_cut(&self, moment: u64, images: usize, rng: &mut Rng) {
        let mut least = BTreeMap::new();
        let promises = self.promises.lock();
        for (_, promised) in promises.iter().filter(|(since, _)| *since <= moment) {
            for (&block, &version) in promised {
                let least = least.entry(block).or_insert(0);
                *least = version.max(*least);
            }
        }
        for image in 0..images {
            let bytes = self.device.after_power_cut(moment, |_, versions| match image {
                0 => 0,
                1 => versions,
                _ => rng.usize(..versions),
            });
            for (block, bytes) in (0..).zip(bytes.expect("it is recorded").chunks(SIZE)) {
                let least = least.get(&block).copied().unwrap_or(0);
                self.check(block, bytes, [least; PARTS], None, "after a power cut");
            }
        }
    }
}
