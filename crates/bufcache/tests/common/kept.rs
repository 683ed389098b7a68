//! A device that keeps the operations which it begins, until the test ends them.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;

use bufcache::{BlockDevice, DeviceRange, DeviceSync, DeviceWrite, Load, MemoryDevice};

#[derive(Default)]
#[allow(dead_code, reason = "not every test program uses all of it")]
pub(crate) struct Kept {
    pub(crate) len: u64,
    pub(crate) loads: Mutex<Vec<Load>>,
    pub(crate) writes: Mutex<Vec<DeviceWrite>>,
    pub(crate) ranges: Mutex<Vec<DeviceRange>>,
    pub(crate) syncs: Mutex<Vec<DeviceSync>>,
    /// How many loads have begun.
    pub(crate) begun: AtomicU64,
    /// It reads when it is asked to, and begins no load.
    pub(crate) reads: bool,
    /// See `write_depth`; 0: the default.
    pub(crate) depth: usize,
    /// It ends what it begins.
    pub(crate) is_released: AtomicBool,
    /// The threads that have called a blocking method.
    pub(crate) blocked: Mutex<BTreeSet<String>>,
}

#[allow(dead_code, reason = "not every test program uses all of it")]
impl Kept {
    pub(crate) fn new(len: usize) -> Self {
        Self { len: len as u64, ..Self::default() }
    }

    pub(crate) fn end_writes(&self) -> usize {
        let writes = std::mem::take(&mut *self.writes.lock().unwrap());
        writes.into_iter().map(|write| write.finish(Ok(()))).count()
    }

    pub(crate) fn end_syncs(&self) -> usize {
        let syncs = std::mem::take(&mut *self.syncs.lock().unwrap());
        syncs.into_iter().map(|sync| sync.finish(Ok(()))).count()
    }

    /// Ends all operations as successes, and each later one as it begins.
    pub(crate) fn release(&self) {
        self.is_released.store(true, Relaxed);
        let loads = std::mem::take(&mut *self.loads.lock().unwrap());
        loads.into_iter().for_each(|load| {
            let len = load.len();
            load.finish(Ok(len));
        });
        let ranges = std::mem::take(&mut *self.ranges.lock().unwrap());
        ranges.into_iter().for_each(|range| range.finish(Ok(())));
        self.end_writes();
        self.end_syncs();
    }

    /// Keeps an operation, unless the device is released.
    fn keep<T>(&self, kept: &Mutex<Vec<T>>, operation: T) {
        kept.lock().unwrap().push(operation);
        if self.is_released.load(Relaxed) {
            self.release();
        }
    }

    fn block(&self) {
        let name = thread::current().name().unwrap_or_default().to_string();
        self.blocked.lock().unwrap().insert(name);
    }
}

impl BlockDevice for Kept {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(1);
        Ok(buf.len())
    }

    fn begin_read(&self, load: Load) {
        if self.reads {
            return load.defer();
        }
        self.begun.fetch_add(1, Relaxed);
        self.keep(&self.loads, load);
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        self.block();
        Ok(())
    }

    fn begin_write(&self, write: DeviceWrite) {
        match write.is_blocking() {
            true => write.defer(), // as the last handle goes
            false => self.keep(&self.writes, write),
        }
    }

    fn write_depth(&self) -> usize {
        match self.depth {
            0 => MemoryDevice::new(vec![0; 4096]).write_depth(),
            depth => depth,
        }
    }

    fn begin_discard(&self, range: DeviceRange) {
        self.keep(&self.ranges, range);
    }

    fn sync(&self) -> io::Result<()> {
        self.block();
        Ok(())
    }

    fn begin_sync(&self, sync: DeviceSync) {
        match sync.is_blocking() {
            true => sync.defer(),
            false => self.keep(&self.syncs, sync),
        }
    }
}

/// Releases a device in its drop: the drop of a handle waits for the device.
#[allow(dead_code, reason = "not every test program uses all of it")]
pub(crate) struct Releases(pub(crate) Arc<Kept>);

impl Drop for Releases {
    fn drop(&mut self) {
        self.0.release();
    }
}
