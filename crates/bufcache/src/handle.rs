//! What users hold: the cache, its devices, and buffers.

mod aside;
mod past;
mod task;

use std::fmt;

use percpu::sync::Arc;
use percpu::sync::atomic::AtomicU64;

pub use self::aside::Invalidation;
use crate::cache::Shared;
use crate::device::BlockDevice;
use crate::dirty::{AttachOptions, Writes};
use crate::error::{BuildError, GetError};
use crate::in_flight::InFlight;
use crate::source::Source;
use crate::stats::CacheStats;
use crate::times::Times;
use crate::wait::Bell;
use crate::word::SECTOR_BITS;

/// Buffers for the blocks of a few devices, in memory of a fixed size.
///
/// Cheap to clone: clones are the same cache.
#[derive(Clone)]
pub struct Cache {
    shared: Arc<Shared>,
}

impl Cache {
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

    /// The same, with who looks at its blocks, what goes before them, and when to give up.
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
/// A clone is told of write errors from then on; see [`sync`](Self::sync). With the last handle, guard
/// and pin what is dirty is written and made durable, and who should know is
/// [told](AttachOptions::on_loss) where that fails; [`close`](Self::close) says it to its caller.
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
    /// Whether hits of a block are sampled, for benches: it is there, and was marked when the cache was full.
    #[doc(hidden)]
    pub fn is_sampled(&self, block: u64) -> bool {
        let key = self.source.key(block);
        key.is_some_and(|key| self.shared.is_sampled(key))
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
        let key = self.checked_key(block)?;
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
