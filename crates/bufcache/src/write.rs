//! The methods of a device that write blocks, and that make writes durable.

use std::fmt;
use std::future::Future;
use std::ops::Range;

use crate::cache::{Fill, Overwrite};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::guard::WriteGuard;
use crate::handle::Device;
use crate::wait::{Mode, poll_ready};
use crate::word::Key;

impl Device {
    pub(crate) fn checked_key(&self, block: u64) -> Result<Key, GetError> {
        let blocks = self.source.blocks;
        self.source.key(block).ok_or(GetError::OutOfRange { block, blocks })
    }

    /// Returns an exclusive guard of the buffer of a block, read from the device if it is not
    /// cached.
    ///
    /// Blocks as [`get`](Self::get) does, and until the readers and the writer of the block have
    /// dropped their guards and a write-back of it has ended. Later readers and writers wait for
    /// this guard.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get); [`GetError::Busy`] after the cache's patience,
    /// [`GetError::WouldDeadlock`] if this thread has a guard of the block,
    /// [`GetError::Poisoned`] and [`GetError::Closed`].
    pub fn get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let buffer = self.shared.lock_write(&self.source, key, Fill::Read)?;
        Ok(WriteGuard::new(self, buffer))
    }

    /// As [`get_mut`](Self::get_mut), if the block is cached and the call need not wait.
    ///
    /// # Errors
    ///
    /// As [`get_mut`](Self::get_mut), and [`GetError::WouldBlock`] if the call would read or wait.
    pub fn try_get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let buffer =
            self.shared.try_lock_write(&self.source, key, Mode::Thread).inspect_err(|_| {
                self.shared.counters.busy_locked.add(1);
            })?;
        Ok(WriteGuard::new(self, buffer))
    }

    /// Returns an exclusive guard of a block of zeros, whatever it was before. Does not read the
    /// device.
    ///
    /// # Errors
    ///
    /// As [`get_mut`](Self::get_mut), except for errors of a read.
    pub fn create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let buffer = self.shared.lock_write(&self.source, key, Fill::Caller)?;
        self.source.writes.forget_load(&self.source.sectors(key));
        let mut guard = WriteGuard::new(self, buffer);
        guard.fill(0);
        Ok(guard)
    }

    /// Writes all dirty blocks to the device, in ascending order, neighbours together. They need
    /// not be durable then.
    ///
    /// Blocks. Tries each block once, and goes on after one that fails.
    ///
    /// # Errors
    ///
    /// The first error; its block stays dirty. Each handle gets an error of another call or of the
    /// cleaner once.
    pub fn flush(&self) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.flush(&self.source, Mode::Thread));
        self.or_earlier(result)
    }

    /// Makes all writes durable whose guards dropped before this call, in any thread:
    /// [flushes](Self::flush) them, and then syncs the device. Concurrent calls share one sync of
    /// the device, which begins after their flushes.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush); [`WriteError::Poisoned`] if the sync of the device fails, and
    /// from then on until a [`reset`](Self::reset).
    pub fn sync(&self) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.sync(&self.source, Mode::Thread));
        self.or_earlier(result)
    }

    /// Returns the smallest [log position](WriteGuard::set_lsn) of a change that the device does not
    /// have: of dirty blocks, of blocks that are being written, and of blocks in write guards that are
    /// still held. `None` without such a block.
    ///
    /// A checkpoint deletes the entries of the log that no crash needs. In this order, it deletes
    /// none that belongs to a guard that is held meanwhile:
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use bufcache::{AttachOptions, Cache, MemoryDevice, Wal};
    /// # struct Log;
    /// # impl Log {
    /// #     fn end(&self) -> u64 { 9 }
    /// #     fn delete_before(&self, _: u64) {}
    /// # }
    /// # impl Wal for Log {
    /// #     fn durable(&self) -> u64 { 9 }
    /// #     fn flush(&self, _: u64) -> std::io::Result<()> { Ok(()) }
    /// # }
    /// # let log = Arc::new(Log);
    /// # let options = AttachOptions::new().wal(Arc::clone(&log) as _);
    /// # let disk = MemoryDevice::new(vec![0; 100_000]);
    /// # let disk = Cache::new(1 << 20)?.attach_with(disk, options)?;
    /// let mut guard = disk.get_mut(3)?;
    /// guard.set_lsn(7); // before the entry 7 is appended to the log
    ///
    /// let end = log.end();
    /// let needed = disk.oldest_lsn().unwrap_or(end).min(end); // before the sync
    /// disk.sync()?; // what was clean and not durable is durable now
    /// log.delete_before(needed);
    /// # assert_eq!(needed, 7);
    /// # drop(guard);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn oldest_lsn(&self) -> Option<u64> {
        self.source.writes.positions.first()
    }

    /// Makes these blocks durable, and not necessarily others, as a write with FUA requires. Ignores
    /// blocks beyond the end of the device.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync): a durable write that fails poisons the device, too.
    pub fn write_through(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.write_through(&self.source, blocks, Mode::Thread));
        self.or_earlier(result)
    }

    /// Discards whole blocks (TRIM): they read as zeros then, and dirty bytes of them are not
    /// written. Durable after a [`sync`](Self::sync). Gets of these blocks wait for it.
    ///
    /// # Errors
    ///
    /// The error of the device: then each block is as before, or zeros. [`WriteError::OutOfRange`];
    /// [`WriteError::Busy`] if a block is being written for longer than the cache waits;
    /// [`WriteError::WouldDeadlock`] if this thread has a write guard of a block.
    pub fn discard(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        self.block_on(self.shared.overwrite(&self.source, blocks, Overwrite::Discard, Mode::Thread))
    }

    /// Zeroes whole blocks: on the device if it can, and otherwise in the cache.
    ///
    /// # Errors
    ///
    /// As [`discard`](Self::discard), and as [`create`](Self::create).
    pub fn zero(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        match self.zero_by_device(blocks.clone()) {
            Err(WriteError::Io { errno: libc::EOPNOTSUPP, .. }) => {}
            result => return result,
        }
        self.zero_by_cache(blocks)
    }

    pub(crate) fn zero_by_cache(&self, mut blocks: Range<u64>) -> Result<(), WriteError> {
        blocks.try_for_each(|block| self.create(block).map(drop))?;
        Ok(())
    }

    pub(crate) fn check_range(&self, blocks: &Range<u64>) -> Result<(), WriteError> {
        let fits = blocks.start <= blocks.end && blocks.end <= self.source.blocks;
        if fits { Ok(()) } else { Err(WriteError::OutOfRange) }
    }

    /// Lets a device be written again after a failed sync. Blocks that were written since the last
    /// good sync, and stayed in the cache since, become dirty again. Returns the others, which may
    /// be lost.
    ///
    /// A block that was read from the device after the write is returned as well, even if it is
    /// cached: the device may have given the write up before its sync failed, and have served older
    /// bytes. The cache forgets such a block, and the next get returns what the device has. If the
    /// block was modified since, it stays dirty: the modification is written, and the rest of the
    /// block is what was read.
    ///
    /// The device may give a lost block up later. If another sync fails before one succeeds, the
    /// next reset returns the block again.
    ///
    /// # Errors
    ///
    /// [`WriteError::Busy`] or [`WriteError::WouldDeadlock`] for a writer's guard: the device stays
    /// poisoned, and another call goes on.
    pub fn reset(&self) -> Result<Lost, WriteError> {
        self.check_wait()?;
        self.shared.reset(&self.source).map(Lost)
    }

    /// Closes the device: refuses writers, waits for the write guards, [syncs](Self::sync), and
    /// then refuses all reads and writes of the device, through any handle. Gets of cached blocks
    /// still succeed.
    ///
    /// A write meanwhile is refused with [`GetError::Closed`]. After `Ok` all other writes are
    /// durable. Visits every entry of the table.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync); [`WriteError::Busy`] or [`WriteError::WouldDeadlock`] if another
    /// thread or this one has a write guard. The device is then open as before, and the error has
    /// the handle. [`WriteError::Closed`] if the device was closed through another handle.
    pub fn close(self) -> Result<(), CloseError> {
        let closed = self.check_wait();
        let closed = closed.and_then(|()| self.shared.close(&self.source, || self.sync()));
        closed.map_err(|error| CloseError { error, device: self })
    }

    /// Makes a change of the device, and blocks until it ends.
    pub(crate) fn block_on(
        &self,
        change: impl Future<Output = Result<(), WriteError>>,
    ) -> Result<(), WriteError> {
        self.check_wait()?;
        poll_ready(change)
    }

    /// Returns an error if the calling thread must not block for changes of the device.
    fn check_wait(&self) -> Result<(), WriteError> {
        if self.source.may_wait() { Ok(()) } else { Err(WriteError::WouldDeadlock { block: None }) }
    }

    pub(crate) fn or_earlier(&self, result: Result<(), WriteError>) -> Result<(), WriteError> {
        let earlier = self.source.writes.take_new_error(&self.seen);
        match (result, earlier) {
            (Ok(()), Some(errno)) => Err(WriteError::Earlier { errno }),
            (result, _) => result,
        }
    }
}

/// Blocks that may be lost: written since the last good sync, and evicted or read again since.
#[must_use = "these blocks may be lost"]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lost(Vec<Range<u64>>);

impl Lost {
    /// Returns their numbers, ascending.
    pub fn blocks(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Returns whether no block is lost.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A device that could not be closed.
pub struct CloseError {
    /// The reason.
    pub error: WriteError,
    /// The handle. The device is open as before, unless another handle had
    /// [closed](WriteError::Closed) it.
    pub device: Device,
}

impl fmt::Debug for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CloseError").field(&self.error).finish()
    }
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the device is not closed: {}", self.error)
    }
}

impl std::error::Error for CloseError {}
