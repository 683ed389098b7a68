//! A cache: the table, the frames, and what both are handed through.
//!
//! ```text
//!  get ──► table: there? ──yes──► slot, fence, look again ──► guard          no shared write
//!             │ no
//!             ▼
//!          a frame (free, or evicted) ──► lock the home, look again ──► publish "loading", unlock
//!             ──► read the device, with no lock ──► publish ──► guard
//! ```

mod adapt;
mod aside;
mod back;
mod bypass;
mod changes;
mod cleaner;
mod close;
mod completion;
mod evict;
mod fairness;
mod load;
mod miss;
mod past;
mod pool;
mod reclaim;
mod sync;
mod timer;
mod wipe;
mod write;

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Arc, WordLock};
use percpu::{AllocError, PerCpuCounter};

#[cfg(any(offlock_loom, offlock_shuttle))]
pub(crate) use self::aside::begin_to_read;
pub(crate) use self::aside::{Forget, begin_to_forget};
pub use self::bypass::Bypass;
pub use self::changes::{DeviceRange, DeviceSync, DeviceWrite};
pub(crate) use self::cleaner::Limits;
use self::load::AllWakers;
pub use self::load::Load;
pub(crate) use self::miss::{Entered, Want};
use self::pool::Pool;
use self::timer::{HAS_TIME, Timer};
pub(crate) use self::wipe::Wipe;
pub(crate) use self::write::{Fill, Got};
use crate::cold::Cold;
use crate::contain::contain;
use crate::error::BuildError;
use crate::frames::{Frame, Frames};
use crate::hazard::{self, Order, Slot};
use crate::ids::{Identity, Ids};
use crate::nodes::{On, Victim};
use crate::policy::{Buffers, Eviction, Policy, Samples, Shadows};
use crate::table::Table;
use crate::tally::Tally;
use crate::timed::{Holds, TimedLock};
use crate::times::{Counts, Times};
use crate::wait::Reply;
use crate::word::{Entry, Key, SAMPLED};

/// One of so many hits of a thread is timed. A guess: it takes some ten times a hit's time.
const SAMPLE: u64 = 4096;

/// What all handles of a cache share.
pub(crate) struct Shared {
    table: Table,
    pub(crate) frames: Frames,
    cold: TimedLock<Cold>,
    /// Of its devices.
    ids: WordLock<Ids>,
    wakers: AllWakers,
    pool: Pool,
    timer: Timer,
    dirty_bytes: AtomicUsize,
    /// Devices that are attached. A plain atomic, which no model explores: a hint.
    devices: std::sync::atomic::AtomicUsize,
    /// Those of them that have asked for a buffer. As `devices`.
    wanting: std::sync::atomic::AtomicUsize,
    pub(crate) counters: Counters,
    /// Hits of sampled blocks, and what each rule would make of them; none where the rule is fixed.
    samples: Samples,
    shadows: WordLock<Option<Shadows>>,
    /// Gets that were hits, but for those in `counters`.
    hits: Tally,
    hit_times: Counts,
    pub(crate) miss_times: Counts,
    /// Of its locks.
    pub(crate) holds: Holds,
    /// The capacity in bytes, for who has no lock.
    room: AtomicUsize,
    /// Between hits and evictions.
    order: Order,
    /// How long a miss waits for a buffer.
    pub(crate) patience: Duration,
    since: Instant,
}

/// What is counted: all but the evictions by the names that the XFS buffer cache has for them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// But for hits that `hits` counts.
    pub(crate) get: PerCpuCounter,
    pub(crate) create: PerCpuCounter,
    pub(crate) page_retries: PerCpuCounter,
    pub(crate) get_locked_waited: PerCpuCounter,
    pub(crate) busy_locked: PerCpuCounter,
    pub(crate) miss_locked: PerCpuCounter,
    pub(crate) get_read: PerCpuCounter,
    pub(crate) evictions: PerCpuCounter,
    /// Blocks that the device was given, and in how many calls.
    pub(crate) written: PerCpuCounter,
    pub(crate) write_calls: PerCpuCounter,
    /// Syncs of devices.
    pub(crate) syncs: PerCpuCounter,
    /// Ranges that were not read ahead.
    pub(crate) ahead_dropped: PerCpuCounter,
}

