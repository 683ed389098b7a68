//! What is cached: anything that has blocks.

#[cfg(feature = "aio-reap")]
mod engine;
mod fault;
mod file;
/// For the models: not part of the interface.
#[cfg(all(feature = "aio-reap", any(offlock_loom, offlock_shuttle)))]
pub mod lent;
mod memory;
mod power;

use std::io::{self, IoSlice};

#[cfg(feature = "aio-reap")]
pub use self::engine::{EngineDevice, LentEngine, lend_engine};
#[cfg(all(feature = "aio-reap", not(any(offlock_loom, offlock_shuttle))))]
pub(crate) use self::engine::{turn_engine, wait_by_engine};
pub use self::fault::{Fault, FaultDevice, Operation};
pub use self::file::FileDevice;
#[cfg(all(feature = "aio-reap", any(offlock_loom, offlock_shuttle)))]
pub(crate) use self::lent::{turn_engine, wait_by_engine};
pub use self::memory::MemoryDevice;
pub use self::power::{Outcome, Recorded};
use crate::cache::Load;

/// Something with blocks, used by many threads at once.
///
/// Its methods are called with no lock of the cache held. They may block, and may panic: the block
/// then counts as not read. A device that asks the cache for the block it is reading is told
/// [`GetError::WouldDeadlock`](crate::GetError::WouldDeadlock); one that is writing, discarding or syncing
/// must not ask the cache for the same blocks, or to sync it: that waits for itself.
///
/// A device that is read only needs [`len`](Self::len) and [`read`](Self::read). What changes it has
/// answers for that: `EROFS`, and `EOPNOTSUPP` where there are other ways to the same end.
pub trait BlockDevice: Send + Sync + 'static {
    /// How many bytes it has. Asked for when it is attached.
    fn len(&self) -> u64;

    /// Whether there is nothing in it.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it is on this system, the same at each call: a cache refuses a second device with the same, of
    /// whatever block size, as it would have two buffers of each byte, of which one is old. `None`: whoever
    /// attaches it sees to that.
    ///
    /// Of a file that is the number of its file system and its own; of a block device, its number and the
    /// largest there is.
    fn identity(&self) -> Option<(u64, u64)> {
        None
    }

    /// Whether it takes no changes. Asked for when it is attached: then writers are refused at once, with
    /// [`GetError::ReadOnly`](crate::GetError::ReadOnly), and not when a block is written back. The cache
    /// never calls [`sync`](Self::sync) of such a device.
    fn is_read_only(&self) -> bool {
        false
    }

    /// What offsets, lengths and the addresses of buffers must be multiples of, in bytes: a power of
    /// two. Blocks may be as small as that.
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

    /// Whether [`begin_read`](Self::begin_read) would begin one, were it called by this thread now.
    fn begins_reads(&self) -> bool {
        false
    }

    /// Begins to read a block, and returns: whoever has the [`Load`] [ends](Load::finish) it, when
    /// the bytes are there, in any thread.
    ///
    /// # Errors
    ///
    /// The load, where that cannot be done: it is read by [`read`](Self::read) then.
    fn begin_read(&self, load: Load) -> Result<(), Load> {
        Err(load)
    }

    /// Writes all of `buf`, which ends where the device does at the latest. It is there for every read
    /// from then on; after a loss of power it is once a [`sync`](Self::sync) that began later has
    /// succeeded.
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

    /// Writes parts that lie one behind the other on the device, as [`write`](Self::write) each, which is
    /// what it does unless a device has a better way.
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

    /// Does several writes, which do not overlap, in any order or at once, and says of each how it
    /// [ended](DeviceWrite::end); each durable, if asked for. One that it says nothing of counts as failed.
    ///
    /// The order of the slice has no meaning: a device may sort it, and each write keeps its result.
    fn write_batch(&self, writes: &mut [DeviceWrite<'_>], durable: bool) {
        for write in writes {
            let result = loop {
                let result = if durable {
                    self.write_vectored_durable(write.offset(), write.parts())
                } else {
                    self.write_vectored(write.offset(), write.parts())
                };
                match result {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            };
            write.end(result);
        }
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

/// One write of a [batch](BlockDevice::write_batch).
#[derive(Debug)]
pub struct DeviceWrite<'w> {
    offset: u64,
    parts: &'w [IoSlice<'w>],
    /// The place of this write's result, whatever the order in which a device leaves the batch.
    result: &'w mut Option<io::Result<()>>,
}

impl<'w> DeviceWrite<'w> {
    pub(crate) fn new(
        offset: u64,
        parts: &'w [IoSlice<'w>],
        result: &'w mut Option<io::Result<()>>,
    ) -> Self {
        Self { offset, parts, result }
    }

    /// Where it begins on the device, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What is written, one part behind the other.
    pub fn parts(&self) -> &'w [IoSlice<'w>] {
        self.parts
    }

    /// Says how it ended; the last word counts.
    pub fn end(&mut self, result: io::Result<()>) {
        *self.result = Some(result);
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

    fn begins_reads(&self) -> bool {
        (**self).begins_reads()
    }

    fn begin_read(&self, load: Load) -> Result<(), Load> {
        (**self).begin_read(load)
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

    fn write_batch(&self, writes: &mut [DeviceWrite<'_>], durable: bool) {
        (**self).write_batch(writes, durable);
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
