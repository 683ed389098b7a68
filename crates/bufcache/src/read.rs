//! What users read: buffers, and through them devices.

use std::future::poll_fn;
use std::ops::Range;
use std::time::Instant;

use crate::cache::{Entered, Fill, Got, Reuse, Want};
use crate::error::GetError;
use crate::guard::{Pin, ReadGuard, Uncached};
use crate::handle::Device;
use crate::word::{IO, Key, WRITE};

impl Device {
    /// The buffer of a block, to be read; the device is read if it is not there.
    ///
    /// A hit is wait-free, allocates nothing and writes nothing that other threads use. A miss blocks
    /// for the device, or for another thread that reads the block already; one thread reads, whoever
    /// asks. The guard keeps the buffer until it drops: hold it briefly, and not across a wait.
    ///
    /// # Errors
    ///
    /// [`GetError`]; the next get tries again. [`GetError::WouldDeadlock`] where this thread has a guard to
    /// write the block, or reads it now (a verifier or device asks for the block it is at), or has
    /// [claimed](Self::claim) it, and its load has not ended for as long as the cache waits.
    #[inline]
    pub fn get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.get_key(key, Reuse::Likely)
    }

    /// The same, for who will not come again, as in a scan: a hit does not count as a use, and what it
    /// reads is the first to be evicted, unless somebody else comes for it.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn get_once(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.get_key(key, Reuse::None)
    }

    #[inline(always)]
    fn get_key(&self, key: Key, reuse: Reuse) -> Result<ReadGuard<'_>, GetError> {
        if let Some((held, is_sampled)) = self.shared.look_up(key, self.class, reuse) {
            let is_timed = self.shared.count_get();
            if is_sampled || is_timed {
                self.shared.note_and_time(key, self.class, is_sampled, is_timed);
            }
            return Ok(ReadGuard::new(self, held));
        }
        self.shared.counters.get.add(1);
        let began = Instant::now();
        let held = match self.shared.miss(&self.source, key, self.class, reuse, Fill::Read)? {
            Got::Shared(held) | Got::Locked(held) => held,
        };
        self.shared.miss_times.add(began);
        Ok(ReadGuard::new(self, held))
    }

    /// Begins to read blocks that are not there, for gets to come. What the device does not have is left out.
    ///
    /// It waits for nothing and never fails; it is a hint. The rest of a range is dropped where all buffers
    /// are in use ([`CacheStats::ahead_dropped`](crate::CacheStats::ahead_dropped)), and a read that fails is
    /// tried again by the get. Of a long range as much is read as an eighth of the cache holds.
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

    /// A pin on the buffer of a block, for tasks: does not block while the device reads.
    ///
    /// A hit, or a read that the device [begins](BlockDevice::begin_read). Dropping the future leaves the
    /// read going. Allocates where it has to wait, and no room is left from earlier waits.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get); [`GetError::NoFreeBuffers`] at once, where all are in use, or where loads of
    /// this device have its share of them and others want some.
    pub async fn get_async(&self, block: u64) -> Result<Pin, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let pin = loop {
            if let Some(pin) = self.pin(key)? {
                break pin;
            }
            let excluded = &self.source.writes.excluded;
            poll_fn(|context| excluded.poll_gone(key.sector(), context)).await;
        };
        let marks = IO | WRITE;
        poll_fn(|context| self.shared.poll_marks(pin.place, marks, context)).await?;
        match self.shared.failure(pin.place) {
            Some(failure) => Err(failure.of(block)),
            None => {
                self.shared.frames.reading(self.shared.frame_at(pin.place));
                Ok(pin)
            }
        }
    }

    /// A pin on a buffer that is there, or is being read or written: its bytes may not be looked at before that
    /// has ended. `None` where the block is being discarded.
    fn pin(&self, key: Key) -> Result<Option<Pin>, GetError> {
        let shared = &self.shared;
        let (reuse, fill) = (Reuse::Likely, Fill::Read);
        let want = Want { class: self.class, reuse, fill, blocks: false };
        let place = match shared.enter(&self.source, key, want)? {
            Entered::Pinned(place) => place,
            Entered::There(held) | Entered::Locked(held) => shared.pin_held(held)?,
            Entered::Excluded => return Ok(None),
        };
        let bytes = shared.frames.bytes(shared.frame_at(place));
        Ok(Some(Pin { device: self.clone(), place, bytes }))
    }

    /// The buffer of a block, if it is there. Wait-free.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), of which [`GetError::WouldBlock`] where that would read, or wait.
    #[inline]
    pub fn try_get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        if let Some(held) = self.shared.hit(key, self.class, Reuse::Likely) {
            self.shared.count_get();
            return Ok(ReadGuard::new(self, held));
        }
        self.shared.counters.get.add(1);
        self.shared.counters.busy_locked.add(1);
        Err(GetError::WouldBlock)
    }

    /// Reads a block from the device into a buffer of its own, which is cached for nobody: what is dirty of
    /// it the device does not have yet. Blocks for the device, and for a buffer.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn read_uncached(&self, block: u64) -> Result<Uncached, GetError> {
        let key = self.checked_key(block)?;
        self.source.check_read(key)?;
        let frame = self.shared.take_frame(&self.source, self.class)?;
        self.shared.counters.create.add(1);
        self.shared.frames.writing(frame);
        let mut buffer = Uncached { device: self.clone(), frame };
        self.shared.counters.get_read.add(1);
        self.source.read(key, &mut buffer).map_err(|failure| failure.of(block))?;
        Ok(buffer)
    }
}