/// Whether a block is likely to be asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    Likely,
    None,
}

impl Counters {
    /// Returns counters that have their memory, so that the first miss that counts something
    /// allocates nothing.
    fn new() -> Self {
        let all = Self::default();
        let of_a_miss = [
            &all.get,
            &all.create,
            &all.page_retries,
            &all.get_locked_waited,
            &all.miss_locked,
            &all.get_read,
            &all.evictions,
            &all.written,
            &all.write_calls,
        ];
        if HAS_TIME {
            // Without memory a counter is only slower.
            of_a_miss.into_iter().for_each(|counter| _ = counter.reserve());
        }
        all
    }
}

/// A buffer that a slot of this thread keeps.
pub(crate) struct Held {
    pub(crate) slot: &'static Slot,
    pub(crate) frame: Frame,
}

impl Shared {
    fn new(
        frames: Frames,
        table: Table,
        cold: Cold,
        order: Order,
        (patience, limits): (Duration, Limits),
        holds: Holds,
        (samples, shadows): (Samples, Option<Shadows>),
    ) -> Self {
        let room = frames.capacity();
        Self {
            table,
            frames,
            cold: TimedLock::new(cold, holds.clone()),
            ids: WordLock::new(Ids::new()),
            wakers: AllWakers::new(),
            room: AtomicUsize::new(room),
            pool: Pool::new(limits),
            timer: Timer::new(),
            dirty_bytes: AtomicUsize::new(0),
            devices: std::sync::atomic::AtomicUsize::new(0),
            wanting: std::sync::atomic::AtomicUsize::new(0),
            since: Instant::now(),
            counters: Counters::new(),
            samples,
            shadows: WordLock::new(shadows),
            hits: Tally::new(),
            hit_times: Counts::new(),
            miss_times: Counts::new(),
            holds,
            order,
            patience,
        }
    }

    /// The buffer of `key`, if it is there and readable. Wait-free, without a shared write.
    pub(crate) fn hit(&self, key: Key, class: u8, reuse: Reuse) -> Option<Held> {
        let (held, is_sampled) = self.look_up(key, class, reuse)?;
        if is_sampled {
            self.note_hit(key);
        }
        Some(held)
    }

    /// The same, without [`note_hit`](Self::note_hit): returns whether that is to be called.
    #[inline(always)]
    pub(crate) fn look_up(&self, key: Key, class: u8, reuse: Reuse) -> Option<(Held, bool)> {
        let entry = self.table.find(key)?;
        let slot = hazard::name(entry, self.order).ok()?;
        if let Some(word) = entry.look(key) {
            if word.is_readable() && word.frame().class() == class {
                if reuse == Reuse::Likely {
                    entry.count_hit(word);
                }
                self.frames.reading(word.frame());
                let is_sampled = word.has(SAMPLED) && reuse == Reuse::Likely;
                return Some((Held { slot, frame: word.frame() }, is_sampled));
            }
        }
        slot.clear();
        None
    }

