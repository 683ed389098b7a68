//! The shared state of a cache, and the path of a hit.
//!
//! ```text
//!  get ──► table: there? ──yes──► slot, fence, look again ──► guard          no shared write
//!             │ no
//!             ▼
//!          a frame (free, or evicted) ──► lock the home, look again ──► publish "loading", unlock
//!             ──► read the device, with no lock ──► publish ──► guard
//! ```

mod completion;
mod evict;
mod miss;
mod overwrite;
mod pool;
mod sync;
mod waiting;
mod write;
mod write_back;

use std::fmt;
use std::time::Duration;

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::{WordLock, coarse_clock};

pub use self::completion::{DeviceRange, DeviceSync, DeviceWrite};
use self::evict::EvictionState;
pub(crate) use self::evict::Search;
pub use self::miss::Load;
pub(crate) use self::miss::{EnterResult, Fill};
pub use self::overwrite::Bypass;
pub(crate) use self::overwrite::Overwrite;
use self::pool::{Lane, Pool};
use self::waiting::Waiting;
pub(crate) use self::write_back::Limits;
use crate::error::{BuildError, GetError};
use crate::frames::{Frame, Frames, Victim};
use crate::hazard::{self, Slot};
use crate::ids::{Identity, Ids};
use crate::policy::{Buffers, Eviction, Policy, Samples, Shadows};
use crate::stats::{Counter, HitCounters};
use crate::table::Table;
use crate::wait::{Reply, contain};
use crate::word::{Entry, Key, SAMPLED, WRITE};

/// The state that all handles of a cache share.
pub(crate) struct Shared {
    table: Table,
    pub(crate) frames: Frames,
    eviction: WordLock<EvictionState>,
    /// The numbers and identities of the devices.
    ids: WordLock<Ids>,
    waiting: Waiting,
    pool: Pool,
    dirty_bytes: AtomicUsize,
    /// The number of attached devices. A hint, so a plain atomic, which no model explores.
    devices: std::sync::atomic::AtomicUsize,
    /// The number of devices that have asked for a buffer. A hint, as `devices`.
    wanting: std::sync::atomic::AtomicUsize,
    pub(crate) counters: Counters,
    /// Hits of sampled blocks, for the shadows.
    samples: Samples,
    shadows: WordLock<Option<Shadows>>,
    /// Set while claims are refused, see [`Shadows::is_selective`]. A hint, as `devices`.
    is_selective: std::sync::atomic::AtomicBool,
    /// The number of hits, except for those in `counters.get`.
    hits: HitCounters,
    /// The capacity in bytes, for threads without the lock.
    room: AtomicUsize,
    /// The coarse time at which the cache was made.
    since: u64,
}

/// The counters. Those that the XFS buffer cache has, too, have its names.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Gets, except for hits that `hits` counts.
    pub(crate) get: Counter,
    pub(crate) create: Counter,
    pub(crate) page_retries: Counter,
    pub(crate) get_locked_waited: Counter,
    pub(crate) busy_locked: Counter,
    pub(crate) miss_locked: Counter,
    pub(crate) get_read: Counter,
    pub(crate) evictions: Counter,
    /// Blocks written to devices, and the calls that wrote them.
    pub(crate) written: Counter,
    pub(crate) write_calls: Counter,
    /// Syncs of devices.
    pub(crate) syncs: Counter,
    /// Ranges whose readahead was dropped.
    pub(crate) ahead_dropped: Counter,
    /// Claims of blocks that were not worth a buffer.
    pub(crate) claims_refused: Counter,
}

impl Counters {
    /// Returns counters that have their memory, so that the first miss that counts something
    /// allocates nothing.
    fn new() -> Self {
        let all = Self::default();
        #[cfg(not(offlock_model))]
        for counter in [
            &all.get,
            &all.create,
            &all.page_retries,
            &all.get_locked_waited,
            &all.miss_locked,
            &all.get_read,
            &all.evictions,
            &all.written,
            &all.write_calls,
            &all.busy_locked,
            &all.syncs,
            &all.ahead_dropped,
            &all.claims_refused,
        ] {
            let _ = counter.reserve(); // without memory a counter is only slower
        }
        all
    }
}

/// A buffer that a slot of this thread protects.
pub(crate) struct Protected {
    pub(crate) slot: &'static Slot,
    pub(crate) frame: Frame,
}

impl Shared {
    fn new(
        frames: Frames,
        table: Table,
        eviction: EvictionState,
        (patience, limits): (Duration, Limits),
        (samples, shadows): (Samples, Option<Shadows>),
    ) -> Self {
        let room = frames.capacity();
        Self {
            table,
            frames,
            eviction: WordLock::new(eviction),
            ids: WordLock::new(Ids::new()),
            waiting: Waiting::new(patience),
            room: AtomicUsize::new(room),
            pool: Pool::new(limits),
            dirty_bytes: AtomicUsize::new(0),
            devices: std::sync::atomic::AtomicUsize::new(0),
            wanting: std::sync::atomic::AtomicUsize::new(0),
            since: coarse_clock(),
            counters: Counters::new(),
            samples,
            shadows: WordLock::new(shadows),
            is_selective: std::sync::atomic::AtomicBool::new(false),
            hits: HitCounters::new(),
        }
    }

    /// Returns the buffer of `key` if it is cached and readable. Wait-free, without a shared write.
    pub(crate) fn hit(&self, key: Key) -> Option<Protected> {
        let (buffer, is_sampled, _) = self.look_up(key)?;
        if is_sampled {
            self.note_hit(key);
        }
        Some(buffer)
    }

