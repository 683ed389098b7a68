//! The handles of users: the cache, its devices, and the guards of buffers.

mod task;

use std::borrow::Borrow;
use std::future::Future;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::time::Duration;

use offlock_sync::Arc;
use offlock_sync::atomic::{AtomicU64, AtomicUsize};

use crate::cache::{
    self, Bypass, EnterResult, Fill, Limits, Load, Overwrite, Protected, Search, Shared,
};
use crate::device::IntoDevice;
use crate::dirty::{AttachOptions, WriteError, Writes};
use crate::error::{BuildError, GetError};
use crate::frames::{Frame, MOST_FRAMES};
use crate::hazard::Slot;
use crate::policy::Eviction;
use crate::source::{InFlight, Source};
use crate::stats::CacheStats;
use crate::wait::{block_on, runs_operation};
use crate::word::{Key, SECTOR_BITS, VALID};

/// The longest device, in bytes.
const MAX_LEN: u64 = 1 << (SECTOR_BITS + 9);

/// A cache for the blocks of devices, in memory of a fixed size.
///
/// Cheap to clone: all clones are the same cache.
#[derive(Clone, Debug)]
pub struct Cache {
    shared: Arc<Shared>,
}

impl Cache {
    pub(crate) fn from_shared(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Attaches a device.
    ///
    /// The device is dropped after its last handle, guard and pin, or when a round of the cleaner that
    /// has begun before ends. Its clean buffers are evicted in their turn. Devices have 65,535 numbers: once
    /// these are used up, a call searches the whole table for buffers of dropped devices, and frees
    /// their numbers.
    ///
    /// Attach a file to one cache of the process only. Another cache, as another process, does not
    /// know of the buffers of this one: each serves its own bytes, and may write older ones over
    /// those that the other one has written.
    pub fn attach(&self, device: impl IntoDevice) -> Result<Device, BuildError> {
        self.attach_with(device, AttachOptions::new())
    }

    /// Attaches a device with options, for example verifiers or a log.
    pub fn attach_with(
        &self,
        device: impl IntoDevice,
        options: AttachOptions,
    ) -> Result<Device, BuildError> {
        let device = device.into_device();
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
        // Called last: if the device panics in one of these calls, it has no number and does not count
        // as attached.
        let is_read_only = device.is_read_only();
        if let Some(identity) = identity {
            if !self.shared.lookup.ids.lock().attach(identity) {
                return Err(BuildError::Attached);
            }
        }
        let id = self.shared.take_id().inspect_err(|_| {
            identity.inspect(|&identity| self.shared.lookup.ids.lock().detach(identity));
        })?;
        self.shared.write_back.add_device();
        let source = Arc::new(Source {
            cache: Arc::clone(&self.shared),
            device,
            identity,
            in_flight: InFlight::new(),
            in_engines: AtomicUsize::new(0),
            id,
            shift,
            blocks,
            len,
            is_read_only,
            write_depth,
            writes: Writes::new(id, options),
        });
        let (shared, alive) = (Arc::clone(&self.shared), Arc::new(Alive(Arc::clone(&source))));
        Ok(Device { shared, source, alive, seen: AtomicU64::new(0) })
    }

    /// Evicts at most `buffers` buffers, in the order in which misses would, and returns their
    /// number.
    ///
    /// Visits each buffer once. Buffers in use stay. Buffers that were used lately
    /// stay and lose a use.
    pub fn shrink(&self, buffers: usize) -> usize {
        self.shared.frames.shrink(&self.shared.lookup, buffers)
    }

    /// Returns a snapshot of the counters.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        CacheStats::collect(&self.shared)
    }
}

/// A handle of an attached device. Cheap to clone: all clones are the same device.
///
/// A clone reports write errors from its creation on; see [`sync`](Self::sync). When the last
/// handle, guard and pin drops, dirty blocks are written and made durable, which blocks. If that
/// fails, [`AttachOptions::on_loss`] is called. [`close`](Self::close) returns the error instead.
#[derive(Debug)]
pub struct Device {
    pub(crate) shared: Arc<Shared>,
    pub(crate) source: Arc<Source>,
    alive: Arc<Alive>,
    /// The position of this handle in the write errors of the device.
    pub(crate) seen: AtomicU64,
}