    /// Has a thread of the cache make a call for a device. Returns what its result comes to.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        device: u16,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> std::sync::Arc<Reply<T>> {
        let reply = Reply::new();
        let end = std::sync::Arc::clone(&reply);
        self.call_blocking(device, move || end.end(contain(call)));
        reply
    }

    /// Has a thread of the cache make a call for a device; the calling thread does only if there can be no other.
    pub(crate) fn call_blocking(&self, device: u16, call: impl FnOnce() + Send + 'static) {
        if let Err(call) = self.pool.call(device, Box::new(call)) {
            call();
        }
    }

    /// Counts a get that was a hit: this thread's slot has its buffer. Returns whether it is to be timed.
    #[inline(always)]
    pub(crate) fn count_get(&self) -> bool {
        match hazard::number().and_then(|record| self.hits.count(record)) {
            Some(count) => count.is_multiple_of(SAMPLE),
            None => {
                self.counters.get.add(1);
                false
            }
        }
    }

    /// What few hits need. One call: with two, a hit would spill a register before its fence.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_and_time(&self, key: Key, class: u8, is_sampled: bool, is_timed: bool) {
        if is_sampled {
            self.note_hit(key);
        }
        if is_timed {
            self.time_a_hit(key, class);
        }
    }

    /// Looks a block up once more, for the clock.
    fn time_a_hit(&self, key: Key, class: u8) {
        let began = Instant::now();
        if let Some(held) = self.hit(key, class, Reuse::None) {
            self.hit_times.add(began);
            held.slot.clear();
        }
    }

    pub(crate) fn times(&self) -> Times {
        Times {
            hits: self.hit_times.snapshot(),
            misses: self.miss_times.snapshot(),
            holds: self.holds.as_ref().map(|counts| counts.snapshot()),
        }
    }

    /// Gets so far.
    pub(crate) fn gets(&self) -> u64 {
        self.counters.get.sum().max(0) as u64 + self.hits.sum()
    }

    /// The capacity in bytes, as of late.
    pub(crate) fn room(&self) -> usize {
        self.room.load(Ordering::Relaxed) // a hint
    }

    pub(crate) fn is_cached(&self, key: Key) -> bool {
        self.table.find(key).is_some()
    }

    pub(crate) fn entry(&self, frame: Frame) -> &Entry {
        self.table.entry(self.frames.header(frame).place())
    }

    /// A number for a device, which no buffer has.
    pub(crate) fn take_id(&self) -> Result<u16, BuildError> {
        let mut ids = self.ids.lock();
        if let Some(id) = ids.take() {
            return Ok(id);
        }
        if ids.retired() == 0 {
            return Err(BuildError::TooManyDevices);
        }
        // Whoever could insert one of their blocks is gone, so one walk finds them all. The lock of
        // the numbers carries here what those did.
        for key in self.table.keys() {
            if ids.is_retired(key.device()) {
                // The only error without a device: no memory for this thread's slots.
                self.invalidate(None, key).map_err(|_| BuildError::NoMemory)?;
            }
        }
        ids.clean();
        ids.take().ok_or(BuildError::TooManyDevices)
    }

    /// Sees to it that the blocks of what this is are in the cache once.
    pub(crate) fn attach(&self, identity: Identity, block_size: usize) -> Result<(), BuildError> {
        let attached = self.ids.lock().attach(identity, block_size);
        attached.map_err(|block_size| BuildError::Attached { block_size })
    }

    /// Nothing of it is written any more by this cache.
    pub(crate) fn detach(&self, identity: Identity) {
        self.ids.lock().detach(identity);
    }

    /// The device with that number is gone.
    pub(crate) fn retire_id(&self, id: u16) {
        self.ids.lock().retire(id);
    }

    /// Bytes of its buffers, in use or kept for use.
    pub(crate) fn bytes_in_use(&self) -> usize {
        let units = self.cold.lock().units_in_use();
        self.frames.bytes_of(units)
    }

    /// The rule in force.
    pub(crate) fn eviction(&self) -> Eviction {
        self.cold.lock().policy.rule()
    }

    pub(crate) fn capacity(&self) -> usize {
        let units = self.cold.lock().limit();
        self.frames.bytes_of(units)
    }
}

impl Buffers for Shared {
    fn entry(&self, frame: Frame) -> &Entry {
        Shared::entry(self, frame)
    }

    fn victim(&self, frame: Frame, on: On) -> Victim {
        Victim { frame, place: self.frames.header(frame).place(), on }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

/// Makes the shared part of a cache of `units` of two to the power of `unit` bytes, in chunks of two
/// to the power of `chunk` bytes. With shadows, of so many blocks, if blocks are `sampled`.
pub(crate) fn make(
    units: usize,
    (unit, chunk): (u32, u32),
    (policy, sampled): (Policy, usize),
    order: Order,
    waits: (Duration, Limits),
    time_locks: bool,
) -> Result<Shared, AllocError> {
    let frames = Frames::new(units, unit, chunk)?;
    let cold = Cold::new(units, (chunk - unit) as u8, policy)?;
    let holds = time_locks.then(|| Arc::new(Counts::new()));
    let table = Table::new(units, holds.clone())?;
    let shadows = if sampled > 0 { Some(Shadows::new(sampled)?) } else { None };
    let sample = (Samples::new(sampled, units)?, shadows);
    Ok(Shared::new(frames, table, cold, order, waits, holds, sample))
}
