//! What users write: buffers, and through them devices.

use std::fmt;
use std::ops::Range;

use crate::cache::{Fill, Wipe};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::guard::WriteGuard;
use crate::handle::Device;
use crate::wait::{Mode, now};
use crate::word::Key;

impl Device {
    pub(crate) fn checked_key(&self, block: u64) -> Result<Key, GetError> {
        let blocks = self.source.blocks;
        self.source.key(block).ok_or(GetError::OutOfRange { block, blocks })
    }

    /// The buffer of a block, to be written; the device is read if it is not there.
    ///
    /// Blocks as [`get`](Self::get) does, and until nobody else has the buffer: readers, writers, and the
    /// device while it is given what was written before. Those who come meanwhile wait for this one.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get); [`GetError::Busy`] after the cache's patience,
    /// [`GetError::WouldDeadlock`] where this thread has a guard of the block,
    /// [`GetError::Poisoned`] and [`GetError::Closed`].
    pub fn get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let held = self.shared.lock_write(&self.source, key, self.class, Fill::Read)?;
        Ok(WriteGuard::new(self, held))
    }

    /// The same, where that waits for nothing and reads nothing.
    ///
    /// # Errors
    ///
    /// As [`get_mut`](Self::get_mut), of which [`GetError::WouldBlock`] where that would wait.
    pub fn try_get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let held = self.shared.try_lock_write(&self.source, key, self.class).inspect_err(|_| {
            self.shared.counters.busy_locked.add(1);
        })?;
        Ok(WriteGuard::new(self, held))
    }

    /// The buffer of a block, to be written as a whole: it is zeros, whatever was there, and the device is
    /// not read.
    ///
    /// # Errors
    ///
    /// As [`get_mut`](Self::get_mut), but those of a read.
    pub fn create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let held = self.shared.lock_write(&self.source, key, self.class, Fill::Caller)?;
        self.source.writes.forget_load(&self.source.sectors(key));
        let mut guard = WriteGuard::new(self, held);
        guard.fill(0);
        Ok(guard)
    }

    /// Gives the device everything that is dirty, in the order of its blocks, neighbours together. It need
    /// not be durable then.
    ///
    /// Blocks. Tries each block once, and goes on behind one that fails.
    ///
    /// # Errors
    ///
    /// The first; what it is about is dirty still. An error that another call has met before, or the
    /// cleaner, is told once to each handle.
    pub fn flush(&self) -> Result<(), WriteError> {
        let result = now(self.shared.flush(&self.source, Mode::Thread));
        self.or_earlier(result)
    }

    /// Makes durable what was dirtied before this call, by whichever thread, guard dropped: it is
    /// [flushed](Self::flush), and then the device is synced by a call that begins after that. Callers at
    /// the same time share one.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush); [`WriteError::Poisoned`] where the device's sync fails, and from then
    /// on until a [`reset`](Self::reset).
    pub fn sync(&self) -> Result<(), WriteError> {
        let result = now(self.shared.sync(&self.source, Mode::Thread));
        self.or_earlier(result)
    }

    /// Makes those blocks durable, and others perhaps not: what a write with FUA asks for.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync): a durable write that fails poisons, too.
    pub fn write_through(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let result = now(self.shared.write_through(&self.source, blocks, Mode::Thread));
        self.or_earlier(result)
    }

    /// Has the device give up whole blocks (TRIM): they read as zeros, and what was dirty of them is not
    /// written. Durable after a [`sync`](Self::sync). Gets of these blocks wait for it.
    ///
    /// # Errors
    ///
    /// The device's, and then any of them may be what they were, or zeros;
    /// [`WriteError::OutOfRange`]; [`WriteError::Busy`] where one is being written for too long.
    pub fn discard(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        now(self.shared.wipe(&self.source, blocks, Wipe::Discard, Mode::Thread))
    }

    /// Zeroes whole blocks: by the device if it can, else in the cache.
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

    /// Lets a device be written again whose sync failed. A block that was written since the last good sync is
    /// dirty again, if it stayed in the cache since the write. The other blocks may be lost, and are returned.
    ///
    /// A block that was read from the device after the write is returned as well, even if it is cached: the
    /// device may have given the write up before its sync failed, and have served older bytes. The cache
    /// forgets such a block, and the next get returns what the device has. If the block was modified since, it
    /// stays dirty: the modification is written, and the rest of the block is what was read.
    ///
    /// The device may give a lost block up later. If another sync fails before one succeeds, the next reset
    /// returns the block again.
    ///
    /// # Errors
    ///
    /// [`WriteError::Busy`] or [`WriteError::WouldDeadlock`] for a writer's guard: the device stays
    /// poisoned, and another call goes on.
    pub fn reset(&self) -> Result<Lost, WriteError> {
        self.shared.reset(&self.source).map(Lost)
    }

    /// Ends it: refuses writers from now on, waits for those there are, [syncs](Self::sync), and then
    /// refuses what would read or write the device, through any of its handles. What is cached may still
    /// be got.
    ///
    /// Who wants to write meanwhile is told [`GetError::Closed`]: what was written is durable when this
    /// returns `Ok`, or was refused. Looks through the whole table.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync), and [`WriteError::Busy`] or [`WriteError::WouldDeadlock`] where somebody, or
    /// this thread, has a guard to write. Then nothing is closed: the handle comes back, writers are
    /// admitted again, what could not be written is dirty as before, and another call tries again.
    /// [`WriteError::Closed`]: another handle was closed before.
    pub fn close(self) -> Result<(), CloseError> {
        let closed = self.shared.close(&self.source, || self.sync());
        closed.map_err(|error| CloseError { error, device: self })
    }

    pub(crate) fn or_earlier(&self, result: Result<(), WriteError>) -> Result<(), WriteError> {
        let earlier = self.source.writes.look(&self.seen);
        match (result, earlier) {
            (Ok(()), Some(errno)) => Err(WriteError::Earlier { errno }),
            (result, _) => result,
        }
    }
}

/// Blocks that may be lost: written since the last good sync, and not in the cache all the time since.
#[must_use = "these blocks may be lost"]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lost(Vec<Range<u64>>);

impl Lost {
    /// Their numbers, ascending.
    pub fn blocks(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A device that could not be closed.
pub struct CloseError {
    /// Why.
    pub error: WriteError,
    /// Open as it was, unless [closed](WriteError::Closed) by another handle before.
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
