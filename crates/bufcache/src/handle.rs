//! What users hold: the cache, its devices, and buffers.

mod aside;

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::time::Duration;

use percpu::sync::Arc;

pub use self::aside::Invalidation;
use crate::builder::Builder;
use crate::cache::{Asked, Held, Reuse, Shared};
use crate::device::BlockDevice;
use crate::error::{BuildError, GetError};
use crate::frames::Frame;
use crate::hazard::Slot;
use crate::source::{Source, Verify};
use crate::stats::CacheStats;
use crate::word::{Key, SECTOR_BITS, VALID};

/// Buffers for the blocks of a few devices, in memory of a fixed size.
///
/// Cheap to clone: clones are the same cache.
#[derive(Clone)]
pub struct Cache {
    shared: Arc<Shared>,
}

impl Cache {
    /// A cache of `capacity` bytes, in blocks of 4,096.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn new(capacity: usize) -> Result<Self, BuildError> {
        Self::builder(capacity).build()
    }

    /// Chooses block sizes and the rest.
    pub fn builder(capacity: usize) -> Builder {
        Builder::new(capacity)
    }

    pub(crate) fn from_shared(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Attaches a device, which is read in blocks of `block_size` bytes.
    ///
    /// It is let go with the last handle, guard and pin of it; what is cached of it then is evicted in
    /// its turn. Once 65,535 devices were attached, a call looks through the whole table for what is
    /// left of those that are gone, and then not again before as many were attached as were gone.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: not a size of this cache, too many devices, or one that is too large.
    pub fn attach(
        &self,
        device: impl BlockDevice,
        block_size: usize,
    ) -> Result<Device, BuildError> {
        self.attach_source(Box::new(device), block_size, None)
    }

    /// The same, with a verifier: what it returns false for counts as not read, and is cached for
    /// nobody. It is given the number of the block and its bytes.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach).
    pub fn attach_verified(
        &self,
        device: impl BlockDevice,
        block_size: usize,
        verify: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Result<Device, BuildError> {
        self.attach_source(Box::new(device), block_size, Some(Box::new(verify)))
    }

    fn attach_source(
        &self,
        device: Box<dyn BlockDevice>,
        block_size: usize,
        verify: Option<Verify>,
    ) -> Result<Device, BuildError> {
        if !self.shared.frames.has_size(block_size) {
            return Err(BuildError::BlockSize(block_size));
        }
        let alignment = device.alignment().max(1);
        if !block_size.is_multiple_of(alignment) {
            return Err(BuildError::Misaligned { block_size, alignment });
        }
        let len = device.len();
        if len > 1 << (SECTOR_BITS + 9) {
            return Err(BuildError::DeviceTooLarge(len));
        }
        let shift = block_size.ilog2();
        let blocks = len.div_ceil(block_size as u64);
        let (cache, id) = (Arc::clone(&self.shared), self.shared.take_id()?);
        let source = Arc::new(Source { cache, device, id, shift, blocks, verify });
        let class = self.shared.frames.class(shift);
        Ok(Device { shared: Arc::clone(&self.shared), source, class })
    }

    /// Lets it have so many bytes from now on, at most what it was built with: memory above that is
    /// given back to the system as buffers are evicted.
    ///
    /// Blocks while buffers beyond it are in use, as long as the cache waits for a buffer.
    ///
    /// # Errors
    ///
    /// [`GetError::NoFreeBuffers`]: some are in use still; they go as they are let go.
    pub fn resize(&self, capacity: usize) -> Result<(), GetError> {
        self.shared.resize(capacity)
    }

    /// Evicts up to so many buffers now, in the order in which misses would, and returns how many it
    /// were. It looks at each buffer once: those in use stay, and those that were used lately or that
    /// [weigh](ReadGuard::set_weight) something lose a part of that.
    ///
    /// # Errors
    ///
    /// [`GetError::Forked`].
    pub fn shrink(&self, buffers: usize) -> Result<usize, GetError> {
        self.shared.shrink(buffers)
    }

    /// What it did so far.
    ///
    /// # Errors
    ///
    /// [`GetError::Forked`] in a fork child, where it would have to wait.
    pub fn stats(&self) -> Result<CacheStats, GetError> {
        CacheStats::of(&self.shared)
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

/// A device whose blocks are cached. Cheap to clone: clones are the same device.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    source: Arc<Source>,
    class: u8,
}

impl Device {
    /// The buffer of a block, to be read; the device is read if it is not there.
    ///
    /// A hit is wait-free, allocates nothing and writes nothing that other threads use. A miss blocks
    /// for the device, or for another thread that reads the block already; one thread reads, whoever
    /// asks. The guard keeps the buffer until it drops: hold it briefly, and not across a wait.
    ///
    /// # Errors
    ///
    /// [`GetError`]; the next get tries again.
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
        if let Some(held) = self.shared.hit(key, self.class, reuse) {
            self.shared.count_get();
            return Ok(ReadGuard::new(self, held));
        }
        self.shared.counters.get.add(1);
        let held = self.shared.miss(&self.source, key, self.class, reuse)?;
        Ok(ReadGuard::new(self, held))
    }

    /// Has blocks read that are not there, for gets to come: by a thread of the cache's, which is started
    /// at the first call. What the device does not have is left out.
    ///
    /// It never blocks and never fails; it is a hint, and is dropped where too many wait already
    /// ([`CacheStats::ahead_dropped`](crate::CacheStats::ahead_dropped)), where all buffers are in use,
    /// where a read fails (the get tries again), and in a fork child. Of a long range as much is read
    /// as an eighth of the cache holds. Allocates at the first call only.
    pub fn readahead(&self, blocks: Range<u64>) {
        let most = (self.shared.frames.capacity() >> self.source.shift) as u64 / 8;
        let end = blocks.end.min(self.source.blocks);
        let mut left = blocks.start..end.min(blocks.start.saturating_add(most.max(1)));
        // Often they are there already, and nobody need be woken.
        while !left.is_empty() && self.is_cached(left.start) {
            left.start += 1;
        }
        if left.is_empty() {
            return;
        }
        let taken = if self.source.device.begins_reads() {
            left.filter(|&block| !self.is_cached(block)).all(|block| {
                self.shared.counters.get.add(1);
                let key = self.source.key(block);
                key.is_some_and(|key| self.ask(key, Duration::ZERO).is_ok())
            })
        } else {
            self.shared.ahead.ask(self, left)
        };
        if !taken {
            self.shared.counters.ahead_dropped.add(1);
        }
    }

    /// A pin on the buffer of a block, for tasks: does not block while the device reads.
    ///
    /// A hit, or a read that the device [begins](BlockDevice::begin_read); where it does not begin reads,
    /// a thread of the cache's reads for all. Dropping the future leaves the read going. Allocates
    /// where it has to wait, and no room is left from earlier waits.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get); [`GetError::NoFreeBuffers`] at once, where all are in use.
    pub async fn get_async(&self, block: u64) -> Result<Pin, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.shared.counters.get.add(1);
        let pin = self.ask(key, Duration::ZERO)?;
        std::future::poll_fn(|context| self.shared.poll_load(pin.place, context)).await?;
        match self.shared.failure(pin.place) {
            Some(failure) => Err(failure.of(block)),
            None => {
                self.shared.frames.reading(self.shared.frame_at(pin.place));
                Ok(pin)
            }
        }
    }

    /// A pin on a buffer that is there, or is being read: nobody may look at its bytes until it is.
    fn ask(&self, key: Key, patience: Duration) -> Result<Pin, GetError> {
        let asked = self.shared.ask(&self.source, key, self.class, Reuse::Likely, patience);
        let Asked(place) = asked?;
        let bytes = self.shared.frames.bytes(self.shared.frame_at(place));
        Ok(Pin { device: self.clone(), place, bytes })
    }

    /// For the thread that reads ahead.
    pub(crate) fn fetch(&self, block: u64) {
        if let Some(key) = self.source.key(block) {
            self.shared.read_ahead(&self.source, key, self.class);
        }
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

    /// Reads a block into a buffer of its own, which is cached for nobody.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn read_uncached(&self, block: u64) -> Result<Uncached, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        let frame = self.shared.take_frame(self.class)?;
        self.shared.counters.create.add(1);
        self.shared.frames.writing(frame);
        let mut buffer = Uncached { device: self.clone(), frame };
        self.shared.counters.get_read.add(1);
        self.source.read(key, &mut buffer).map_err(|failure| failure.of(block))?;
        Ok(buffer)
    }

    /// Forgets a block: the next get reads it from the device. Guards that are there keep what they
    /// have. Returns whether it was cached.
    ///
    /// Blocks while the block is being read.
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::NoMemory`] for this thread's slots, and
    /// [`GetError::Forked`].
    pub fn invalidate(&self, block: u64) -> Result<bool, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.shared.invalidate(key)
    }

    /// Whether a block is in the cache, or being read. Wait-free; counts as no use of it.
    pub fn is_cached(&self, block: u64) -> bool {
        self.source.key(block).is_some_and(|key| self.shared.is_cached(key))
    }

    /// How many blocks it has; the last may reach behind its end, where it reads as zeros.
    pub fn blocks(&self) -> u64 {
        self.source.blocks
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> usize {
        1 << self.source.shift
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("blocks", &self.blocks())
            .field("block_size", &self.block_size())
            .finish_non_exhaustive()
    }
}

/// A buffer that is read: it is not written, evicted or given to another block while this lives.
///
/// It belongs to its thread: [`pin`](Self::pin) makes one that does not. A forgotten one
/// ([`mem::forget`](std::mem::forget)) keeps the buffer for ever.
///
/// ```compile_fail
/// fn sends<T: Send>() {}
/// sends::<bufcache::ReadGuard<'static>>();
/// ```
#[must_use = "the buffer is kept only while the guard lives"]
pub struct ReadGuard<'d> {
    device: &'d Device,
    slot: &'static Slot,
    bytes: NonNull<[u8]>,
}

