//! The shared state of a cache: four parts, each with its locks and invariants, and the operations on them.
//!
//! ```text
//!  get ──► Lookup: there? ──yes──► slot, fence, look again ──► guard          no shared write
//!             │ no
//!             ▼
//!          Frames: a frame, free or evicted ──► Lookup: lock the home, look again, insert, unlock
//!             ──► read the device, with no lock ──► publish ──► wake (Waiting) ──► guard
//!
//!  guard ends ──► WriteBack: on the dirty list ──► mark, write, unlist ──► clean, wake (Waiting)
//! ```
//!
//! | part | has | locks |
//! |---|---|---|
//! | [`Lookup`] | the table, the counts of hits, the numbers of devices | of a stripe of homes, of the numbers |
//! | [`Frames`] | the memory, the policy, the shadows of the policy | of the lists, of the shadows |
//! | [`WriteBack`] | the dirty lists, the pool and its cleaner, the limits of devices | of a dirty list, of the unsynced sectors, of the pool |
//! | [`Waiting`] | waiters by frame and by batch, the queue of writers, the timer | of a set, of the queue, of the timer |
//!
//! No part calls another one, except that `Frames` takes entries out of the table. [`Shared`] composes them:
//! `miss` and `evict` bring a block in and another one out, `write` locks a buffer, `write_back` and `sync`
//! bring it to the device, and `overwrite` changes the device beside the cache.
//!
//! Locks are taken in the order: numbers of devices, home of the table; shadows, lists; dirty list, pool. No
//! other lock is taken under one of these. No operation of a device, callback or waker runs under one.

mod completion;
mod evict;
mod miss;
mod overwrite;
mod pool;
mod sync;
mod waiting;
mod write;
mod write_back;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Deref, Range};
use std::time::Duration;

use offlock_percpu::AllocError;
use offlock_sync::WordLock;

pub use self::completion::{Change, DeviceChange};
use self::evict::Frames;
pub(crate) use self::evict::Search;
pub use self::miss::Load;
pub(crate) use self::miss::{EnterResult, Fill};
pub use self::overwrite::Bypass;
pub(crate) use self::overwrite::Overwrite;
use self::pool::{Job, Lane};
use self::waiting::Waiting;
pub(crate) use self::write_back::Limits;
use self::write_back::WriteBack;
use crate::error::{BuildError, GetError};
use crate::frames::Frame;
use crate::hazard::{self, Slot};
use crate::ids::Ids;
use crate::policy::Eviction;
use crate::source::Source;
use crate::stats::{Counter, HitCounters};
use crate::table::Table;
use crate::wait::{Reply, contain};
use crate::word::{Entry, Key, SAMPLED, WRITE};

/// The state that all handles of a cache share.
pub(crate) struct Shared {
    pub(crate) lookup: Lookup,
    pub(crate) frames: Frames,
    pub(crate) write_back: WriteBack,
    waiting: Waiting,
    pub(crate) counters: Counters,
}

/// The counters. Those that the XFS buffer cache has, too, have its names.
#[derive(Debug)]
pub(crate) struct Counters {
    /// Gets, except for hits that `hits` counts.
    pub(crate) get: Counter,
    pub(crate) create: Counter,
    pub(crate) page_retries: Counter,
    pub(crate) get_locked_waited: Counter,
    pub(crate) busy_locked: Counter,
    pub(crate) miss_locked: Counter,
    pub(crate) get_read: Counter,
    /// Blocks written to devices, and the calls that wrote them.
    pub(crate) written: Counter,
    pub(crate) write_calls: Counter,
    /// Syncs of devices.
    pub(crate) syncs: Counter,
    /// Ranges whose readahead was dropped.
    pub(crate) ahead_dropped: Counter,
}

impl Counters {
    fn new() -> Self {
        Self {
            get: new_counter(),
            create: new_counter(),
            page_retries: new_counter(),
            get_locked_waited: new_counter(),
            busy_locked: new_counter(),
            miss_locked: new_counter(),
            get_read: new_counter(),
            written: new_counter(),
            write_calls: new_counter(),
            syncs: new_counter(),
            ahead_dropped: new_counter(),
        }
    }
}

/// Returns a counter that has its memory, so that the first miss that counts something allocates
/// nothing.
fn new_counter() -> Counter {
    let new = Counter::default();
    #[cfg(not(offlock_model))]
    let _ = new.reserve(); // without memory a counter is only slower
    new
}

/// A buffer that a slot of this thread protects.
pub(crate) struct Protected {
    pub(crate) slot: &'static Slot,
    pub(crate) frame: Frame,
}

/// The table, and what a hit counts.
///
/// # Locks
///
/// That of a stripe of homes is held while a key is inserted or hidden. That of the numbers is held while
/// a device is attached or detached, and while buffers of dropped devices are removed.
///
/// # Invariants
///
/// Those of [`table`](crate::table) and [`word`](crate::word), and: a hit writes a hazard slot and a count
/// of its thread, and takes no lock.
pub(crate) struct Lookup {
    table: Table,
    /// The number of hits, except for those in `Counters::get`.
    hits: HitCounters,
    /// The numbers and identities of the devices.
    pub(crate) ids: WordLock<Ids>,
}

impl Deref for Lookup {
    type Target = Table;

    #[inline(always)]
    fn deref(&self) -> &Table {
        &self.table
    }
}