    /// As [`hit`](Self::hit), but returns whether the caller is to call
    /// [`note_hit`](Self::note_hit), and the number of the slot's record.
    #[inline(always)]
    pub(crate) fn look_up(&self, key: Key) -> Option<(Protected, bool, u32)> {
        let entry = self.table.find(key)?;
        let (slot, record) = hazard::protect_numbered(entry).ok()?;
        if let Some(word) = entry.look(key) {
            if word.is_readable() {
                entry.count_hit(word);
                self.frames.reading(word.frame());
                let buffer = Protected { slot, frame: word.frame() };
                return Some((buffer, word.has(SAMPLED), record));
            }
        }
        slot.clear();
        None
    }

    /// Makes a call for a device on a thread of the cache. Returns the handle of its result.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        device: u16,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> std::sync::Arc<Reply<T>> {
        let reply = Reply::new();
        let end = std::sync::Arc::clone(&reply);
        self.call_blocking(device, Lane::Task, move || end.end(contain(call)));
        reply
    }

    /// Makes a call for a device on a thread of the cache, or on this one if no thread can be
    /// started.
    fn call_blocking(&self, device: u16, lane: Lane, call: impl FnOnce() + Send + 'static) {
        if let Err(call) = self.pool.queue_call(device, lane, Box::new(call)) {
            call();
        }
    }

    /// Counts a hit, whose buffer a slot of this thread's record with that number protects.
    #[inline(always)]
    pub(crate) fn count_get(&self, record: u32) {
        if !self.hits.count(record) {
            self.counters.get.add(1);
        }
    }

    /// Returns the number of gets.
    pub(crate) fn gets(&self) -> u64 {
        self.counters.get.sum().max(0) as u64 + self.hits.sum()
    }

    /// Returns a recent value of the capacity in bytes.
    pub(crate) fn room(&self) -> usize {
        self.room.load(Ordering::Relaxed) // a hint
    }

    pub(crate) fn is_cached(&self, key: Key) -> bool {
        self.table.find(key).is_some()
    }

    pub(crate) fn entry(&self, frame: Frame) -> &Entry {
        self.table.entry(self.frames.header(frame).place())
    }

    /// Takes a device number that no buffer has.
    pub(crate) fn take_id(&self) -> Result<u16, BuildError> {
        let mut ids = self.ids.lock();
        if let Some(id) = ids.take() {
            return Ok(id);
        }
        if ids.retired() == 0 {
            return Err(BuildError::TooManyDevices);
        }
        // No thread inserts blocks of retired numbers any more, so one walk finds them all. The
        // lock of the numbers carries the earlier insertions.
        for key in self.table.keys() {
            if ids.is_retired(key.device()) && !self.drop_retired(key)? {
                ids.keep(key.device());
            }
        }
        ids.clean();
        ids.take().ok_or(BuildError::TooManyDevices)
    }

    /// Drops the buffer of a block of a dropped device. Returns false if a write guard has it: one
    /// that was forgotten, because the device has no user.
    fn drop_retired(&self, key: Key) -> Result<bool, BuildError> {
        let mut rounds = 0;
        loop {
            match self.try_invalidate(None, key, 0, true) {
                Ok(Some(_)) => return Ok(true),
                Err(GetError::NoMemory) => return Err(BuildError::NoMemory),
                Err(_) => return Ok(false),
                Ok(None) if self.table.find(key).is_some_and(|entry| entry.word().has(WRITE)) => {
                    return Ok(false);
                }
                Ok(None) => self.waiting.spin(&mut rounds), // an evictor has it
            }
        }
    }

    /// Notes that a file is attached, so that it is not attached twice.
    pub(crate) fn attach(&self, identity: Identity) -> Result<(), BuildError> {
        if self.ids.lock().attach(identity) { Ok(()) } else { Err(BuildError::Attached) }
    }

    /// Notes that a file is not attached any more: no operation of it is in flight.
    pub(crate) fn detach(&self, identity: Identity) {
        self.ids.lock().detach(identity);
    }

    /// Retires the number of a dropped device.
    pub(crate) fn retire_id(&self, id: u16) {
        self.ids.lock().retire(id);
    }

    /// Returns the bytes of the buffers, in use or free but not released.
    pub(crate) fn bytes_in_use(&self) -> usize {
        let in_use = self.eviction.lock().in_use();
        self.frames.bytes_of(in_use)
    }

    /// Returns the eviction policy in use.
    pub(crate) fn eviction(&self) -> Eviction {
        self.eviction.lock().policy.rule()
    }

    pub(crate) fn capacity(&self) -> usize {
        let limit = self.eviction.lock().limit();
        self.frames.bytes_of(limit)
    }
}

#[cfg(not(offlock_model))]
impl Drop for Shared {
    fn drop(&mut self) {
        hazard::end_of(&self.table.addresses());
    }
}

impl Buffers for Shared {
    fn entry(&self, frame: Frame) -> &Entry {
        Shared::entry(self, frame)
    }

    fn victim(&self, frame: Frame) -> Victim {
        Victim { frame, place: self.frames.header(frame).place() }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

/// Returns the shared state of a cache of `count` buffers of `1 << shift` bytes. The cache has shadows
/// of about `sampled` blocks each, unless that is 0.
pub(crate) fn make(
    (count, shift): (usize, u32),
    (policy, sampled): (Policy, usize),
    waits: (Duration, Limits),
) -> Result<Shared, AllocError> {
    let frames = Frames::new(count, shift)?;
    let eviction = EvictionState::new(count, policy)?;
    let table = Table::new(count)?;
    let shadows = if sampled > 0 { Some(Shadows::new(sampled)?) } else { None };
    let sample = (Samples::new(sampled, count)?, shadows);
    Ok(Shared::new(frames, table, eviction, waits, sample))
}
