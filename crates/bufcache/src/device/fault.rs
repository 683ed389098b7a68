//! A device that fails when it is told to, and whose power can be cut.

use std::io;
use std::ops::{Bound, Range, RangeBounds};
use std::time::Duration;

use percpu::sync::{Mutex, thread};

use super::BlockDevice;
use super::power::{Change, Log, Recorded, SECTOR};

/// What is done to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`BlockDevice::read`].
    Read,
    /// [`BlockDevice::write`] and [`BlockDevice::write_durable`].
    Write,
    /// [`BlockDevice::zero`].
    Zero,
    /// [`BlockDevice::discard`].
    Discard,
    /// [`BlockDevice::sync`].
    Sync,
}

/// What goes wrong with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with this number of the system's, and changes nothing.
    Error(i32),
    /// It stops after so many bytes: a read says so, all else fails with `ENOSPC`. A sync does nothing,
    /// and fails with `EIO`.
    Short(usize),
    /// Of its sectors only those are transferred whose bit is set, that of the first being the lowest,
    /// and that of the 65th again. A read says nothing, and has zeros in the others; all else fails
    /// with `EIO`.
    Torn(u64),
    /// A sync fails with `EIO`, and what it should have made durable is given up: these sectors read as they
    /// did before. Page caches do this to pages that could not be written. All else fails with `EIO`, and
    /// changes nothing. The device must be [recorded](FaultDevice::record).
    Revert,
    /// It begins so much later.
    Delay(Duration),
    /// It panics before it does anything.
    Panic,
}

/// When a fault comes.
#[derive(Debug)]
struct Rule {
    operation: Operation,
    /// Of the operations of that kind, counted from 0.
    numbers: Range<u64>,
    /// Of those that touch one of these bytes.
    bytes: Range<u64>,
    fault: Fault,
}

#[derive(Debug, Default)]
struct Faults {
    rules: Vec<Rule>,
    counts: [u64; 5],
    /// Writes were given up, and no sync has said so yet.
    gave_up: bool,
}

/// A device that does what another does, except for the [`Fault`]s that are asked of it, and records
/// what would be left after a loss of power. For tests. Its reads block, also where those of the other
/// are begun.
///
/// ```
/// use bufcache::{Cache, Fault, FaultDevice, GetError, MemoryDevice, Operation};
/// use std::sync::Arc;
///
/// let device = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 8192])));
/// let disk = Cache::new(1 << 20)?.attach(Arc::clone(&device), 4096)?;
/// device.inject(Operation::Read, 0..2, Fault::Error(5)); // the first two
/// assert_eq!(disk.get(1).err(), Some(GetError::Io { errno: 5, block: 1 }));
/// assert_eq!(disk.get(1).err(), Some(GetError::Io { errno: 5, block: 1 }));
/// assert_eq!(disk.get(1)?[0], 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Loss of power
///
/// From [`record`](Self::record) on every change and every sync is recorded with its beginning and its
/// end. [`after_power_cut`](Self::after_power_cut) says what the device may hold if the power goes at
/// one of those moments: what a good sync made durable, and of each sector of the rest any version. So
/// writes are torn, and reordered until the next sync, as the test chooses.
#[derive(Debug)]
pub struct FaultDevice<D> {
    inner: D,
    faults: Mutex<Faults>,
    /// Held while the device below is changed, so that changes have an order.
    log: Mutex<Option<Log>>,
}

