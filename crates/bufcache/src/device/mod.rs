//! The devices whose blocks are cached.

#[cfg(feature = "aio-reap")]
mod engine;
mod file;

use std::io::{self, IoSlice};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use self::file::FileDevice;
use crate::cache::{DeviceChange, Load};

/// A device with blocks, which many threads use at once.
///
/// The cache calls its methods with no lock held. They may block. They may panic, which fails the
/// operation. A device that gets the block that it is reading from the cache receives
/// [`GetError::WouldDeadlock`](crate::GetError::WouldDeadlock). One that is writing, discarding or
/// syncing must not ask the cache for the same blocks, or to sync, close or reset it: that waits
/// for itself.
///
/// The operations that [`begin_read`](Self::begin_read) and [`begin`](Self::begin) receive have
/// offsets of the attached device, and their `defer` calls the blocking methods of that device. A
/// wrapper may pass them to an inner device only if the offsets are the same there. A wrapper that
/// shifts offsets implements the blocking methods only.
///
/// A read-only device needs [`len`](Self::len) and [`read`](Self::read). The other methods return
/// `EROFS` by default, or `EOPNOTSUPP` where the cache has another way to the same result.
#[expect(clippy::len_without_is_empty, reason = "an empty device is of no use")]
pub trait BlockDevice: Send + Sync + 'static {
    /// Returns the length in bytes. Called when the device is attached.
    fn len(&self) -> u64;

    /// Returns what identifies the device on this system, always the same. A cache refuses a second
    /// device with the same identity, because it would have two buffers of each byte, one of them
    /// outdated. For a device without an identity the program must prevent that.
    ///
    /// For a file, it is the number of the file system and the inode; for a block device, the
    /// number of the device and `u64::MAX`.
    fn identity(&self) -> Option<(u64, u64)> {
        None
    }

    /// Returns whether the device cannot be changed. Called when it is attached. The cache refuses
    /// writers of a read-only device with [`GetError::ReadOnly`](crate::GetError::ReadOnly), and
    /// never calls its [`sync`](Self::sync).
    fn is_read_only(&self) -> bool {
        false
    }

    /// Returns the alignment in bytes that offsets, lengths and addresses of buffers need: a power
    /// of two. It is the smallest possible block size.
    fn alignment(&self) -> usize {
        1
    }

    /// Reads bytes at `offset`. Returns their number, less than the length of `buf` only at the end
    /// of the device.
    ///
    /// `offset` and the length are multiples of the block size of the attached device, and `buf` is
    /// aligned to it.
    ///
    /// # Errors
    ///
    /// Those of the device. The cache retries after `Interrupted`.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;

    /// Begins to read a block, and returns without a wait. Any thread [ends](Load::finish) the
    /// [`Load`] once the bytes are there. By default [defers](Load::defer) the load to
    /// [`read`](Self::read).
    fn begin_read(&self, load: Load) {
        load.defer();
    }

    /// Writes all of `buf`, which does not extend beyond the end of the device. Later reads return
    /// the bytes. They survive a power loss once a [`sync`](Self::sync) that began later has
    /// succeeded.
    ///
    /// # Errors
    ///
    /// Those of the device. Any of the sectors may have been written then.
    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let _ = (offset, buf);
        Err(read_only())
    }

    /// Writes parts that are adjacent on the device. If the write is to be `durable` (FUA), the bytes survive a
    /// power loss once this returns. By default [`write`](Self::write)s each of the parts, and then
    /// [syncs](Self::sync) if it is to be durable.
    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>], durable: bool) -> io::Result<()> {
        let mut at = offset;
        for part in parts {
            self.write(at, part)?;
            at += part.len() as u64;
        }
        if durable { self.sync() } else { Ok(()) }
    }

    /// Begins to write, discard, zero or sync, and returns without a wait. Any thread
    /// [ends](DeviceChange::finish) the [`DeviceChange`]. Several writes may be in flight, which do not overlap.
    /// By default [defers](DeviceChange::defer) the change to the blocking method.
    fn begin(&self, change: DeviceChange) {
        change.defer();
    }

    /// Returns the number of writes, at most 256, that a write-back [begins](Self::begin)
    /// before it waits for their ends. Called when the device is attached. The default
    /// keeps a disk busy and lets reads pass. A device with a long latency needs more. If the device makes
    /// each write when it begins, the write-back stops after 10 ms, and makes the written blocks clean first.
    fn write_depth(&self) -> usize {
        32
    }

    /// Zeroes bytes, and keeps space for them. Like a write it is durable after a sync, and extends
    /// what a write extends.
    ///
    /// # Errors
    ///
    /// Those of the device. `EOPNOTSUPP` if the device cannot do it and has changed nothing. The
    /// cache retries after `Interrupted`.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Discards bytes (TRIM): they read as zeros, and the device may free their space.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Makes the changes durable whose calls had returned when this one began.
    ///
    /// # Errors
    ///
    /// Those of the device. These changes may then be lost, even if a later sync succeeds. The
    /// cache retries after `Interrupted`, which loses nothing.
    fn sync(&self) -> io::Result<()> {
        Err(read_only())
    }
}

/// Repeats the call while a signal interrupts it.
pub(crate) fn retry_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Returns the error of a change of a read-only device.
fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

/// A device to [attach](crate::Cache::attach): a [`BlockDevice`], or an [`Arc`] of one, which the program shares
/// with the cache.
pub trait IntoDevice {
    /// Returns the device.
    fn into_device(self) -> Arc<dyn BlockDevice>;
}

impl<D: BlockDevice> IntoDevice for D {
    fn into_device(self) -> Arc<dyn BlockDevice> {
        Arc::new(self)
    }
}

impl<D: BlockDevice> IntoDevice for Arc<D> {
    fn into_device(self) -> Arc<dyn BlockDevice> {
        self
    }
}

impl IntoDevice for Arc<dyn BlockDevice> {
    fn into_device(self) -> Arc<dyn BlockDevice> {
        self
    }
}

// A device in memory.

/// A device whose bytes are in memory, for tests and small data.
#[derive(Debug)]
pub struct MemoryDevice {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryDevice {
    /// Returns a device with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: RwLock::new(bytes) }
    }

    fn bytes(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn bytes_mut(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Calls `change` with the bytes of a range.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the range ends beyond the end of the device.
    fn change(&self, offset: u64, len: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut bytes = self.bytes_mut();
        let from = usize::try_from(offset).ok();
        let end = offset.checked_add(len).and_then(|end| usize::try_from(end).ok());
        let part = from.zip(end).and_then(|(from, end)| bytes.get_mut(from..end));
        part.map(change).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
    }
}

impl BlockDevice for MemoryDevice {
    fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let count = buf.len().min(bytes.len() - from);
        buf[..count].copy_from_slice(&bytes[from..from + count]);
        Ok(count)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.change(offset, buf.len() as u64, |part| part.copy_from_slice(buf))
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(offset, len, |part| part.fill(0))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len)
    }

    /// Does nothing: the bytes live as long as the device.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