impl<'d> ReadGuard<'d> {
    #[inline(always)]
    fn new(device: &'d Device, Held { slot, frame }: Held) -> Self {
        Self { device, slot, bytes: device.shared.frames.bytes(frame) }
    }

    /// A pin on the buffer that may go to another thread. One shared write.
    ///
    /// # Errors
    ///
    /// [`GetError::TooManyPins`].
    pub fn pin(&self) -> Result<Pin, GetError> {
        let entry = self.slot.entry();
        // SAFETY: the slot is this guard's and names an entry of the device's table, which lives as
        // long as the device.
        let entry = unsafe { entry.as_ref() };
        entry.pin()?;
        let word = entry.word();
        debug_assert!(word.has(VALID));
        let place = self.device.shared.frames.header(word.frame()).place();
        Ok(Pin { device: self.device.clone(), place, bytes: self.bytes })
    }
}

impl ReadGuard<'_> {
    /// Lets the buffer survive so many passes of whoever looks for one to evict: 0 if it was not set.
    /// What one buffer leads to (the root of a tree) may weigh more than what leads nowhere.
    ///
    /// Takes the lock of misses. A buffer that is evicted loses it.
    ///
    /// # Errors
    ///
    /// [`GetError::Forked`].
    pub fn set_weight(&self, weight: u8) -> Result<(), GetError> {
        // SAFETY: as in `pin`.
        let entry = unsafe { self.slot.entry().as_ref() };
        Ok(self.device.shared.set_weight(entry.word().frame(), weight)?)
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot keeps the buffer from being taken apart, so its bytes are read only
        // (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for ReadGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.device.shared.frames.reading_at(self.bytes);
        self.slot.clear();
    }
}

