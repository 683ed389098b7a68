//! For who must not wait, and for who goes to the device past the cache.

use std::ops::Range;

use super::Device;
use crate::cache::{Bypass, Wipe};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::guard::WriteGuard;
use crate::wait::{Mode, now};

impl Device {
    /// As [`create`](Self::create), where that waits for nothing: neither for a buffer, nor for others who
    /// have the block, nor for dirty blocks to become less.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create), of which [`GetError::WouldBlock`] where that would wait.
    pub fn try_create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        let held = self.shared.try_create(&self.source, key, self.class)?;
        self.source.writes.forget_load(&self.source.sectors(key));
        let mut guard = WriteGuard::new(self, held);
        guard.fill(0);
        Ok(guard)
    }

    /// Whether the device may be older than what was written of these blocks: some are dirty, or a
    /// [failed sync](WriteError::Poisoned) may have lost them. If not, a read of the device itself that
    /// begins after this call sees every write whose guard had dropped before it.
    ///
    /// Does not wait; a look at the table for each block, and none while nothing is dirty.
    pub fn is_newer(&self, blocks: Range<u64>) -> bool {
        self.shared.is_newer(&self.source, blocks)
    }

    /// Writes the dirty blocks of this range to the device, as [`flush`](Self::flush) does with all. Does not
    /// report earlier errors.
    ///
    /// # Errors
    ///
    /// The first error; the block it names stays dirty.
    pub fn flush_range(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.shared.flush_range(&self.source, blocks)
    }

    /// Writes whole blocks to the device at once, past the cache, which forgets what it has of them: for
    /// what is too long to be kept. Durable after a [`sync`](Self::sync). Gets of these blocks wait for it.
    ///
    /// `bytes` ends with a block, or where the device does, and is aligned as the device asks for.
    ///
    /// # Errors
    ///
    /// The device's, and then each sector of the range is as it was, or is as it should be, and what was
    /// dirty is so still; [`WriteError::OutOfRange`]; [`WriteError::Busy`] where a block is being written
    /// for too long; [`WriteError::Poisoned`] and [`WriteError::Closed`].
    pub fn write_past(&self, first: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let size = self.block_size() as u64;
        let start = first.checked_mul(size);
        let end = start.and_then(|start| start.checked_add(bytes.len() as u64));
        let len = self.source.len();
        let fits = |&end: &u64| end == len || (end < len && end.is_multiple_of(size));
        let Some(end) = end.filter(fits) else { return Err(WriteError::OutOfRange) };
        let blocks = first..end.div_ceil(size);
        now(self.shared.wipe(&self.source, blocks, Wipe::Write(bytes), Mode::Thread))
    }

    /// Keeps whole blocks from others, and has the cache forget what it has of them, so that the caller can write them by
    /// means of its own: as [`write_past`](Self::write_past), without a blocked thread. Durable after a
    /// [`sync`](Self::sync) that begins behind [`Bypass::finish`]. `None` where that would have to wait, or would take
    /// long.
    ///
    /// ```
    /// use std::os::unix::fs::FileExt;
    ///
    /// use bufcache::{Cache, FileDevice};
    ///
    /// let file = tempfile::tempfile()?;
    /// file.set_len(100_000)?;
    /// let disk = Cache::new(1 << 20)?.attach(FileDevice::new(file.try_clone()?)?, 4096)?;
    /// disk.get_mut(3)?.fill(1); // dirty, and out of date in a moment
    /// if let Some(bypass) = disk.try_bypass(3..5)? {
    ///     bypass.finish(file.write_all_at(&[7; 8192], 3 * 4096))?;
    ///     assert_eq!(disk.get(3)?[0], 7);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`write_past`](Self::write_past), but the device's.
    pub fn try_bypass(&self, blocks: Range<u64>) -> Result<Option<Bypass>, WriteError> {
        self.check_range(&blocks)?;
        self.shared.try_bypass(&self.source, blocks)
    }

    /// As [`zero`](Self::zero), where the device can.
    ///
    /// # Errors
    ///
    /// As [`zero`](Self::zero); the device's `EOPNOTSUPP` where it cannot, and then nothing is changed.
    pub fn zero_by_device(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        now(self.shared.wipe(&self.source, blocks, Wipe::Zero, Mode::Thread))
    }
}