impl Clone for Device {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            source: Arc::clone(&self.source),
            alive: Arc::clone(&self.alive),
            seen: AtomicU64::new(self.source.writes.seen_now()),
        }
    }
}

/// Its drop, with the last handle of a device, flushes and detaches the device.
#[derive(Debug)]
struct Alive(Arc<Source>);

impl Drop for Alive {
    fn drop(&mut self) {
        let end = |source: &Arc<Source>| {
            let flushed = block_on(source.cache.flush_orphan(source));
            block_on(source.cache.detach_source(source));
            if let Err(error) = flushed {
                source.writes.options.tell_loss(error);
            }
        };
        if self.0.may_wait() && !runs_operation() {
            return end(&self.0);
        }
        // The flush may wait for this thread: for a sync or write-back in its engine, or because
        // it ends the operations of the device.
        let source = Arc::clone(&self.0);
        _ = self.0.cache.call(source.id, move || end(&source));
    }
}

impl Device {
    /// Returns whether hits of a block are sampled. For benches.
    #[doc(hidden)]
    pub fn is_sampled(&self, block: u64) -> bool {
        let key = self.source.key(block);
        key.is_some_and(|key| self.shared.lookup.is_sampled(key))
    }

    /// Drops the buffer of a block: the next get reads the device. Guards keep the old buffer, and
    /// dirty bytes are not written. Returns whether the block was cached.
    ///
    /// Blocks while the block is being read or written.
    pub fn invalidate(&self, block: u64) -> Result<bool, GetError> {
        let key = self.checked_key(block)?;
        match self.shared.try_invalidate(Some(&self.source), key, 0, true)? {
            Some(was_cached) => Ok(was_cached),
            None => block_on(self.shared.invalidate(&self.source, key, 0)),
        }
    }

    /// Returns whether a block is cached or being read. Wait-free. Does not count as a use.
    pub fn is_cached(&self, block: u64) -> bool {
        self.source.key(block).is_some_and(|key| self.shared.lookup.is_cached(key))
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

// The builder of a cache.

/// The options of a [`Cache`] to build.
#[derive(Clone, Debug)]
#[must_use = "a builder makes no cache before `build`"]
pub struct Builder {
    capacity: usize,
    block_size: usize,
    eviction: Eviction,
    patience: Duration,
    limits: Limits,
}

impl Cache {
    /// Creates a cache of `capacity` bytes, in blocks of 4,096 bytes.
    pub fn new(capacity: usize) -> Result<Self, BuildError> {
        Self::builder(capacity).build()
    }

    /// Returns a builder of a cache of `capacity` bytes, to choose the block size, eviction and limits.
    pub fn builder(capacity: usize) -> Builder {
        Builder::new(capacity)
    }
}

impl Builder {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            block_size: 4096,
            eviction: Eviction::default(),
            patience: Duration::from_secs(1),
            limits: Limits::default(),
        }
    }

    /// Sets the size of the blocks in bytes: a power of two from 512 to 65,536, 4,096 by default. A
    /// program with blocks of two sizes has two caches.
    pub fn block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Sets how buffers are chosen for eviction.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets how long a miss waits if all buffers are in use, and other calls for guards of other
    /// threads: one second by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets how long a block stays dirty before the cleaner writes it: five seconds by default. The
    /// cleaner checks five times per second.
    pub fn write_back_after(mut self, age: Duration) -> Self {
        self.limits.age = age;
        self
    }

    /// Sets the limits of the dirty share of the capacity, in percent: 10 and 75 by default. Above
    /// `begin`, the cleaner writes without delay. Above `most`, a thread that dirties another block
    /// writes some blocks first.
    pub fn dirty_limits(mut self, begin: u32, most: u32) -> Self {
        let of_256 = |percent: u32| percent.min(100) * 256 / 100;
        (self.limits.begin, self.limits.most) = (of_256(begin), of_256(most));
        self
    }