impl fmt::Debug for ReadGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A buffer that is kept from eviction, from any thread. From [`ReadGuard::pin`].
#[must_use = "the buffer is kept only while the pin lives"]
pub struct Pin {
    device: Device,
    place: u32,
    bytes: NonNull<[u8]>,
}

// SAFETY: it reaches bytes that are read only while the pin is there, and what is shared anyway.
unsafe impl Send for Pin {}
// SAFETY: as above.
unsafe impl Sync for Pin {}

impl Deref for Pin {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a pinned buffer is not taken apart, so its bytes are read only.
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.device.shared.frames.reading_at(self.bytes);
        self.device.shared.unpin_place(self.place);
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A buffer that is cached for nobody: its holder's alone. From [`Device::read_uncached`].
pub struct Uncached {
    device: Device,
    frame: Frame,
}

impl Deref for Uncached {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the frame is this buffer's alone (invariant 1 of `frames`).
        unsafe { self.device.shared.frames.bytes(self.frame).as_ref() }
    }
}

impl DerefMut for Uncached {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed alone.
        unsafe { self.device.shared.frames.bytes(self.frame).as_mut() }
    }
}

impl Drop for Uncached {
    fn drop(&mut self) {
        self.device.shared.frames.writing(self.frame);
        self.device.shared.give(self.frame);
    }
}

impl fmt::Debug for Uncached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uncached").field("len", &self.len()).finish_non_exhaustive()
    }
}