impl<D: BlockDevice> FaultDevice<D> {
    /// A device without faults so far.
    pub fn new(inner: D) -> Self {
        Self { inner, faults: Mutex::default(), log: Mutex::default() }
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Lets the fault come at these operations of the kind, counted from 0 from the device's making
    /// on: `3..4` is the fourth, `..` is all. Of several faults that meet the first that was injected
    /// counts, and all delays.
    pub fn inject(&self, operation: Operation, numbers: impl RangeBounds<u64>, fault: Fault) {
        let start = match numbers.start_bound() {
            Bound::Included(&first) => first,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match numbers.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => u64::MAX,
        };
        self.add(Rule { operation, numbers: start..end, bytes: 0..u64::MAX, fault });
    }

    /// Lets the fault come at the next operation of the kind.
    pub fn inject_next(&self, operation: Operation, fault: Fault) {
        let next = self.count(operation);
        self.inject(operation, next..=next, fault);
    }

    /// Lets the fault come whenever an operation of the kind touches one of these bytes.
    pub fn inject_at(&self, operation: Operation, bytes: Range<u64>, fault: Fault) {
        self.add(Rule { operation, numbers: 0..u64::MAX, bytes, fault });
    }

    fn add(&self, rule: Rule) {
        self.faults.lock().rules.push(rule);
    }

    /// Takes all faults back.
    pub fn heal(&self) {
        self.faults.lock().rules.clear();
    }

    /// How many operations of the kind were begun.
    pub fn count(&self, operation: Operation) -> u64 {
        self.faults.lock().counts[operation as usize]
    }

    /// Records from now on; what the device holds counts as durable. Keeps that and everything
    /// that is written in memory. To be called while nobody changes the device.
    ///
    /// # Errors
    ///
    /// The device's below, which is read whole.
    pub fn record(&self) -> io::Result<()> {
        let mut log = self.log.lock();
        let len = usize::try_from(self.inner.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match self.inner.read(done as u64, &mut bytes[done..])? {
                0 => break,
                count => done += count,
            }
        }
        *log = Some(Log::new(bytes));
        Ok(())
    }

    /// Everything that was recorded, in the order in which it began.
    pub fn recorded(&self) -> Vec<Recorded> {
        self.log.lock().as_ref().map_or_else(Vec::new, Log::recorded)
    }

    /// How many moments there are: each begin, change and end of an operation is one.
    pub fn moments(&self) -> u64 {
        self.log.lock().as_ref().map_or(0, Log::now)
    }

    /// What the device holds if the power goes after that many [moments](Self::moments); `None` if
    /// nothing was [recorded](Self::record).
    ///
    /// Of each sector of 512 bytes that has more than one version, `choose` is given the number, counted
    /// from 0 on the device, and how many versions there are, from the durable one to the last; it
    /// returns which survives (the last, if that is too large).
    pub fn after_power_cut(
        &self,
        moments: u64,
        choose: impl FnMut(u64, usize) -> usize,
    ) -> Option<Vec<u8>> {
        self.log.lock().as_ref().map(|log| log.after_power_cut(moments, choose))
    }

    /// Gives up what was written since the last good sync, as a page cache does whose write-back fails: these
    /// sectors read as they did before, and the next sync fails with `EIO`.
    ///
    /// # Errors
    ///
    /// Those of the device below, to which the earlier versions are written.
    ///
    /// # Panics
    ///
    /// Panics if the device is not [recorded](Self::record).
    pub fn give_up_writes(&self) -> io::Result<()> {
        let mut log = self.log.lock();
        let log = log.as_mut().expect("give_up_writes needs FaultDevice::record");
        self.faults.lock().gave_up = true;
        self.revert(log, u64::MAX)
    }

    /// Puts the earlier versions of the changes back that had ended before that moment.
    fn revert(&self, log: &mut Log, moment: u64) -> io::Result<()> {
        let before = log.give_up(moment);
        before.iter().try_for_each(|(offset, bytes)| self.inner.write(*offset, bytes))
    }

    /// Counts an operation, and says what goes wrong with it, and how much later it is to begin.
    fn meet(&self, operation: Operation, offset: u64, len: u64) -> (Option<Fault>, Duration) {
        let mut faults = self.faults.lock();
        let number = faults.counts[operation as usize];
        faults.counts[operation as usize] += 1;
        let end = offset.saturating_add(len.max(1));
        let mut delay = Duration::ZERO;
        let mut found = None;
        for rule in &faults.rules {
            let meets = rule.operation == operation
                && rule.numbers.contains(&number)
                && rule.bytes.start < end
                && offset < rule.bytes.end;
            match rule.fault {
                Fault::Delay(time) if meets => delay += time,
                fault if meets => found = found.or(Some(fault)),
                _ => {}
            }
        }
        drop(faults);
        assert!(found != Some(Fault::Panic), "a fault that was asked for");
        (found, delay)
    }

    /// A write, or what is like one. `apply` changes so many bytes of the device from an offset on;
    /// where they begin is counted from the operation's own offset, too.
    fn change(
        &self,
        operation: Operation,
        offset: u64,
        change: Change<'_>,
        durable: bool,
        apply: impl Fn(u64, Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let len = change.len();
        let (fault, delay) = self.meet(operation, offset, len);
        let begin = |log: &mut Log| log.begin(operation, offset, change, durable);
        let number = self.log.lock().as_mut().map(begin);
        pause(delay);
        let mut log = self.log.lock();
        let mut applied = false;
        let mut apply = |part: Range<u64>| {
            applied = true;
            apply(offset + part.start, part)
        };
        let result = match fault {
            None | Some(Fault::Delay(_) | Fault::Panic) => apply(0..len),
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Revert) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(Fault::Short(bytes)) => match (bytes as u64).min(len) {
                0 => Ok(()),
                bytes => apply(0..bytes),
            }
            .and(Err(io::Error::from_raw_os_error(libc::ENOSPC))),
            Some(Fault::Torn(sectors)) => (0..len.div_ceil(SECTOR))
                .filter(|sector| is_set(sectors, *sector))
                .try_for_each(|at| apply(at * SECTOR..((at + 1) * SECTOR).min(len)))
                .and(Err(io::Error::from_raw_os_error(libc::EIO))),
        };
        if let Some((log, number)) = log.as_mut().zip(number) {
            if applied {
                log.applied(number);
            }
            log.end(number, result.is_ok());
        }
        result
    }
}

/// Whether the mask of a torn operation has the sector.
fn is_set(sectors: u64, sector: u64) -> bool {
    sectors >> (sector % 64) & 1 != 0
}

fn pause(time: Duration) {
    if time.is_zero() {
        return;
    }
    #[cfg(not(any(offlock_loom, offlock_shuttle)))]
    thread::sleep(time);
    #[cfg(any(offlock_loom, offlock_shuttle))]
    thread::yield_now();
}

impl<D: BlockDevice> BlockDevice for FaultDevice<D> {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.inner.identity()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn alignment(&self) -> usize {
        self.inner.alignment().max(SECTOR as usize)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let (fault, delay) = self.meet(Operation::Read, offset, buf.len() as u64);
        pause(delay);
        match fault {
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Revert) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(Fault::Short(bytes)) => Ok(self.inner.read(offset, buf)?.min(bytes)),
            Some(Fault::Torn(sectors)) => {
                let count = self.inner.read(offset, buf)?;
                for (at, sector) in (0..).zip(buf[..count].chunks_mut(SECTOR as usize)) {
                    if !is_set(sectors, at) {
                        sector.fill(0);
                    }
                }
                Ok(count)
            }
            None | Some(Fault::Delay(_) | Fault::Panic) => self.inner.read(offset, buf),
        }
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.change(Operation::Write, offset, Change::Bytes(buf), false, |at, part| {
            self.inner.write(at, &buf[part.start as usize..part.end as usize])
        })
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.change(Operation::Write, offset, Change::Bytes(buf), true, |at, part| {
            self.inner.write_durable(at, &buf[part.start as usize..part.end as usize])
        })
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(Operation::Zero, offset, Change::Zeros(len), false, |at, part| {
            self.inner.zero(at, part.end - part.start)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(Operation::Discard, offset, Change::Zeros(len), false, |at, part| {
            self.inner.discard(at, part.end - part.start)
        })
    }

    fn sync(&self) -> io::Result<()> {
        let (fault, delay) = self.meet(Operation::Sync, 0, u64::MAX);
        let number = self.log.lock().as_mut().map(Log::begin_sync);
        pause(delay);
        let failed = || Err(io::Error::from_raw_os_error(libc::EIO));
        let result = match fault {
            None | Some(Fault::Delay(_) | Fault::Panic) => {
                let gave_up = std::mem::take(&mut self.faults.lock().gave_up);
                if gave_up { failed() } else { self.inner.sync() }
            }
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short(_) | Fault::Torn(_) | Fault::Revert) => failed(),
        };
        if let Some((log, number)) = self.log.lock().as_mut().zip(number) {
            let interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
            if fault == Some(Fault::Revert) {
                self.revert(log, log.begin_of(number))?;
            }
            log.end_sync(number, result.is_ok(), result.as_ref().is_err_and(interrupted));
        }
        result
    }
}
