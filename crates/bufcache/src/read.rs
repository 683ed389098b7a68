//! The methods of a device that read blocks.

use std::ops::Range;

use crate::cache::{Entered, Fill, Got, Wait, Want};
use crate::error::GetError;
use crate::guard::{Pin, ReadGuard};
use crate::handle::Device;
use crate::word::{IO, Key};

impl Device {
    /// Returns a guard of the buffer of a block, read from the device if it is not cached.
    ///
    /// A hit is wait-free, allocates nothing and writes nothing that other threads use. A miss
    /// blocks for the device, or for the load that another thread has begun: the device reads the
    /// block once. The guard keeps the buffer until it drops: hold it briefly, and not across a
    /// wait.
    ///
    /// # Errors
    ///
    /// [`GetError`]; the next get tries again. [`GetError::WouldDeadlock`] if this thread has a
    /// write guard of the block, or is reading it (a verifier or device gets the block it is called
    /// for), or has [claimed](Self::claim) it and the load has not ended for as long as the cache
    /// waits.
    #[inline]
    pub fn get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        if let Some((buffer, is_sampled, record)) = self.shared.look_up(key, self.class) {
            self.shared.count_get(record);
            if is_sampled {
                self.shared.note_hit(key);
            }
            return Ok(ReadGuard::new(self, buffer));
        }
        self.shared.counters.get.add(1);
        let buffer = match self.shared.miss(&self.source, key, self.class, Fill::Read)? {
            Got::Shared(buffer) | Got::Locked(buffer) => buffer,
        };
        Ok(ReadGuard::new(self, buffer))
    }

    /// Begins to read blocks that are not cached, for later gets. Ignores blocks beyond the end of
    /// the device.
    ///
    /// A hint: it never waits and never fails. It drops the rest of a range if all buffers are in
    /// use ([`CacheStats::ahead_dropped`](crate::CacheStats::ahead_dropped)). A get repeats a read
    /// that failed. Reads at most as many blocks as an eighth of the cache holds.
    pub fn readahead(&self, blocks: Range<u64>) {
        let most = (self.shared.room() >> self.source.shift) as u64 / 8;
        let end = blocks.end.min(self.source.blocks);
        let mut left = blocks.start..end.min(blocks.start.saturating_add(most.max(1)));
        let is_taken = |block| {
            let Some(key) = self.source.key(block).filter(|&key| !self.shared.is_cached(key))
            else {
                return true;
            };
            self.shared.counters.get.add(1);
            matches!(self.pin(key), Ok(Some(_)))
        };
        if !left.all(is_taken) {
            self.shared.counters.ahead_dropped.add(1);
        }
    }

    /// Returns a pin on the buffer of a block, for tasks: does not block while the device reads.
    ///
    /// After a miss the device [begins](crate::BlockDevice::begin_read) to read. Dropping the
    /// future does not cancel the read, and keeps nothing of the task. A wait allocates.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), but [`GetError::NoFreeBuffers`] at once: all buffers are in use, or
    /// the loads of this device have their share while another device is attached; and
    /// [`GetError::Busy`] if a writer, also this thread or task, has the block for as long as the cache
    /// waits.
    pub async fn get_async(&self, block: u64) -> Result<Pin, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let pin = loop {
            if let Some(pin) = self.pin(key)? {
                break pin;
            }
            self.source.writes.excluded.wait_async(key.sector()).await;
        };
        self.shared.wait_for_marks(pin.place, IO).await;
        if !self.shared.has_ended(pin.place) {
            self.shared.wait_for_writer(pin.place).await?;
        }
        match self.shared.failure(pin.place) {
            Some(failure) => Err(failure.of(block)),
            None => {
                self.shared.frames.reading(self.shared.frame_at(pin.place));
                Ok(pin)
            }
        }
    }

    /// Returns a pin on the buffer of a block, which may still be read or written: the caller waits
    /// for that before it reads the bytes. `None` if the block is being discarded.
    fn pin(&self, key: Key) -> Result<Option<Pin>, GetError> {
        let shared = &self.shared;
        let want = Want { class: self.class, fill: Fill::Read, wait: Wait::None };
        let place = match shared.enter(&self.source, key, want)? {
            Entered::Pinned(place) => place,
            Entered::Cached(buffer) | Entered::Locked(buffer) => shared.pin_protected(buffer)?,
            Entered::Excluded => return Ok(None),
        };
        let bytes = shared.frames.bytes(shared.frame_at(place));
        Ok(Some(Pin { device: self.clone(), place, bytes }))
    }

    /// Returns a guard of the buffer of a block if it is cached. Wait-free.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), and [`GetError::WouldBlock`] if the call would read or wait.
    #[inline]
    pub fn try_get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        let found = self.shared.look_up(key, self.class);
        if let Some((buffer, is_sampled, record)) = found {
            if is_sampled {
                self.shared.note_hit(key);
            }
            self.shared.count_get(record);
            return Ok(ReadGuard::new(self, buffer));
        }
        self.shared.counters.get.add(1);
        self.shared.counters.busy_locked.add(1);
        Err(GetError::WouldBlock)
    }
}