    /// Builds the cache. Reserves its memory, which the system provides at first use, and allocates
    /// its table, about 5 % of the capacity with blocks of 4,096 bytes.
    ///
    /// The capacity is rounded down to whole blocks.
    pub fn build(self) -> Result<Cache, BuildError> {
        let size = self.block_size;
        if !size.is_power_of_two() || !(512..=65_536).contains(&size) {
            return Err(BuildError::BlockSize(size));
        }
        let count = self.capacity / size;
        if count == 0 || count > MOST_FRAMES {
            return Err(BuildError::Capacity(self.capacity));
        }
        let waits = (self.patience, self.limits);
        let shared = cache::make((count, size.ilog2()), self.eviction, waits)
            .map_err(|_| BuildError::NoMemory)?;
        Ok(Cache::from_shared(shared))
    }
}

// Methods for users that read and write a device by means other than the cache.

impl Device {
    /// Begins a load of a block that is not cached, for the caller to fill and to
    /// [finish](Load::finish), for example when one read of the device brings many blocks. Gets of
    /// the block wait for the load. Does not wait.
    ///
    /// Returns `None` if the block is cached or being read, if no buffer is free, or if other
    /// devices are attached and this one has its share of the cache in loads that have not ended. A
    /// cache with [`Eviction::Adaptive`] also refuses the first claim of a
    /// block while hardly a buffer is free (one in 64 may be) and fewer than one request in eight
    /// hits, because most blocks would be evicted before they are used. It grants the second claim, if not
    /// much else was claimed in between. A refused claim counts neither as a get nor as a miss.
    ///
    /// The bytes of the load are those that the buffer had before: any, also of another device. The
    /// caller fills all that it [finishes](Load::finish) with.
    ///
    /// A thread that holds the load and gets the block waits for itself. If it is the thread that
    /// called this method, the get ends with [`GetError::WouldDeadlock`] after as long as the cache
    /// waits for a buffer. In another thread the wait is not detected.
    ///
    /// Read the device after this call, not before. A write to the device in between is then either
    /// read, or followed by an [`invalidate`](Self::invalidate) that finds the load.
    pub fn claim(&self, block: u64) -> Result<Option<Load>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.claim(&self.source, key)
    }
}

// Calls that do not wait, and calls for programs that also use the device themselves.

impl Device {
    /// Makes a block of zeros as [`create`](Self::create) does, if that needs no wait: for a
    /// buffer, for guards of the block, or for dirty blocks to be written.
    pub fn try_create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        let locked = self.shared.lock_at_once(&self.source, key, Fill::Caller, Search::Short);
        self.counted(locked, Fill::Caller)
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
    pub fn flush_range(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.block_on(self.shared.flush(&self.source, blocks))
    }

    /// Writes whole blocks to the device past the cache, which drops its buffers of them: for
    /// ranges too long to be cached. Durable after a [`sync`](Self::sync). Gets of these blocks
    /// wait for it.
    ///
    /// `bytes` ends at the end of a block or of the device, and is aligned as the device requires. If the device
    /// fails, each sector of the range is old or new, and dirty blocks stay dirty.
    pub fn write_around(&self, first: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let size = self.block_size() as u64;
        let start = first.checked_mul(size);
        let end = start.and_then(|start| start.checked_add(bytes.len() as u64));
        let len = self.source.len;
        let fits = |&end: &u64| end == len || (end < len && end.is_multiple_of(size));
        let Some(end) = end.filter(fits) else { return Err(WriteError::OutOfRange) };
        let blocks = first..end.div_ceil(size);
        let how = Overwrite::Write(bytes);
        self.block_on(self.shared.overwrite(&self.source, blocks, how))
    }

    /// Excludes whole blocks from the cache while the caller writes them to the device itself. As
    /// [`write_around`](Self::write_around), without a blocked thread. Durable after a
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
    pub fn try_bypass(&self, blocks: Range<u64>) -> Result<Option<Bypass>, WriteError> {
        self.check_range(&blocks)?;
        self.shared.try_bypass(&self.source, blocks)
    }
}

// The methods of a device that read blocks.

