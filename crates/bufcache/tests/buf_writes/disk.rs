//! A device whose sectors say which they are and what was put there last, and that fails as it is told
//! to. It records what is left of it after a loss of power.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, MemoryDevice};
use bufcache_test::{Fault, FaultDevice, Operation};

/// Two sectors, so that a block can be torn.
pub(super) const SIZE: usize = 1024;
pub(super) const SECTOR: usize = 512;
/// Sectors of a block.
pub(super) const PARTS: usize = SIZE / SECTOR;
pub(super) const BLOCKS: u64 = 12;
/// How long the cache waits.
pub(super) const PATIENCE: Duration = Duration::from_micros(100);

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

/// The name of the thread whose operations stand still.
pub(super) const BESIDE: &str = "beside";
/// The name of the cleaner's threads.
const CLEANER: &str = "bufcache";

fn is_thread(name: &str) -> bool {
    thread::current().name() == Some(name)
}

/// The device, and what is known of its operations.
pub(super) struct Disk {
    pub(super) device: Arc<FaultDevice<MemoryDevice>>,
    known: Arc<Known>,
    /// It gives unsynced writes up and serves the older bytes again, when a sync fails and before.
    reverts: bool,
}

#[derive(Debug, Default)]
struct Known {
    state: Mutex<State>,
    changed: Condvar,
}

impl Known {
    fn state(&self) -> MutexGuard<'_, State> {
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

/// A sector with the value put there; 0 is zeros.
pub(super) fn stamp(sector: usize, value: u32) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if value > 0 {
        for pair in bytes.chunks_exact_mut(8) {
            pair[..4].copy_from_slice(&(sector as u32 ^ 0x5a5a_0000).to_le_bytes());
            pair[4..].copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// What a sector says; `None` if it is not whole, or another's.
fn read_stamp(sector: usize, bytes: &[u8]) -> Option<u32> {
    let value = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
    (bytes == stamp(sector, value)).then_some(value)
}

/// What sectors from that number on say.
pub(super) fn values(first: usize, bytes: &[u8]) -> Vec<u32> {
    let sectors = bytes.chunks(SECTOR).enumerate();
    sectors
        .map(|(at, bytes)| {
            read_stamp(first + at, bytes).unwrap_or_else(|| panic!("sector {}: torn", first + at))
        })
        .collect()
}

/// Whether a block is what was put there at some time, sector by sector.
pub(super) fn is_whole(block: u64, bytes: &[u8]) -> bool {
    let first = block as usize * PARTS;
    bytes.chunks(SECTOR).enumerate().all(|(at, bytes)| read_stamp(first + at, bytes).is_some())
}

impl Disk {
    /// Each sector has the value 1. The cleaner's writes take longer than the cache waits if it `cleans_slowly`.
    /// Operations of the kind `lies` do nothing.
    pub(super) fn new(lies: Option<Operation>, reverts: bool, cleans_slowly: bool) -> Self {
        let bytes = (0..BLOCKS as usize * PARTS).flat_map(|sector| stamp(sector, 1)).collect();
        let device = Arc::new(FaultDevice::new(MemoryDevice::new(bytes)));
        device.record().expect("memory is read");
        if let Some(lies) = lies {
            device.inject(lies, .., Fault::Skipped);
        }
        let known = Arc::new(Known::default());
        let [begins, ends] = [(); 2].map(|()| Arc::clone(&known));
        device.on_operation(move |operation, _| {
            if cleans_slowly && operation == Operation::Write && is_thread(CLEANER) {
                thread::sleep(20 * PATIENCE);
            }
            begins.pass(operation, false);
        });
        device.on_end(move |operation, has_failed| {
            let is_revert = reverts && has_failed && operation == Operation::Sync;
            ends.state().reverts += u64::from(is_revert);
            ends.pass(operation, true);
            let mut state = ends.state();
            state.failures[operation as usize] += u64::from(has_failed);
            let is_write = has_failed && operation == Operation::Write;
            state.cleaner_failed |= is_write && is_thread(CLEANER);
        });
        Self { device, known, reverts }
    }

    /// Lets something go wrong with the next operation of a kind. Returns whether it is a write, which may
    /// not be tried again for it.
    pub(super) fn arm(&self, kind: u8, what: u8) -> bool {
        let kinds = [Operation::Read, Operation::Write, Operation::Zero, Operation::Discard];
        let operation = kinds.get(usize::from(kind % 5)).copied().unwrap_or(Operation::Sync);
        let is_read = operation == Operation::Read;
        let fault = match what % 10 {
            6 if self.reverts && operation == Operation::Sync => {
                self.device.give_up_writes().expect("memory is written");
                self.known.state().reverts += 1;
                return false;
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
        operation == Operation::Write && fault == Fault::Error(libc::ENXIO)
    }

    /// Lets the next operation of the kind fail; a sync of a device that reverts, by a loss of its writes.
    pub(super) fn fail(&self, operation: Operation, fault: Fault) {
        let is_kept = matches!(fault, Fault::Panic | Fault::Error(libc::EINTR));
        let is_revert = self.reverts && operation == Operation::Sync && !is_kept;
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

    /// How often it has given up unsynced writes.
    pub(super) fn reverts(&self) -> u64 {
        self.known.state().reverts
    }

    /// Lets the next operation of the kind stand still, if the thread [`BESIDE`] makes it.
    pub(super) fn close(&self, operation: Operation, after: bool) {
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
    pub(super) fn open(&self) {
        self.known.state().gate = Gate::Open;
        self.known.changed.notify_all();
    }

    /// What the device has.
    pub(super) fn values(&self, block: u64) -> Vec<u32> {
        let mut bytes = [0; SIZE];
        self.device.inner().read(block * SIZE as u64, &mut bytes).expect("memory is read");
        values(block as usize * PARTS, &bytes)
    }

    /// What it may have if the power goes now.
    pub(super) fn after_power_cut(&self, choose: impl FnMut(u64, usize) -> usize) -> Vec<u32> {
        let image = self.device.after_power_cut(self.device.moments(), choose);
        values(0, &image.expect("it is recorded"))
    }
}
