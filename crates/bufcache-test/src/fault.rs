//! A device with injected faults, whose power can be cut.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::{Bound, Range, RangeBounds};
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use bufcache::BlockDevice;
use offlock_sync::{Mutex, thread};

use crate::power::{Change, Log, Operation, Recorded, SECTOR};

/// A fault of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The operation fails with this errno and changes nothing.
    Error(i32),
    /// The operation stops after this many bytes. A read returns the number, a sync does nothing
    /// and fails with `EIO`, and other operations fail with `ENOSPC`.
    Short(usize),
    /// Only the sectors whose bit is set are transferred. The lowest bit is that of the first
    /// sector, and of the 65th. A read succeeds with zeros in the other sectors; other operations
    /// fail with `EIO`.
    Torn(u64),
    /// A sync fails with `EIO`, and the writes that it covers are reverted: their sectors read as
    /// before. Page caches do this with pages that could not be written. Other operations fail with
    /// `EIO` and change nothing. The device must be [recorded](FaultDevice::record).
    Revert,
    /// The operation begins this much later.
    Delay(Duration),
    /// The operation panics before it changes anything, without a message. A sync then gives up its writes as one that
    /// fails.
    Panic,
    /// The operation succeeds and does nothing: a device that lies.
    Skipped,
}

/// A fault and its condition.
#[derive(Debug)]
struct Rule {
    operation: Operation,
    /// The operations of that kind, counted from 0.
    numbers: Range<u64>,
    /// The operation must touch one of these bytes.
    bytes: Range<u64>,
    fault: Fault,
}

#[derive(Debug, Default)]
struct Faults {
    rules: Vec<Rule>,
    counts: [u64; 5],
    /// Set while no sync has reported writes that were given up.
    gave_up: bool,
}

/// A device for tests: it passes operations to an inner device, except for the injected [`Fault`]s,
/// and records the contents that a power loss would leave. Its reads block, even if the inner
/// device begins reads without blocking.
///
/// ```
/// use bufcache::{Cache, GetError, MemoryDevice};
/// use bufcache_test::{Fault, FaultDevice, Operation};
/// use std::sync::Arc;
///
/// let device = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 8192])));
/// let disk = Cache::new(1 << 20)?.attach(Arc::clone(&device))?;
/// device.inject(Operation::Read, 0..2, Fault::Error(5)); // the first two
/// assert_eq!(disk.get(1).err(), Some(GetError::Io { errno: 5, block: 1 }));
/// assert_eq!(disk.get(1).err(), Some(GetError::Io { errno: 5, block: 1 }));
/// assert_eq!(disk.get(1)?[0], 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Power loss
///
/// From [`record`](Self::record) on, each change and each sync is recorded with its begin and its
/// end. [`after_power_cut`](Self::after_power_cut) returns the contents after a power loss at one
/// of these moments: the changes that a successful sync made durable, and any version of each other
/// sector. So the test chooses how writes are torn, and reordered until the next sync.
#[derive(Debug)]
pub struct FaultDevice<D> {
    inner: D,
    faults: Mutex<Faults>,
    /// Held while the inner device is changed, so that changes have an order.
    log: Mutex<Option<Log>>,
    holds: Holds,
    hook: Mutex<Option<Arc<Hook<u64>>>>,
    end_hook: Mutex<Option<Arc<Hook<bool>>>>,
}

/// Called with each operation, and its offset or whether it has failed.
struct Hook<T>(Box<dyn Fn(Operation, T) + Send + Sync>);

impl<T> fmt::Debug for Hook<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// The kinds of operations that are held, and how many of each are waiting.
#[derive(Debug, Default)]
struct Holds {
    state: StdMutex<([bool; 5], [usize; 5])>,
    changed: Condvar,
}

impl Holds {
    /// Changes the state, and waits until `is_ready` returns true.
    fn wait(
        &self,
        change: impl FnOnce(&mut ([bool; 5], [usize; 5])),
        is_ready: impl Fn(&([bool; 5], [usize; 5])) -> bool,
    ) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        self.changed.notify_all();
        while !is_ready(&state) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pass(&self, operation: Operation) {
        let at = operation as usize;
        self.wait(|state| state.1[at] += 1, |state| !state.0[at]);
        self.wait(|state| state.1[at] -= 1, |_| true);
    }
}

/// Operations of a kind are held while this lives. From [`FaultDevice::hold`].
#[derive(Debug)]
#[must_use = "the operations are held while this lives"]
pub struct Hold<'d> {
    holds: &'d Holds,
    operation: Operation,
}

impl Hold<'_> {
    /// Waits until an operation of the kind is held.
    pub fn wait(&self) {
        self.holds.wait(|_| (), |state| state.1[self.operation as usize] > 0);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.holds.wait(|state| state.0[self.operation as usize] = false, |_| true);
    }
}

impl<D: BlockDevice> FaultDevice<D> {
    /// Returns a device without faults.
    pub fn new(inner: D) -> Self {
        let (faults, log, holds, hook, end_hook) = Default::default();
        Self { inner, faults, log, holds, hook, end_hook }
    }