impl Device {
    /// Returns a guard of the buffer of a block, read from the device if it is not cached.
    ///
    /// A hit is wait-free, allocates nothing and writes nothing that other threads use. A miss
    /// blocks for the device, or for the load that another thread has begun: the device reads the
    /// block once. The guard keeps the buffer until it drops: hold it briefly, and not across a
    /// wait.
    #[inline]
    pub fn get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        if let Some(buffer) = self.shared.get_hit(key) {
            return Ok(ReadGuard::new(self, buffer));
        }
        Ok(ReadGuard::new(self, self.shared.get(&self.source, key)?))
    }

    /// Begins to read blocks that are not cached, for later gets. Ignores blocks beyond the end of
    /// the device.
    ///
    /// A hint: it never waits and never fails. It drops the rest of a range if all buffers are in
    /// use ([`CacheStats::ahead_dropped`](crate::CacheStats::ahead_dropped)). A get repeats a read
    /// that failed. Reads at most as many blocks as an eighth of the cache holds.
    pub fn readahead(&self, blocks: Range<u64>) {
        let most = (self.shared.frames.capacity() >> self.source.shift) as u64 / 8;
        let end = blocks.end.min(self.source.blocks);
        let mut left = blocks.start..end.min(blocks.start.saturating_add(most.max(1)));
        let is_taken = |block| {
            let Some(key) =
                self.source.key(block).filter(|&key| !self.shared.lookup.is_cached(key))
            else {
                return true;
            };
            self.shared.counters.get.add(1);
            self.pin_now(key).is_some()
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
    /// Fails with [`GetError::NoFreeBuffers`] at once if all buffers are in use, or if the loads of this device
    /// have their share while another device is attached; and with [`GetError::Busy`] if a writer, also this
    /// thread or task, has the block for as long as the cache waits.
    pub async fn get_async(&self, block: u64) -> Result<Pin, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let entered = self.shared.miss(&self.source, key, Fill::Read, Duration::ZERO).await?;
        let pin = self.pin_entered(entered)?.expect("`miss` waits for a buffer and a discard");
        self.shared.wait_for_load(&self.source, key, pin.frame).await?;
        self.shared.frames.reading(pin.frame);
        Ok(pin)
    }

    /// Returns a pin on the buffer of a block, which may still be read or written. `None` if that has to
    /// wait, or fails.
    fn pin_now(&self, key: Key) -> Option<Pin> {
        let entered = [Search::Short, Search::Full].into_iter().find_map(|search| {
            match self.shared.enter(&self.source, key, Fill::Read, search, false) {
                Ok(EnterResult::NoBuffer) => None,
                entered => Some(entered),
            }
        });
        self.pin_entered(entered?.ok()?).ok()?
    }

    /// Returns a pin on a buffer that was entered.
    fn pin_entered(&self, entered: EnterResult) -> Result<Option<Pin>, GetError> {
        let shared = &self.shared;
        let frame = match entered {
            EnterResult::Pinned(frame) => frame,
            EnterResult::Cached(buffer) | EnterResult::Locked(buffer) => {
                shared.pin_protected(&buffer)?;
                buffer.frame
            }
            _ => return Ok(None),
        };
        let bytes = shared.frames.bytes(frame);
        Ok(Some(Pin { device: self.clone(), frame, bytes }))
    }

    /// Returns a guard of the buffer of a block if it is cached. Wait-free.
    #[inline]
    pub fn try_get(&self, block: u64) -> Result<ReadGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        if let Some(buffer) = self.shared.get_hit(key) {
            return Ok(ReadGuard::new(self, buffer));
        }
        self.shared.counters.get.add(1);
        self.shared.counters.busy_locked.add(1);
        Err(GetError::WouldBlock)
    }
}

// The methods of a device that write blocks, and that make writes durable.

impl Device {
    #[inline(always)]
    pub(crate) fn checked_key(&self, block: u64) -> Result<Key, GetError> {
        let out_of_range = || GetError::OutOfRange { block, blocks: self.source.blocks };
        self.source.key(block).ok_or_else(out_of_range)
    }