/// The number of entries of the table that a walk visits in the time of one lookup, which takes a lock
/// and misses the CPU's caches: 1.1 to 2 ns against 70 to 150 ns, measured by discards of 2 GiB with
/// caches of 4 and 16 GiB.
const ENTRIES: u64 = if cfg!(offlock_model) { 1 } else { 64 };

impl Lookup {
    /// Returns the buffer of a block that a slot of this thread protects now, whether hits of the block
    /// are sampled, and the number of the slot's record. Wait-free, without a shared write.
    #[inline(always)]
    fn look_up(&self, key: Key) -> Option<(Protected, bool, u32)> {
        let entry = self.table.find(key)?;
        let (slot, record) = hazard::protect(entry).ok()?;
        if let Some(word) = entry.look(key) {
            if word.is_readable() {
                entry.count_hit(word);
                let buffer = Protected { slot, frame: word.frame() };
                return Some((buffer, word.has(SAMPLED), record));
            }
        }
        slot.clear();
        None
    }

    pub(crate) fn is_cached(&self, key: Key) -> bool {
        self.table.find(key).is_some()
    }

    /// Returns whether hits of a block are sampled.
    pub(crate) fn is_sampled(&self, key: Key) -> bool {
        self.table.find(key).is_some_and(|entry| entry.word().has(SAMPLED))
    }

    /// Returns the keys of the blocks in `ranges` of sectors, for each of which `has` is true: of all
    /// blocks, or of those in the table if it takes less time to look at all its entries.
    ///
    /// A thread that inserts a block holds the lock of a home. So before the table is searched, each of
    /// these is taken once.
    fn keys_in<'l>(
        &'l self,
        source: &'l Source,
        ranges: impl Iterator<Item = Range<u64>> + Clone + 'l,
        has: impl Fn(u64) -> bool + 'l,
    ) -> impl Iterator<Item = Key> + 'l {
        let step = source.sectors_of_block();
        let sectors: u64 = ranges.clone().map(|one| one.end.saturating_sub(one.start)).sum();
        let is_short = sectors / step <= u64::from(self.table.places()) / ENTRIES;
        if !is_short {
            self.table.pass_all_locks();
        }
        let few = is_short.then(|| ranges.flat_map(move |one| one.step_by(step as usize)));
        let is_in = move |key: &Key| key.device() == source.id && has(key.sector());
        let all = (!is_short).then(|| self.table.keys().filter(is_in));
        let few = few.into_iter().flatten().map(|sector| Key::new(source.id, sector));
        few.chain(all.into_iter().flatten())
    }
}

#[cfg(not(offlock_model))]
impl Drop for Lookup {
    fn drop(&mut self) {
        hazard::end_of(&self.table.addresses());
    }
}

impl Shared {
    /// Returns the buffer of `key` if it is cached and readable. Wait-free, without a shared write.
    #[inline(always)]
    pub(crate) fn hit(&self, key: Key) -> Option<Protected> {
        let (buffer, is_sampled, record) = self.lookup.look_up(key)?;
        self.frames.reading(buffer.frame);
        if is_sampled {
            self.frames.note_hit(key, record);
        }
        Some(buffer)
    }

    /// [`hit`](Self::hit), and counts a get.
    #[inline(always)]
    pub(crate) fn get_hit(&self, key: Key) -> Option<Protected> {
        let (buffer, is_sampled, record) = self.lookup.look_up(key)?;
        self.frames.reading(buffer.frame);
        if !self.lookup.hits.count(record) {
            self.counters.get.add(1);
        }
        if is_sampled {
            self.frames.note_hit(key, record);
        }
        Some(buffer)
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
        let queued = self.write_back.pool.queue(device, lane, Job::Call(Box::new(call)));
        if let Err(Job::Call(call)) = queued {
            call();
        }
    }

    /// Returns the number of gets.
    pub(crate) fn gets(&self) -> u64 {
        self.counters.get.sum().max(0) as u64 + self.lookup.hits.sum()
    }

    pub(crate) fn entry(&self, frame: Frame) -> &Entry {
        self.frames.entry(&self.lookup, frame)
    }

    /// Takes a device number that no buffer has.
    pub(crate) fn take_id(&self) -> Result<u16, BuildError> {
        let mut ids = self.lookup.ids.lock();
        if let Some(id) = ids.take() {
            return Ok(id);
        }
        // No thread inserts blocks of retired numbers any more, so one walk finds them all. The
        // lock of the numbers carries the earlier insertions.
        let mut kept = BTreeSet::new();
        for key in self.lookup.keys() {
            if ids.is_retired(key.device()) && !self.drop_retired(key)? {
                kept.insert(key.device());
            }
        }
        ids.clean(kept);
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
                Ok(None) if self.lookup.find(key).is_some_and(|entry| entry.word().has(WRITE)) => {
                    return Ok(false);
                }
                Ok(None) => self.waiting.spin(&mut rounds), // an evictor has it
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

/// Returns the shared state of a cache of `count` buffers of `1 << shift` bytes.
pub(crate) fn make(
    (count, shift): (usize, u32),
    eviction: Eviction,
    (patience, limits): (Duration, Limits),
) -> Result<Shared, AllocError> {
    Ok(Shared {
        frames: Frames::new((count, shift), eviction)?,
        lookup: Lookup {
            table: Table::new(count)?,
            hits: HitCounters::new(),
            ids: WordLock::new(Ids::default()),
        },
        write_back: WriteBack::new(limits, count << shift),
        waiting: Waiting::new(patience),
        counters: Counters::new(),
    })
}
