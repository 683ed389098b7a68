//! What is cached: anything that has blocks.

#[cfg(feature = "aio-reap")]
mod engine;
mod fault;
mod file;
mod memory;
mod power;

use std::io::{self, IoSlice};

#[cfg(feature = "aio-reap")]
pub use self::engine::EngineDevice;
pub use self::fault::{Fault, FaultDevice};
pub use self::file::FileDevice;
pub use self::memory::MemoryDevice;
pub use self::power::{Operation, Outcome, Recorded};
use crate::cache::{DeviceRange, DeviceSync, DeviceWrite, Load};

/// Something with blocks, used by many threads at once.
///
/// Its methods are called with no lock of the cache held. They may block, and may panic: the block
/// then counts as not read. A device that asks the cache for the block it is reading is told
/// [`GetError::WouldDeadlock`](crate::GetError::WouldDeadlock); one that is writing, discarding or
/// syncing must not ask the cache for the same blocks, or to sync, close or reset it: that waits
/// for itself.
///
/// The operations that a device begins ([`begin_read`](Self::begin_read) and the others) belong to
/// the device that is attached, at their offsets in it: `defer` has that device's blocking methods
/// called. A wrapper may hand them on to the device inside it only if the offsets are the same
/// there. One that shifts them leaves the methods out, and shifts in the blocking ones.
///
/// A read-only device needs [`len`](Self::len) and [`read`](Self::read). The other methods return
/// `EROFS` by default, or `EOPNOTSUPP` where the cache has another way to the same result.
pub trait BlockDevice: Send + Sync + 'static {
    /// How many bytes it has. Asked for when it is attached.
    fn len(&self) -> u64;

    /// Whether there is nothing in it.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it is on this system, the same at each call: a cache refuses a second device with the
    /// same, of whatever block size, as it would have two buffers of each byte, of which one is
    /// old. `None`: the program that attaches it has to prevent that.
    ///
    /// Of a file that is the number of its file system and its own; of a block device, its number
    /// and the largest there is.
    fn identity(&self) -> Option<(u64, u64)> {
        None
    }

    /// Whether it takes no changes. Asked for when it is attached: then writers are refused at
    /// once, with [`GetError::ReadOnly`](crate::GetError::ReadOnly), and not when a block is
    /// written back. The cache never calls [`sync`](Self::sync) of such a device.
    fn is_read_only(&self) -> bool {
        false
    }

    /// What offsets, lengths and the addresses of buffers must be multiples of, in bytes: a power
    /// of two. Blocks may be as small as that.
    fn alignment(&self) -> usize {
        1
    }

    /// Reads at `offset` and says how much: less than `buf` has only at the end of the device.
    ///
    /// `offset` and the length are multiples of the block size it was attached with, and `buf` is
    /// aligned to it.
    ///
    /// # Errors
    ///
    /// The device's. `Interrupted` is tried again.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;

    /// Begins to read a block, and returns without waiting: the [`Load`] [ends](Load::finish) when
    /// the bytes are there, in any thread.
    ///
    /// A device without a way of its own leaves it out: then a thread of the cache calls
    /// [`read`](Self::read), or the calling thread where that [blocks](Load::is_blocking) for the
    /// block anyway.
    fn begin_read(&self, load: Load) {
        load.defer();
    }

    /// Writes all of `buf`, which ends where the device does at the latest. It is there for every
    /// read from then on; after a loss of power it is once a [`sync`](Self::sync) that began later
    /// has succeeded.
    ///
    /// # Errors
    ///
    /// The device's; then any of the sectors may have been written.
    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let _ = (offset, buf);
        Err(read_only())
    }

    /// The same, and what it wrote is there after a loss of power (FUA). Writes, and
    /// [syncs](Self::sync), where a device has no better way.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), and as [`sync`](Self::sync).
    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(offset, buf)?;
        self.sync()
    }

    /// Writes parts that lie one behind the other on the device, as [`write`](Self::write) each,
    /// which is what it does unless a device has a better way.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let mut at = offset;
        for part in parts {
            self.write(at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// The same, durable when it returns.
    ///
    /// # Errors
    ///
    /// As [`write_durable`](Self::write_durable).
    fn write_vectored_durable(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        if let [part] = parts {
            return self.write_durable(offset, part);
        }
        self.write_vectored(offset, parts)?;
        self.sync()
    }

    /// Begins to write, and returns without waiting: the [`DeviceWrite`]
    /// [ends](DeviceWrite::finish) in any thread, and several may be under way, which do not
    /// overlap.
    ///
    /// A device without a way of its own leaves it out: then
    /// [`write_vectored`](Self::write_vectored), or the durable one, is called by the calling
    /// thread if that [blocks](DeviceWrite::is_blocking) for the write anyway, otherwise by a
    /// thread of the cache. So it is with the other changes.
    fn begin_write(&self, write: DeviceWrite) {
        write.defer();
    }

    /// How many writes a write-back [begins](Self::begin_write) before it waits for their ends: up
    /// to 256. Asked for when it is attached. The default keeps a disk busy and lets reads pass; a
    /// guess. A device whose answers take long wants more.
    fn write_depth(&self) -> usize {
        32
    }

    /// Begins to [discard](Self::discard) a range; see [`begin_write`](Self::begin_write).
    fn begin_discard(&self, range: DeviceRange) {
        range.defer();
    }

    /// Begins to [zero](Self::zero) a range; see [`begin_write`](Self::begin_write).
    fn begin_zero(&self, range: DeviceRange) {
        range.defer();
    }

    /// Begins to [sync](Self::sync); see [`begin_write`](Self::begin_write).
    fn begin_sync(&self, sync: DeviceSync) {
        sync.defer();
    }

    /// Lets bytes read as zeros, and keeps room for them. As a write it is durable after a sync.
    ///
    /// # Errors
    ///
    /// The device's; `EOPNOTSUPP` where zeros have to be written, and it has done nothing.
    /// `Interrupted` is tried again.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Gives up bytes (TRIM): they read as zeros, and nothing need be kept for them.
    ///
    /// # Errors
    ///
    /// The device's; `EOPNOTSUPP` where it cannot, and has done nothing.
    /// `Interrupted` is tried again.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Makes durable what was written by calls that had returned when this one began.
    ///
    /// # Errors
    ///
    /// The device's: none of that need ever become durable then, whatever a later call says.
    /// `Interrupted` is tried again, and nothing is given up for it.
    fn sync(&self) -> io::Result<()> {
        Err(read_only())
    }
}

/// What a device says to a change that takes none.
fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

impl<D: BlockDevice + ?Sized> BlockDevice for std::sync::Arc<D> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn is_empty(&self) -> bool {
        (**self).is_empty()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        (**self).identity()
    }

    fn is_read_only(&self) -> bool {
        (**self).is_read_only()
    }

    fn alignment(&self) -> usize {
        (**self).alignment()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        (**self).read(offset, buf)
    }

    fn begin_read(&self, load: Load) {
        (**self).begin_read(load);
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (**self).write(offset, buf)
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (**self).write_durable(offset, buf)
    }

    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        (**self).write_vectored(offset, parts)
    }

    fn write_vectored_durable(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        (**self).write_vectored_durable(offset, parts)
    }

    fn begin_write(&self, write: DeviceWrite) {
        (**self).begin_write(write);
    }

    fn write_depth(&self) -> usize {
        (**self).write_depth()
    }

    fn begin_discard(&self, range: DeviceRange) {
        (**self).begin_discard(range);
    }

    fn begin_zero(&self, range: DeviceRange) {
        (**self).begin_zero(range);
    }

    fn begin_sync(&self, sync: DeviceSync) {
        (**self).begin_sync(sync);
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).zero(offset, len)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).discard(offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }
}
