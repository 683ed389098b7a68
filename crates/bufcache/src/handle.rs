//! The handles of users: the cache and its devices.

mod aside;
mod past;
mod task;

use std::fmt;
use std::ops::Deref;

use offlock_sync::Arc;
use offlock_sync::atomic::{AtomicU64, AtomicUsize};

use crate::cache::Shared;
use crate::device::BlockDevice;
use crate::dirty::{AttachOptions, Writes};
use crate::error::{BuildError, GetError};
use crate::in_flight::InFlight;
use crate::source::Source;
use crate::stats::CacheStats;
use crate::wait::Bell;
use crate::word::SECTOR_BITS;

/// The longest device, in bytes.
const MAX_LEN: u64 = 1 << (SECTOR_BITS + 9);

/// A cache for the blocks of devices, in memory of a fixed size.
///
/// Cheap to clone: all clones are the same cache.
#[derive(Clone)]
pub struct Cache {
    shared: Arc<Shared>,
}

impl Cache {
    pub(crate) fn from_shared(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Attaches a device.
    ///
    /// The device is dropped after its last handle, guard and pin, or when the cleaner has ended
    /// its round. Its clean buffers are evicted in their turn. Devices have 65,535 numbers: once
    /// these are used up, a call searches the whole table for buffers of dropped devices, and frees
    /// their numbers.
    ///
    /// Attach a file to one cache of the process only. Another cache, as another process, does not
    /// know of the buffers of this one: each serves its own bytes, and may write older ones over
    /// those that the other one has written.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the cache has too many devices, or the device is too large or needs blocks of
    /// another size. [`BuildError::Attached`] if the [same file](BlockDevice::identity) is
    /// attached: until its last handle, guard and pin is dropped or it is [closed](Device::close),
    /// and none of its operations is in flight. The drop of the last handle waits for these as long
    /// as the cache waits for a buffer.
    pub fn attach(&self, device: impl BlockDevice) -> Result<Device, BuildError> {
        self.attach_with(device, AttachOptions::new())
    }

    /// Attaches a device with options: verifiers and a log.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach).
    pub fn attach_with(
        &self,
        device: impl BlockDevice,
        options: AttachOptions,
    ) -> Result<Device, BuildError> {
        let block_size = self.shared.frames.size();
        let alignment = device.alignment().max(1);
        if !block_size.is_multiple_of(alignment) {
            return Err(BuildError::Misaligned { block_size, alignment });
        }
        let mut len = device.len();
        if len > MAX_LEN {
            return Err(BuildError::DeviceTooLarge(len));
        }
        if options.grows && len.is_multiple_of(block_size as u64) {
            len = MAX_LEN;
        }
        let shift = block_size.ilog2();
        let blocks = len.div_ceil(block_size as u64);
        let identity = device.identity();
        let write_depth = device.write_depth();
        // The last question: a device that panics here has no number and is not noted as attached.
        let is_read_only = device.is_read_only();
        if let Some(identity) = identity {
            self.shared.attach(identity)?;
        }
        let id = self.shared.take_id().inspect_err(|_| {
            identity.inspect(|&identity| self.shared.detach(identity));
        })?;
        let device = Box::new(device);
        let writes = Writes::new(id, options);
        let cache = Arc::clone(&self.shared);
        self.shared.add_device();
        let in_flight = InFlight::new();
        let source = Arc::new(Source {
            cache,
            device,
            identity,
            in_flight,
            in_engines: AtomicUsize::new(0),
            bell: Bell::new(),
            id,
            shift,
            blocks,
            len,
            is_read_only,
            write_depth,
            writes,
        });
        let alive = Arc::new(Alive(Arc::clone(&source)));
        let shared = Arc::clone(&self.shared);
        Ok(Device { shared, source, alive, seen: Seen::Own(AtomicU64::new(0)) })
    }

    /// Sets the capacity in bytes, rounded down to whole blocks, and at most the one that the
    /// cache was built with. Returns memory above it to the system as buffers are evicted.
    ///
    /// Blocks while buffers beyond the capacity are in use, as long as the cache waits for a
    /// buffer.
    ///
    /// # Errors
    ///
    /// [`GetError::TooSmall`] for less than one block; nothing changes.
    /// [`GetError::NoFreeBuffers`] if buffers beyond the capacity stay in use; they are freed
    /// later.
    pub fn resize(&self, capacity: usize) -> Result<(), GetError> {
        self.shared.resize(capacity)
    }

    /// Evicts at most `buffers` buffers, in the order in which misses would, and returns their
    /// number.
    ///
    /// Visits each buffer once. Buffers in use stay. Buffers that were used lately
    /// stay and lose a use.
    pub fn shrink(&self, buffers: usize) -> usize {
        self.shared.shrink(buffers)
    }

    /// Returns a snapshot of the counters.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        CacheStats::collect(&self.shared)
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

/// A handle of an attached device. Cheap to clone: all clones are the same device.
///
/// A clone reports write errors from its creation on; see [`sync`](Self::sync). When the last
/// handle, guard and pin drops, dirty blocks are written and made durable, which blocks. If that
/// fails, [`AttachOptions::on_loss`] is called. [`close`](Self::close) returns the error instead.
pub struct Device {
    pub(crate) shared: Arc<Shared>,
    pub(crate) source: Arc<Source>,
    alive: Arc<Alive>,
    /// The position of this handle in the write errors of the device.
    pub(crate) seen: Seen,
}

/// The position of a handle in the write errors of its device.
pub(crate) enum Seen {
    Own(AtomicU64),
    /// That of a [call](Device::call_async), whose future passes it to the handle that made the call.
    OfCall(Arc<AtomicU64>),
}

impl Deref for Seen {
    type Target = AtomicU64;

    fn deref(&self) -> &AtomicU64 {
        match self {
            Self::Own(seen) => seen,
            Self::OfCall(seen) => seen,
        }
    }
}

impl Clone for Device {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            source: Arc::clone(&self.source),
            alive: Arc::clone(&self.alive),
            seen: Seen::Own(AtomicU64::new(self.source.writes.seen_now())),
        }
    }
}

