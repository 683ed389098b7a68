//! What users hold: the cache, its devices, and buffers.

mod aside;
mod past;
mod task;

use std::fmt;
use std::ops::Range;
use std::time::Instant;

use percpu::sync::Arc;
use percpu::sync::atomic::AtomicU64;

pub use self::aside::Invalidation;
use crate::builder::Builder;
use crate::cache::{Entered, Fill, Got, Reuse, Shared, Want};
use crate::device::BlockDevice;
use crate::dirty::{AttachOptions, Writes};
use crate::error::{BuildError, GetError};
use crate::guard::{Pin, ReadGuard, Uncached};
use crate::in_flight::InFlight;
use crate::source::Source;
use crate::stats::CacheStats;
use crate::times::Times;
use crate::wait::Bell;
use crate::word::{IO, Key, SECTOR_BITS, WRITE};

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
    /// It is let go with the last handle, guard and pin of it, and dropped then, or when the cleaner has ended
    /// its round; what is cached of it is evicted in its turn. Once 65,535 devices were attached, a call looks
    /// through the whole table for what is left of those that are gone, and then not again before as many were
    /// attached as were gone.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: not a size of this cache, too many devices, or one that is too large;
    /// [`BuildError::Attached`] for what is attached [already](BlockDevice::identity), until its last handle,
    /// guard and pin is gone, or it is [closed](Device::close), and no operation of it is in flight. The end of
    /// the last handle waits for those as long as the cache waits for a buffer; where a device hangs for
    /// longer, the file can be attached again once it has answered.
    pub fn attach(
        &self,
        device: impl BlockDevice,
        block_size: usize,
    ) -> Result<Device, BuildError> {
        self.attach_with(device, AttachOptions::new(block_size))
    }

    /// Attaches a device with a verifier, a log and rules for write errors.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach).
    pub fn attach_with(
        &self,
        device: impl BlockDevice,
        options: AttachOptions,
    ) -> Result<Device, BuildError> {
        let block_size = options.block_size;
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
        let identity = device.identity();
        // The last question: a device that panics here has no number and is not noted as attached.
        let is_read_only = device.is_read_only();
        if let Some(identity) = identity {
            self.shared.attach(identity, block_size)?;
        }
        let id = self.shared.take_id().inspect_err(|_| {
            identity.inspect(|&identity| self.shared.detach(identity));
        })?;
        let device = Box::new(device);
        let writes = Writes::new(id, options, self.shared.holds.clone());
        let cache = Arc::clone(&self.shared);
        self.shared.add_device();
        let in_flight = InFlight::new();
        let source = Arc::new(Source {
            cache,
            device,
            identity,
            in_flight,
            bell: Bell::new(),
            id,
            shift,
            blocks,
            len,
            is_read_only,
            writes,
        });
        let class = self.shared.frames.class(shift);
        let alive = Arc::new(Alive(Arc::clone(&source)));
        let shared = Arc::clone(&self.shared);
        Ok(Device { shared, source, class, alive, seen: AtomicU64::new(0) })
    }

    /// Lets it have so many bytes from now on, rounded down to blocks of the largest size, and at most what it
    /// was built with: memory above that is given back to the system as buffers are evicted.
    ///
    /// Blocks while buffers beyond it are in use, as long as the cache waits for a buffer.
    ///
    /// # Errors
    ///
    /// [`GetError::TooSmall`] for less than one block of the largest size, and nothing changes.
    /// [`GetError::NoFreeBuffers`]: some are in use still; they go as they are let go.
    pub fn resize(&self, capacity: usize) -> Result<(), GetError> {
        self.shared.resize(capacity)
    }

    /// Evicts up to so many buffers now, in the order in which misses would, and returns how many it
    /// were. It looks at each buffer once: those in use stay, and those that were used lately or that
    /// [weigh](ReadGuard::set_weight) something lose a part of that.
    pub fn shrink(&self, buffers: usize) -> usize {
        self.shared.shrink(buffers)
    }

    /// How long gets took so far: a snapshot, which allocates 8 KiB.
    pub fn times(&self) -> Times {
        self.shared.times()
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        CacheStats::of(&self.shared)
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

/// A device whose blocks are cached. Cheap to clone: clones are the same device.
///
/// A clone is told of write errors from then on; see [`sync`](Self::sync). Dropping the last handle, guard
/// or pin syncs the device, which blocks. On failure [`on_loss`](AttachOptions::on_loss) is called; use
/// [`close`](Self::close) to get the error.
pub struct Device {
    pub(crate) shared: Arc<Shared>,
    pub(crate) source: Arc<Source>,
    pub(crate) class: u8,
    alive: Arc<Alive>,
    /// Where it stands in the device's write errors.
    pub(crate) seen: AtomicU64,
}

impl Clone for Device {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            source: Arc::clone(&self.source),
            class: self.class,
            alive: Arc::clone(&self.alive),
            seen: AtomicU64::new(self.source.writes.seen_now()),
        }
    }
}

/// Ends with the last handle of a device.
struct Alive(Arc<Source>);

impl Drop for Alive {
    fn drop(&mut self) {
        let let_go = self.0.cache.let_go(&self.0);
        self.0.cache.detach_source(&self.0);
        if let Err(error) = let_go {
            self.0.writes.options.tell_loss(error);
        }
    }
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

    /// Whether hits of a block are sampled, for benches: it is there, and was marked when the cache was full.
    #[doc(hidden)]
    pub fn is_sampled(&self, block: u64) -> bool {
        let key = self.source.key(block);
        key.is_some_and(|key| self.shared.is_sampled(key))
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
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.shared.counters.get.add(1);
        let pin = loop {
            if let Some(pin) = self.pin(key)? {
                break pin;
            }
            let excluded = &self.source.writes.excluded;
            std::future::poll_fn(|context| excluded.poll_gone(key.sector(), context)).await;
        };
        let marks = IO | WRITE;
        std::future::poll_fn(|context| self.shared.poll_marks(pin.place, marks, context)).await?;
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

    /// Reads a block from the device into a buffer of its own. The copy is not cached. It lacks changes that
    /// are still dirty in the cache. Blocks for the device, and for a buffer.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn read_uncached(&self, block: u64) -> Result<Uncached, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.source.check_read(key)?;
        let frame = self.shared.take_frame(&self.source, self.class)?;
        self.shared.counters.create.add(1);
        self.shared.frames.writing(frame);
        let mut buffer = Uncached { device: self.clone(), frame };
        self.shared.counters.get_read.add(1);
        self.source.read(key, &mut buffer).map_err(|failure| failure.of(block))?;
        Ok(buffer)
    }

    /// Forgets a block: the next get reads it from the device. Guards that are there keep what they
    /// have. What was dirty is not written. Returns whether it was cached.
    ///
    /// Blocks while the block is being read or written.
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::NoMemory`] for this thread's slots, [`GetError::Busy`] or
    /// [`GetError::WouldDeadlock`] for a writer.
    pub fn invalidate(&self, block: u64) -> Result<bool, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.shared.invalidate(Some(&self.source), key)
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
