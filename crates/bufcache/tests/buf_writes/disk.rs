//! A device whose sectors say which they are and what was put there last, and that fails as it is told
//! to. It records what is left of it after a loss of power.

use std::io::{self, IoSlice};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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

/// What a device says that is not so: for tests of what looks at it.
#[allow(dead_code, reason = "the fuzzer's devices do not lie")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lie {
    #[default]
    None,
    /// Syncs do nothing.
    Sync,
    /// Every other write does nothing.
    Write,
}

/// What goes wrong with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Fault(Fault),
    /// It panics, without a message.
    Panic,
}

#[derive(Debug, Default)]
struct State {
    next: [Option<Next>; 5],
    failures: [u64; 5],
    /// A write of the cleaner has failed.
    cleaner_failed: bool,
    writes: u64,
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

pub(super) struct Disk {
    faulty: FaultDevice<MemoryDevice>,
    state: Mutex<State>,
    changed: Condvar,
    how: How,
}

/// What is special about a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) lie: Lie,
    /// It gives unsynced writes up and serves the older bytes again, when a sync fails and before.
    pub(super) reverts: bool,
    /// The cleaner's writes take longer than the cache waits.
    pub(super) cleans_slowly: bool,
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
    /// Each sector has the value 1.
    pub(super) fn new(how: How) -> Self {
        let bytes = (0..BLOCKS as usize * PARTS).flat_map(|sector| stamp(sector, 1)).collect();
        let faulty = FaultDevice::new(MemoryDevice::new(bytes));
        faulty.record().expect("memory is read");
        Self { faulty, state: Mutex::default(), changed: Condvar::new(), how }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets something go wrong with the next operation of a kind. Returns whether it is a write, which may
    /// not be tried again for it.
    pub(super) fn arm(&self, kind: u8, what: u8) -> bool {
        let kinds = [Operation::Read, Operation::Write, Operation::Zero, Operation::Discard];
        let operation = kinds.get(usize::from(kind % 5)).copied().unwrap_or(Operation::Sync);
        let errno = |number| Next::Fault(Fault::Error(number));
        if self.how.reverts && operation == Operation::Sync && matches!(what % 10, 0 | 1 | 6) {
            if what % 10 == 6 {
                self.faulty.give_up_writes().expect("memory is written");
                self.state().reverts += 1;
            } else {
                self.state().next[operation as usize] = Some(Next::Fault(Fault::Revert));
            }
            return false;
        }
        let next = match what % 10 {
            0 | 1 => errno(libc::EIO),
            2 => errno(libc::ENOSPC),
            3 => errno(libc::EINTR),
            4 => errno(libc::ENXIO),
            5 => errno(libc::EOPNOTSUPP),
            6 => Next::Fault(Fault::Short(SECTOR)),
            // A read has zeros for what it lacks, which is whole, too.
            7 if operation != Operation::Read => Next::Fault(Fault::Torn(1)),
            8 if operation != Operation::Read => Next::Fault(Fault::Torn(2)),
            _ => Next::Panic,
        };
        self.state().next[operation as usize] = Some(next);
        next == errno(libc::ENXIO) && operation == Operation::Write
    }

    /// Lets the next operation of the kind fail with this errno; a sync of a device that
    /// [reverts](How::reverts) gives up its writes.
    pub(super) fn fail(&self, operation: Operation, errno: i32) {
        let is_revert = self.how.reverts && operation == Operation::Sync;
        let fault = if is_revert { Fault::Revert } else { Fault::Error(errno) };
        self.state().next[operation as usize] = Some(Next::Fault(fault));
    }

    pub(super) fn disarm(&self) {
        self.state().next = [None; 5];
    }

    /// How many operations of the kind have failed, but for those that were interrupted.
    pub(super) fn failures(&self, operation: Operation) -> u64 {
        self.state().failures[operation as usize]
    }

    fn count_failure(&self, operation: Operation) {
        let mut state = self.state();
        state.failures[operation as usize] += 1;
        state.cleaner_failed |= operation == Operation::Write && is_thread(CLEANER);
    }

    /// Lets the next operation of the kind stand still, if the thread [`BESIDE`] makes it.
    pub(super) fn close(&self, operation: Operation, after: bool) {
        self.state().gate = Gate::Closed(operation, after);
    }

    /// Waits until an operation stands still, or until `is_over` returns true.
    pub(super) fn wait_for_gate(&self, is_over: impl Fn() -> bool) {
        let mut state = self.state();
        while state.gate != Gate::Reached && !is_over() {
            let wait = self.changed.wait_timeout(state, PATIENCE);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets the operation that stands still go on.
    pub(super) fn open(&self) {
        self.state().gate = Gate::Open;
        self.changed.notify_all();
    }

    fn pass(&self, operation: Operation, after: bool) {
        let mut state = self.state();
        if state.gate == Gate::Closed(operation, after) && is_thread(BESIDE) {
            state.gate = Gate::Reached;
            self.changed.notify_all();
            let open = |state: &mut State| state.gate == Gate::Reached;
            drop(self.changed.wait_while(state, open));
        }
    }

    /// Whether a write has failed on the cleaner's thread, at any time between two steps.
    pub(super) fn has_cleaner_failed(&self) -> bool {
        self.state().cleaner_failed
    }

    /// How often it has given up unsynced writes.
    pub(super) fn reverts(&self) -> u64 {
        self.state().reverts
    }

    /// What the device has.
    pub(super) fn values(&self, block: u64) -> Vec<u32> {
        let mut bytes = [0; SIZE];
        self.faulty.inner().read(block * SIZE as u64, &mut bytes).expect("memory is read");
        values(block as usize * PARTS, &bytes)
    }

    /// What it may have if the power goes now.
    pub(super) fn after_power_cut(&self, choose: impl FnMut(u64, usize) -> usize) -> Vec<u32> {
        let image = self.faulty.after_power_cut(self.faulty.moments(), choose);
        values(0, &image.expect("it is recorded"))
    }

    fn meet<T>(
        &self,
        operation: Operation,
        run: impl FnOnce(&FaultDevice<MemoryDevice>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.pass(operation, false);
        let next = self.state().next[operation as usize].take();
        match next {
            None => {}
            Some(Next::Fault(fault)) => self.faulty.inject_next(operation, fault),
            Some(Next::Panic) => {
                if self.how.reverts && operation == Operation::Sync {
                    // What this one gives up is reported as lost by the reset, and does not change later.
                    self.faulty.inject_next(operation, Fault::Error(libc::EIO));
                    let _ = self.faulty.sync();
                    self.faulty.heal();
                }
                self.count_failure(operation);
                std::panic::resume_unwind(Box::new(()));
            }
        }
        let result = run(&self.faulty);
        self.faulty.heal();
        let reverted = result.is_err() && next == Some(Next::Fault(Fault::Revert));
        self.state().reverts += u64::from(reverted);
        self.pass(operation, true);
        let short = matches!(next, Some(Next::Fault(Fault::Short(_))));
        let failed = match &result {
            Ok(_) => short,
            Err(error) => error.kind() != io::ErrorKind::Interrupted,
        };
        if failed {
            self.count_failure(operation);
        }
        result
    }

    fn write_one(&self, offset: u64, buf: &[u8], durable: bool) -> io::Result<()> {
        if self.how.cleans_slowly && is_thread(CLEANER) {
            thread::sleep(20 * PATIENCE);
        }
        let number = {
            let mut state = self.state();
            state.writes += 1;
            state.writes
        };
        self.meet(Operation::Write, |faulty| match durable {
            _ if self.how.lie == Lie::Write && number % 2 == 0 => Ok(()),
            true => faulty.write_vectored(offset, &[IoSlice::new(buf)], true),
            false => faulty.write(offset, buf),
        })
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.meet(Operation::Read, |faulty| faulty.read(offset, buf))
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_one(offset, buf, false)
    }

    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>], durable: bool) -> io::Result<()> {
        if let ([part], true) = (parts, durable) {
            return self.write_one(offset, part, true);
        }
        let mut at = offset;
        for part in parts {
            self.write(at, part)?;
            at += part.len() as u64;
        }
        if durable { self.sync() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.meet(Operation::Zero, |faulty| faulty.zero(offset, len))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.meet(Operation::Discard, |faulty| faulty.discard(offset, len))
    }

    fn sync(&self) -> io::Result<()> {
        self.meet(Operation::Sync, |faulty| match self.how.lie {
            Lie::Sync => Ok(()),
            _ => faulty.sync(),
        })
    }
}
