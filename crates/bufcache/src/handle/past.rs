//! Calls that do not wait, and calls for programs that also use the device themselves.

use std::ops::Range;

use super::Device;
use crate::cache::{Bypass, Overwrite};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::guard::WriteGuard;
use crate::wait::Mode;

impl Device {
    /// Makes a block of zeros as [`create`](Self::create) does, if that needs no wait: for a
    /// buffer, for guards of the block, or for dirty blocks to be written.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create), and [`GetError::WouldBlock`] if the call would wait.
    pub fn try_create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        let buffer = self.shared.try_create(&self.source, key)?;
        self.source.writes.forget_load(&self.source.sectors(key));
        let mut guard = WriteGuard::new(self, buffer);
        guard.fill(0);
        Ok(guard)
    }

    /// Returns whether the device may lack a write of these blocks: one is dirty, or a [failed
    /// sync](WriteError::Poisoned) may have lost it. If not, a read of the device itself that
    /// begins after this call sees every write whose guard had dropped before it.
    ///
    /// Does not wait. Looks each block up in the table, unless the cache has no dirty block. Ignores
    /// blocks beyond the end of the device.
    pub fn is_newer(&self, blocks: Range<u64>) -> bool {
        self.shared.is_newer(&self.source, blocks)
    }

    /// Writes the dirty blocks of a range, as [`flush`](Self::flush) writes all. Does not report
    /// earlier errors. Ignores blocks beyond the end of the device.
    ///
    /// # Errors
    ///
    /// The first error; its block stays dirty.
    pub fn flush_range(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.block_on(self.shared.flush_range(&self.source, blocks))
    }

    /// Writes whole blocks to the device past the cache, which drops its buffers of them: for
    /// ranges too long to be cached. Durable after a [`sync`](Self::sync). Gets of these blocks
    /// wait for it.
    ///
    /// `bytes` ends at the end of a block or of the device, and is aligned as the device requires.
    ///
    /// # Errors
    ///
    /// The error of the device: then each sector of the range is old or new, and dirty blocks stay
    /// dirty. [`WriteError::OutOfRange`]; [`WriteError::Busy`] if a block is being written for
    /// longer than the cache waits; [`WriteError::WouldDeadlock`] if this thread has a write guard of
    /// a block; [`WriteError::Poisoned`] and [`WriteError::Closed`].
    pub fn write_past(&self, first: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let size = self.block_size() as u64;
        let start = first.checked_mul(size);
        let end = start.and_then(|start| start.checked_add(bytes.len() as u64));
        let len = self.source.len();
        let fits = |&end: &u64| end == len || (end < len && end.is_multiple_of(size));
        let Some(end) = end.filter(fits) else { return Err(WriteError::OutOfRange) };
        let blocks = first..end.div_ceil(size);
        let how = Overwrite::Write(bytes);
        self.block_on(self.shared.overwrite(&self.source, blocks, how, Mode::Thread))
    }

    /// Excludes whole blocks from the cache while the caller writes them to the device itself. As
    /// [`write_past`](Self::write_past), without a blocked thread. Durable after a
    /// [`sync`](Self::sync) that begins after [`Bypass::finish`]. Returns `None` if the call would
    /// wait, or would take long.
    ///
    /// ```
    /// use std::os::unix::fs::FileExt;
    ///
    /// use bufcache::{Cache, FileDevice};
    ///
    /// let file = tempfile::tempfile()?;
    /// file.set_len(100_000)?;
    /// let disk = Cache::new(1 << 20)?.attach(FileDevice::new(file.try_clone()?)?)?;
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
    /// As [`write_past`](Self::write_past), except for errors of the device.
    pub fn try_bypass(&self, blocks: Range<u64>) -> Result<Option<Bypass>, WriteError> {
        self.check_range(&blocks)?;
        self.shared.try_bypass(&self.source, blocks)
    }

    /// Zeroes blocks as [`zero`](Self::zero) does, but only if the device can.
    ///
    /// # Errors
    ///
    /// As [`zero`](Self::zero), and `EOPNOTSUPP` if the device cannot; then nothing is changed.
    pub fn zero_by_device(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        self.block_on(self.shared.overwrite(&self.source, blocks, Overwrite::Zero, Mode::Thread))
    }
}