    /// Returns the inner device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Injects a fault into the operations of the kind with these numbers, counted from 0 since the
    /// device was made: `3..4` is the fourth, `..` is all.
    ///
    /// If several faults apply to an operation, the first that was injected counts, and all delays.
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

    /// Injects a fault into the next operation of the kind.
    pub fn inject_next(&self, operation: Operation, fault: Fault) {
        let next = self.count(operation);
        self.inject(operation, next..=next, fault);
    }

    /// Injects a fault into each operation of the kind that touches one of these bytes.
    pub fn inject_at(&self, operation: Operation, bytes: Range<u64>, fault: Fault) {
        self.add(Rule { operation, numbers: 0..u64::MAX, bytes, fault });
    }

    fn add(&self, rule: Rule) {
        self.faults.lock().rules.push(rule);
    }

    /// Holds the operations of the kind, after they have begun and before they meet their faults,
    /// until the result drops.
    pub fn hold(&self, operation: Operation) -> Hold<'_> {
        self.holds.wait(|state| state.0[operation as usize] = true, |_| true);
        Hold { holds: &self.holds, operation }
    }

    /// Calls `hook` with the kind and the offset of each operation, after the operation has begun and before it
    /// meets its faults, in the place of the hook before. A panic of `hook` is one of the operation.
    pub fn on_operation(&self, hook: impl Fn(Operation, u64) + Send + Sync + 'static) {
        *self.hook.lock() = Some(Arc::new(Hook(Box::new(hook))));
    }

    /// Calls `hook` with the kind of each operation at its end, and with true if it has failed: has panicked, has read
    /// too little, or returns an error but `Interrupted`. In the place of the hook before.
    pub fn on_end(&self, hook: impl Fn(Operation, bool) + Send + Sync + 'static) {
        *self.end_hook.lock() = Some(Arc::new(Hook(Box::new(hook))));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.faults.lock().rules.clear();
    }

    /// Returns the number of operations of the kind that have begun.
    pub fn count(&self, operation: Operation) -> u64 {
        self.faults.lock().counts[operation as usize]
    }

    /// Begins to record. The present contents count as durable. They and all later writes are kept
    /// in memory. No operation may change the device meanwhile.
    ///
    /// # Errors
    ///
    /// The error of the inner device, which is read as a whole.
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

    /// Returns all recorded operations in the order of their begins.
    pub fn recorded(&self) -> Vec<Recorded> {
        self.log.lock().as_ref().map_or_else(Vec::new, Log::recorded)
    }

    /// Returns the number of moments: each begin, change and end of an operation is one.
    pub fn moments(&self) -> u64 {
        self.log.lock().as_ref().map_or(0, Log::now)
    }

    /// Returns the contents after a power loss at that [moment](Self::moments), or `None` if the
    /// device is not [recorded](Self::record).
    ///
    /// For each sector of 512 bytes with more than one possible version, `choose` gets the number
    /// of the sector and the number of versions, from the durable one to the last. It returns the
    /// version that survives; a value that is too large is the last.
    ///
    /// If a surviving write has extended the device, the contents are longer than those at the
    /// begin of the recording, with zeros where nothing was written.
    pub fn after_power_cut(
        &self,
        moments: u64,
        choose: impl FnMut(u64, usize) -> usize,
    ) -> Option<Vec<u8>> {
        self.log.lock().as_ref().map(|log| log.after_power_cut(moments, choose))
    }

    /// Reverts the writes since the last successful sync, as a page cache does whose write-back
    /// fails. Their sectors read as before, and the next sync fails with `EIO`.
    ///
    /// # Errors
    ///
    /// The errors of the inner device, to which the earlier versions are written.
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

    /// Reverts the changes that had ended before that moment.
    fn revert(&self, log: &mut Log, moment: u64) -> io::Result<()> {
        let before = log.give_up(moment);
        before.iter().try_for_each(|(offset, bytes)| self.inner.write(*offset, bytes))
    }

    /// Makes an operation, and tells of its end. A result that is too small, `least`, is a failure.
    fn ends(
        &self,
        operation: Operation,
        least: usize,
        make: impl FnOnce() -> io::Result<usize>,
    ) -> io::Result<usize> {
        let hook = self.end_hook.lock().clone();
        let mut end = Ends { hook, operation, has_failed: true };
        let result = make();
        end.has_failed = match &result {
            Ok(count) => *count < least,
            Err(error) => error.kind() != io::ErrorKind::Interrupted,
        };
        result
    }

    /// Counts an operation. Returns its number.
    fn begin(&self, operation: Operation) -> u64 {
        let count = &mut self.faults.lock().counts[operation as usize];
        *count += 1;
        *count - 1
    }

    /// Holds an operation that has begun. Returns its fault and its delay.
    fn meet(
        &self,
        (operation, number): (Operation, u64),
        offset: u64,
        len: u64,
    ) -> (Option<Fault>, Duration) {
        self.holds.pass(operation);
        let hook = self.hook.lock().clone();
        hook.iter().for_each(|hook| hook.0(operation, offset));
        let faults = self.faults.lock();
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
        (found, delay)
    }

    /// Makes and records a change. `apply` gets an offset of the device and the same range relative
    /// to the offset of the operation.
    fn change(
        &self,
        operation: Operation,
        offset: u64,
        change: Change<'_>,
        durable: bool,
        apply: impl Fn(u64, Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let make = || self.change_now(operation, offset, change, durable, apply).map(|()| 0);
        self.ends(operation, 0, make).map(drop)
    }

    fn change_now(
        &self,
        operation: Operation,
        offset: u64,
        change: Change<'_>,
        durable: bool,
        apply: impl Fn(u64, Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let len = change.len();
        let count = self.begin(operation);
        let begin = |log: &mut Log| log.begin(operation, offset, change, durable);
        let number = self.log.lock().as_mut().map(begin);
        let (fault, delay) = self.meet((operation, count), offset, len);
        pause(delay);
        let mut log = self.log.lock();
        let mut applied = false;
        let mut apply = |part: Range<u64>| {
            applied = true;
            apply(offset + part.start, part)
        };
        let result = match fault {
            None | Some(Fault::Delay(_)) => apply(0..len),
            Some(Fault::Skipped) => Ok(()),
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Revert | Fault::Panic) => Err(io::Error::from_raw_os_error(libc::EIO)),
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
            log.end(number, result.is_ok() && fault != Some(Fault::Skipped));
        }
        drop(log);
        panic_if(fault);
        result
    }

    fn read_now(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let number = self.begin(Operation::Read);
        let (fault, delay) = self.meet((Operation::Read, number), offset, buf.len() as u64);
        pause(delay);
        match fault {
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Revert) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(Fault::Panic) => resume_unwind(Box::new(())),
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
            Some(Fault::Skipped) => Ok(buf.len()),
            None | Some(Fault::Delay(_)) => self.inner.read(offset, buf),
        }
    }

    fn sync_now(&self) -> io::Result<()> {
        let count = self.begin(Operation::Sync);
        let number = self.log.lock().as_mut().map(Log::begin_sync);
        let (fault, delay) = self.meet((Operation::Sync, count), 0, u64::MAX);
        pause(delay);
        let failed = || Err(io::Error::from_raw_os_error(libc::EIO));
        let result = match fault {
            Some(Fault::Skipped) => return Ok(()),
            None | Some(Fault::Delay(_)) => {
                let gave_up = std::mem::take(&mut self.faults.lock().gave_up);
                if gave_up { failed() } else { self.inner.sync() }
            }
            Some(Fault::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Short(_) | Fault::Torn(_) | Fault::Revert | Fault::Panic) => failed(),
        };
        if let Some((log, number)) = self.log.lock().as_mut().zip(number) {
            let interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
            if fault == Some(Fault::Revert) {
                self.revert(log, log.begin_of(number))?;
            }
            log.end_sync(number, result.is_ok(), result.as_ref().is_err_and(interrupted));
        }
        panic_if(fault);
        result
    }
}