/// Ends with the last handle of a device.
struct Alive(Arc<Source>);

impl Drop for Alive {
    fn drop(&mut self) {
        let end = |source: &Arc<Source>| {
            let flushed = source.cache.flush_orphan(source);
            source.cache.detach_source(source);
            if let Err(error) = flushed {
                source.writes.options.tell_loss(error);
            }
        };
        if self.0.may_wait() {
            return end(&self.0);
        }
        // A sync or write-back may be in an engine of this thread, which the flush would wait for.
        let source = Arc::clone(&self.0);
        self.0.cache.call_blocking(source.id, move || end(&source));
    }
}

impl Device {
    /// Returns whether hits of a block are sampled. For benches.
    #[doc(hidden)]
    pub fn is_sampled(&self, block: u64) -> bool {
        let key = self.source.key(block);
        key.is_some_and(|key| self.shared.is_sampled(key))
    }

    /// Drops the buffer of a block: the next get reads the device. Guards keep the old buffer, and
    /// dirty bytes are not written. Returns whether the block was cached.
    ///
    /// Blocks while the block is being read or written.
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::NoMemory`] for this thread's slots, [`GetError::Busy`]
    /// or [`GetError::WouldDeadlock`] for a writer.
    pub fn invalidate(&self, block: u64) -> Result<bool, GetError> {
        let key = self.checked_key(block)?;
        self.shared.invalidate(Some(&self.source), key)
    }

    /// Returns whether a block is cached or being read. Wait-free. Does not count as a use.
    pub fn is_cached(&self, block: u64) -> bool {
        self.source.key(block).is_some_and(|key| self.shared.is_cached(key))
    }

    /// Returns the number of blocks: of a [growing](crate::AttachOptions::growing) device the most there
    /// may be. The last one reads as zeros beyond the end of the device.
    pub fn blocks(&self) -> u64 {
        self.source.blocks
    }

    /// Returns the size of a block in bytes.
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
