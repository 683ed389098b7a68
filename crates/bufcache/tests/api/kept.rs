//! A device that keeps the operations which it begins.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;

use bufcache::{BlockDevice, Change, DeviceChange, Load, MemoryDevice};
use offlock_sync::Mutex;

/// What a [`KeptDevice`] does with an operation that it is to begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Begun {
    /// The device keeps the operation until the test ends it.
    #[default]
    Kept,
    /// The blocking method makes the operation.
    Deferred,
    /// The device ends the operation with success at once: all changes, and all reads.
    Ended,
    /// The device drops the operation.
    Dropped,
    /// The device panics, without a message.
    Panics,
}

/// A device in memory that keeps the operations which it begins, until the test ends them.
#[derive(Debug)]
pub(crate) struct KeptDevice {
    inner: MemoryDevice,
    /// The device begins no load: a blocking read makes it.
    pub(crate) reads: bool,
    /// The result of [`BlockDevice::write_depth`]; 0: the default.
    pub(crate) depth: usize,
    /// The result of [`BlockDevice::identity`].
    pub(crate) identity: Option<(u64, u64)>,
    /// What has begun and not ended.
    pub(crate) loads: Mutex<Vec<Load>>,
    pub(crate) writes: Mutex<Vec<DeviceChange>>,
    /// Discards and zeros.
    pub(crate) ranges: Mutex<Vec<DeviceChange>>,
    pub(crate) syncs: Mutex<Vec<DeviceChange>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    does: Begun,
    loads: u64,
    refused: Option<(Range<u64>, i32)>,
    blocked: BTreeSet<String>,
}

impl KeptDevice {
    /// Returns a device of so many ones.
    pub(crate) fn new(len: usize) -> Self {
        let (loads, writes, ranges, syncs, state) = Default::default();
        let inner = MemoryDevice::new(vec![1; len]);
        let (reads, depth, identity) = (false, 0, None);
        Self { inner, reads, depth, identity, loads, writes, ranges, syncs, state }
    }

    /// Returns how many loads have begun.
    pub(crate) fn begun(&self) -> u64 {
        self.state.lock().loads
    }

    /// Returns the names of the threads that have called a blocking method that changes the device.
    pub(crate) fn blocked(&self) -> Vec<String> {
        self.state.lock().blocked.iter().cloned().collect()
    }

    /// From now on the device does this with an operation. Those that it keeps stay.
    pub(crate) fn does(&self, begun: Begun) {
        self.state.lock().does = begun;
    }

    /// From now on the writes that begin in these bytes fail with this errno.
    pub(crate) fn refuse(&self, bytes: Range<u64>, errno: i32) {
        self.state.lock().refused = Some((bytes, errno));
    }

    /// Makes a write that has begun, and ends it.
    pub(crate) fn end_write(&self, write: DeviceChange) {
        let Change::Write { mut offset, parts, .. } = write.change() else { unreachable!() };
        let result = parts.iter().try_for_each(|part| {
            let start = offset;
            offset += part.len() as u64;
            self.check(start)?;
            self.inner.write(start, part)
        });
        write.finish(result);
    }

    fn check(&self, offset: u64) -> io::Result<()> {
        let refused = self.state.lock().refused.clone();
        let refused = refused.filter(|(bytes, _)| bytes.contains(&offset));
        refused.map_or(Ok(()), |(_, errno)| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Ends the writes that have begun, and returns how many these are.
    pub(crate) fn end_writes(&self) -> usize {
        let writes = std::mem::take(&mut *self.writes.lock());
        writes.into_iter().map(|write| self.end_write(write)).count()
    }

    /// Ends the syncs that have begun, and returns how many these are.
    pub(crate) fn end_syncs(&self) -> usize {
        let syncs = std::mem::take(&mut *self.syncs.lock());
        syncs.into_iter().map(|sync| sync.finish(Ok(()))).count()
    }

    /// Ends all operations as successes, and each later one as it begins.
    pub(crate) fn release(&self) {
        self.does(Begun::Ended);
        self.end_all();
    }

    fn end_all(&self) {
        let loads = std::mem::take(&mut *self.loads.lock());
        loads.into_iter().for_each(|mut load| {
            let read = self.inner.read(load.offset(), &mut load);
            load.finish(read);
        });
        let ranges = std::mem::take(&mut *self.ranges.lock());
        ranges.into_iter().for_each(|range| range.finish(Ok(())));
        self.end_writes();
        self.end_syncs();
    }

    fn keep<T>(&self, kept: &Mutex<Vec<T>>, operation: T, defer: fn(T)) {
        let does = self.state.lock().does;
        match does {
            Begun::Kept => {
                kept.lock().push(operation);
                // `release` may have ended the others before the push.
                if self.state.lock().does == Begun::Ended {
                    self.end_all();
                }
            }
            Begun::Deferred => defer(operation),
            Begun::Ended => {
                kept.lock().push(operation);
                self.end_all();
            }
            Begun::Dropped => {}
            Begun::Panics => resume_unwind(Box::new(())),
        }
    }

    fn note_that_it_blocks(&self) {
        let name = thread::current().name().unwrap_or_default().to_string();
        self.state.lock().blocked.insert(name);
    }

    /// The thread that drops the last handle ends its writes and syncs itself.
    fn defers(&self, is_blocking: bool) -> bool {
        is_blocking && self.state.lock().does == Begun::Kept
    }
}

impl BlockDevice for KeptDevice {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.identity
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(offset, buf)
    }

    fn begin_read(&self, load: Load) {
        if self.reads {
            return load.defer();
        }
        self.state.lock().loads += 1;
        self.keep(&self.loads, load, Load::defer);
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.note_that_it_blocks();
        self.check(offset)?;
        self.inner.write(offset, buf)
    }

    fn begin(&self, change: DeviceChange) {
        let kept = match change.change() {
            Change::Write { .. } => &self.writes,
            Change::Sync => &self.syncs,
            Change::Discard { .. } | Change::Zero { .. } => {
                return self.keep(&self.ranges, change, DeviceChange::defer);
            }
        };
        match self.defers(change.is_blocking()) {
            true => change.defer(),
            false => self.keep(kept, change, DeviceChange::defer),
        }
    }

    fn write_depth(&self) -> usize {
        if self.depth == 0 { self.inner.write_depth() } else { self.depth }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.discard(offset, len)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.zero(offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        self.note_that_it_blocks();
        Ok(())
    }
}