/// Panics, without a message, if that is the fault of an operation, whose failure is recorded.
fn panic_if(fault: Option<Fault>) {
    if fault == Some(Fault::Panic) {
        resume_unwind(Box::new(()));
    }
}

/// The end of an operation. Its drop calls the hook.
struct Ends {
    hook: Option<Arc<Hook<bool>>>,
    operation: Operation,
    has_failed: bool,
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.hook.iter().for_each(|hook| hook.0(self.operation, self.has_failed));
    }
}

/// Returns whether the mask of a torn operation includes the sector.
fn is_set(sectors: u64, sector: u64) -> bool {
    sectors >> (sector % 64) & 1 != 0
}

fn pause(time: Duration) {
    if time.is_zero() {
        return;
    }
    #[cfg(not(offlock_model))]
    thread::sleep(time);
    #[cfg(offlock_model)]
    thread::yield_now();
}

impl<D: BlockDevice> BlockDevice for FaultDevice<D> {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.inner.identity()
    }

    fn write_depth(&self) -> usize {
        self.inner.write_depth()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn alignment(&self) -> usize {
        self.inner.alignment().max(SECTOR as usize)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len();
        self.ends(Operation::Read, len, || self.read_now(offset, buf))
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.change(Operation::Write, offset, Change::Bytes(buf), false, |at, part| {
            self.inner.write(at, &buf[part.start as usize..part.end as usize])
        })
    }

    /// A durable write of one part is one operation. One of more is a write of each, and a sync.
    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>], durable: bool) -> io::Result<()> {
        if let ([part], true) = (parts, durable) {
            return self.change(
                Operation::Write,
                offset,
                Change::Bytes(part),
                true,
                |at, range| {
                    let bytes = &part[range.start as usize..range.end as usize];
                    self.inner.write_vectored(at, &[IoSlice::new(bytes)], true)
                },
            );
        }
        let mut at = offset;
        for part in parts {
            self.write(at, part)?;
            at += part.len() as u64;
        }
        if durable { self.sync() } else { Ok(()) }
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
        self.ends(Operation::Sync, 0, || self.sync_now().map(|()| 0)).map(drop)
    }
}