    /// Returns an exclusive guard of the buffer of a block, read from the device if it is not
    /// cached.
    ///
    /// Blocks as [`get`](Self::get) does, and until the readers and the writer of the block have
    /// dropped their guards and a write-back of it has ended. Later readers and writers wait for
    /// this guard.
    pub fn get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        self.lock(block, Fill::Read)
    }

    /// As [`get_mut`](Self::get_mut), if the block is cached and the call need not wait.
    pub fn try_get_mut(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.counted(self.shared.try_lock(&self.source, key, true), Fill::Read)
    }

    /// Counts a call that does not wait, and returns its guard.
    fn counted(
        &self,
        locked: Result<Protected, GetError>,
        fill: Fill,
    ) -> Result<WriteGuard<'_>, GetError> {
        self.shared.counters.get.add(1);
        self.shared.counters.busy_locked.add(i64::from(locked.is_err()));
        let Protected { slot, frame } = locked?;
        Ok(WriteGuard::new(self, Some(slot), frame, fill))
    }

    /// Returns an exclusive guard of a block of zeros, whatever it was before. Does not read the
    /// device.
    pub fn create(&self, block: u64) -> Result<WriteGuard<'_>, GetError> {
        self.lock(block, Fill::Caller)
    }

    fn lock(&self, block: u64, fill: Fill) -> Result<WriteGuard<'_>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        let Protected { slot, frame } = self.shared.lock_by_thread(&self.source, key, fill)?;
        Ok(WriteGuard::new(self, Some(slot), frame, fill))
    }

    /// Writes all dirty blocks to the device, in ascending order, neighbours together. They need
    /// not be durable then.
    ///
    /// Tries each block once, goes on after one that fails, and returns the first error. Each handle gets an
    /// error of another call or of the cleaner once.
    pub fn flush(&self) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.flush(&self.source, 0..u64::MAX));
        self.or_earlier(result)
    }

    /// Makes all writes durable whose guards dropped before this call, in any thread:
    /// [flushes](Self::flush) them, and then syncs the device. Concurrent calls share one sync of
    /// the device, which begins after their flushes. If it fails, the device is
    /// [poisoned](WriteError::Poisoned) until a [`reset`](Self::reset).
    pub fn sync(&self) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.sync(&self.source));
        self.or_earlier(result)
    }

    /// Returns the smallest [log position](WriteGuard::set_lsn) of a change that the device does not
    /// have: of dirty blocks, of blocks that are being written, and of blocks in write guards that are
    /// still held. `None` without such a block.
    ///
    /// A checkpoint deletes the entries of the log that no crash needs. It deletes none that belongs to a guard
    /// that is held meanwhile if it reads this position, or without one the end of the log, first; then
    /// [syncs](Self::sync), so that what was clean and not durable is durable; and then deletes the entries
    /// before the position.
    ///
    /// Looks at each such block, and delays calls of [`WriteGuard::set_lsn`] for that time: 0.3 ms for 100,000.
    pub fn oldest_lsn(&self) -> Option<u64> {
        self.source.writes.positions.first()
    }

    /// Makes these blocks durable, and not necessarily others, as a write with FUA requires. Ignores
    /// blocks beyond the end of the device. A failure poisons the device, as that of a [`sync`](Self::sync).
    pub fn write_through(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let result = self.block_on(self.shared.write_through(&self.source, blocks));
        self.or_earlier(result)
    }

    /// Discards whole blocks (TRIM): they read as zeros then, and dirty bytes of them are not
    /// written. Durable after a [`sync`](Self::sync). Gets of these blocks wait for it.
    ///
    /// A block behind the present end of a [growing](crate::AttachOptions::growing) device stays
    /// behind it, also if it was dirty: its get fails with
    /// [`GetError::ShortRead`]. If the device fails, each block is as before, or
    /// zeros.
    pub fn discard(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        self.block_on(self.shared.overwrite(&self.source, blocks, Overwrite::Discard))
    }

    /// Zeroes whole blocks on the device, as [`discard`](Self::discard). Fails with `EOPNOTSUPP`, and changes
    /// nothing, if the device cannot: [`create`](Self::create) the blocks then.
    pub fn zero(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        self.block_on(self.shared.overwrite(&self.source, blocks, Overwrite::Zero))
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
    /// next reset returns the block again. After an error, for a guard or a discard that does not end, the device
    /// stays poisoned, and another call goes on.
    pub fn reset(&self) -> Result<Lost, WriteError> {
        self.check_wait()?;
        block_on(self.shared.reset(&self.source)).map(Lost)
    }

    /// Closes the device: refuses writers, waits for the write guards, [syncs](Self::sync), and
    /// then refuses all reads and writes of the device, through any handle. Gets of cached blocks
    /// still succeed. After an error the device is open as before, unless it was closed already.
    ///
    /// A write meanwhile is refused with [`GetError::Closed`]. After `Ok` all other writes are
    /// durable. Visits every entry of the table.
    pub fn close(&self) -> Result<(), WriteError> {
        self.block_on(self.try_close())
    }

    async fn try_close(&self) -> Result<(), WriteError> {
        self.shared.close(&self.source, |synced| self.or_earlier(synced)).await
    }

    /// Makes a change of the device, and blocks until it ends.
    pub(crate) fn block_on(
        &self,
        change: impl Future<Output = Result<(), WriteError>>,
    ) -> Result<(), WriteError> {
        self.check_wait()?;
        block_on(change)
    }

    /// Returns an error if the calling thread must not block for changes of the device.
    fn check_wait(&self) -> Result<(), WriteError> {
        if self.source.may_wait() { Ok(()) } else { Err(WriteError::WouldDeadlock { block: None }) }
    }

    /// Adds the error of another call or of the cleaner to a success. An error of the device, which
    /// may be the same one, takes its place; any other leaves it to the next call.
    pub(crate) fn or_earlier(&self, result: Result<(), WriteError>) -> Result<(), WriteError> {
        use WriteError::{Io, Panicked, Poisoned};
        if !matches!(result, Ok(()) | Err(Io { .. } | Panicked { .. } | Poisoned { .. })) {
            return result;
        }
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

// The guards by which users read and write buffers.

/// A shared reference to a buffer, which is not written or evicted while the guard lives.
///
/// The guard cannot be sent to another thread; a [`Pin`], from [`pin`](Self::pin), can. A guard
/// that is forgotten ([`mem::forget`](std::mem::forget)) keeps the buffer for ever.
///
/// ```compile_fail
/// fn sends<T: Send>() {}
/// sends::<bufcache::ReadGuard<'static>>();
/// ```
#[derive(Debug)]
#[must_use = "the buffer is kept only while the guard lives"]
pub struct ReadGuard<'d> {
    device: &'d Device,
    slot: &'static Slot,
    bytes: NonNull<[u8]>,
}

impl<'d> ReadGuard<'d> {
    #[inline(always)]
    pub(crate) fn new(device: &'d Device, Protected { slot, frame }: Protected) -> Self {
        Self { device, slot, bytes: device.shared.frames.bytes(frame) }
    }

    /// Returns a pin on the buffer, which may be sent to another thread. Costs one write to shared
    /// memory.
    pub fn pin(&self) -> Result<Pin, GetError> {
        let entry = self.slot.entry();
        // SAFETY: the slot of this guard names an entry of the cache's table, which lives as long
        // as `device`.
        let entry = unsafe { entry.as_ref() };
        entry.pin_and_read_on()?;
        let word = entry.word();
        debug_assert!(word.has(VALID));
        Ok(Pin { device: self.device.clone(), frame: word.frame(), bytes: self.bytes })
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot keeps the buffer from eviction and from writers, so its bytes are
        // read-only (invariant 1 of `frames`).
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

/// A shared reference to a buffer that may be sent to another thread. From [`ReadGuard::pin`].
#[derive(Debug)]
#[must_use = "the buffer is kept only while the pin lives"]
pub struct Pin {
    device: Device,
    frame: Frame,
    bytes: NonNull<[u8]>,
}

// SAFETY: the pin is a count in the entry, not bound to a thread, and keeps the bytes read-only.
// The other fields are `Send`.
unsafe impl Send for Pin {}
// SAFETY: a shared reference only reads the bytes, which no thread writes while the pin exists.
unsafe impl Sync for Pin {}

impl Deref for Pin {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pin keeps the buffer from eviction and from writers, so its bytes are
        // read-only (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let shared = &self.device.shared;
        // The bytes of a load that is not over were not read through this pin.
        if cfg!(offlock_loom) && shared.has_ended(self.frame) {
            shared.frames.reading_at(self.bytes);
        }
        shared.unpin(self.frame);
    }
}

/// An exclusive reference to a buffer, which no other guard reads or writes: a [`WriteGuard`] or an
/// [`OwnedWriteGuard`]. Other threads and tasks wait.
///
/// A changed buffer becomes dirty when the guard drops. It is written to the device later: by the
/// cleaner, by a [`sync`](Device::sync), or because its memory is needed. A guard that drops in a
/// panic does the same, and the changes up to the panic stay. A guard that is forgotten keeps the buffer
/// for ever, and each sync waits for it as long as the cache waits.
#[derive(Debug)]
#[must_use = "the buffer is the holder's only while the guard lives"]
pub struct Exclusive<D: Borrow<Device>> {
    device: D,
    /// The hazard slot, if the guard is bound to a thread.
    slot: Option<&'static Slot>,
    frame: Frame,
    bytes: NonNull<[u8]>,
    modified: bool,
}

/// An exclusive guard of a thread. It cannot be sent to another one.
///
/// ```compile_fail
/// fn sends<T: Send>() {}
/// sends::<bufcache::WriteGuard<'static>>();
/// ```
pub type WriteGuard<'d> = Exclusive<&'d Device>;

/// An exclusive guard for tasks, from [`Device::get_mut_async`], which may be sent to another thread. A
/// thread that holds it and waits for the same block is not detected, so that wait ends with
/// [`GetError::Busy`] rather than [`GetError::WouldDeadlock`].
///
/// ```
/// fn sends<T: Send>() {}
/// sends::<bufcache::OwnedWriteGuard>();
/// ```
pub type OwnedWriteGuard = Exclusive<Device>;

// SAFETY: the mark on the entry belongs to the guard, not to a thread, and the guard owns the bytes
// as a `Box` does. Its slot is `None`.
unsafe impl Send for OwnedWriteGuard {}
// SAFETY: a shared reference only reads the bytes, and the mark keeps writers out.
unsafe impl Sync for OwnedWriteGuard {}

impl<D: Borrow<Device>> Exclusive<D> {
    fn new(device: D, slot: Option<&'static Slot>, frame: Frame, fill: Fill) -> Self {
        let bytes = device.borrow().shared.frames.bytes(frame);
        Self { device, slot, frame, bytes, modified: fill == Fill::Caller }
    }

    /// Keeps the block from being written until the [log](crate::Wal) is durable up to
    /// `lsn`, or up to a larger position set before. Counts as a change. The smallest
    /// position since the block was clean counts for [`Device::oldest_lsn`].
    ///
    /// # Panics
    ///
    /// Panics if the device was attached without a [log](crate::AttachOptions::wal): the block
    /// would be written before the log entry that describes it.
    #[track_caller]
    pub fn set_lsn(&mut self, lsn: u64) {
        let Device { shared, source, .. } = self.device.borrow();
        assert!(source.writes.options.wal.is_some(), "set_lsn needs AttachOptions::wal");
        self.modified = true;
        shared.frames.header(self.frame).raise_lsn(lsn);
        source.writes.positions.add(self.frame, lsn);
    }
}

impl<D: Borrow<Device>> Drop for Exclusive<D> {
    fn drop(&mut self) {
        let Device { shared, source, .. } = self.device.borrow();
        shared.frames.writing(self.frame);
        shared.unlock_write(source, self.slot, self.frame, self.modified);
    }
}

impl<D: Borrow<Device>> Deref for Exclusive<D> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the guard's mark excludes writers and other readers (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl<D: Borrow<Device>> DerefMut for Exclusive<D> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.modified = true;
        // SAFETY: the guard's mark excludes other users of the bytes (invariant 1 of `frames`), and
        // `&mut self` excludes other references through this guard.
        unsafe { self.bytes.as_mut() }
    }
}
