//! What a device has of its own for what is written: which buffers are dirty, what is written but not
//! durable, and what went wrong.
//!
//! ```text
//!  write guard ends ──► list, DIRTY ──► BACK ──► the device writes ──► unsynced ──► clean, off the list
//!                            ▲                      │ fails                │
//!                            └──────────────────────┘                a sync begins
//!                                                                          │
//!                         poisoned, until a reset ◄── fails ── syncing ── succeeds: durable
//! ```

mod errors;
mod exclusion;
mod extents;
mod group;
mod list;
mod rules;

use std::ops::Range;

use percpu::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use percpu::sync::{Mutex, mutant};

pub use self::errors::WriteError;
pub(crate) use self::exclusion::Exclusion;
pub(crate) use self::extents::Extents;
pub(crate) use self::group::Group;
pub(crate) use self::list::{DirtyList, NIL};
pub use self::rules::{AttachOptions, ErrorRule, Wal};
use crate::timed::{Holds, TimedLock};

/// Of one device.
pub(crate) struct Writes {
    pub(crate) dirty: TimedLock<DirtyList>,
    unsynced: Mutex<Unsynced>,
    /// Whether there are unsynced sectors.
    has_unsynced: AtomicBool,
    pub(crate) group: Group,
    pub(crate) excluded: Exclusion,
    pub(crate) options: AttachOptions,
    /// The errno of the sync that failed; 0 if none did since the last reset.
    poison: AtomicI32,
    /// How far it is closed.
    stage: AtomicU32,
    /// One closes or resets at a time.
    pub(crate) alone: Mutex<()>,
    /// How many writes failed (upper half), and the errno of the last.
    errors: AtomicU64,
    pub(crate) load: Load,
}

/// What decides whether a device may have more dirty buffers; see `cache::fairness`.
///
/// Plain atomics, which no model explores: each is a measure, and carries nothing.
#[derive(Debug, Default)]
pub(crate) struct Load {
    dirty_bytes: std::sync::atomic::AtomicUsize,
    /// The errno of the last write to the device; 0 if it succeeded.
    failing: std::sync::atomic::AtomicI32,
    /// Calls by which the device is being given buffers.
    writing: std::sync::atomic::AtomicUsize,
    /// It has asked for a buffer.
    wants: std::sync::atomic::AtomicBool,
}

impl Load {
    pub(crate) fn dirty_bytes(&self) -> usize {
        self.dirty_bytes.load(Ordering::Relaxed) // a measure, also below
    }

    pub(crate) fn add_dirty(&self, bytes: usize) {
        self.dirty_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove_dirty(&self, bytes: usize) {
        self.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The errno of the last write, if that failed.
    pub(crate) fn failing(&self) -> Option<i32> {
        Some(self.failing.load(Ordering::Relaxed)).filter(|&errno| errno != 0)
    }

    /// Whether the device is being given buffers, by any thread.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn begin_writing(&self) {
        self.writing.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_writing(&self) {
        self.writing.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn wants(&self) -> bool {
        self.wants.load(Ordering::Relaxed)
    }

    /// Says that it wants buffers; returns whether it did before.
    pub(crate) fn set_wants(&self) -> bool {
        self.wants() || self.wants.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn set_failing(&self, errno: i32) {
        self.failing.store(errno.max(1), Ordering::Relaxed);
    }

    pub(crate) fn set_succeeding(&self) {
        if self.failing().is_some() {
            self.failing.store(0, Ordering::Relaxed);
        }
    }
}

/// Sectors that the device was given, and that need not be there after a loss of power.
///
/// A device may give up what it was given before it says so, and serve the older bytes again. So a copy that was
/// read from the device after the write is not known to be what was written, until a sync succeeds that
/// began after the write.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    /// Since the last sync began.
    pub(crate) written: Extents,
    /// Before that, while the sync runs.
    pub(crate) syncing: Extents,
    /// Blocks that were read from the device after a write that is in `written`.
    reloaded: Extents,
    /// The same, after a write that is in `syncing`.
    syncing_reloaded: Extents,
}

/// Most ranges of blocks that were read again. A guess, as that for ranges that are written.
const MOST_RELOADED: usize = 16 << 10;

impl Unsynced {
    pub(crate) fn is_empty(&self) -> bool {
        self.written.is_empty() && self.syncing.is_empty()
    }

    pub(crate) fn touches(&self, sectors: &Range<u64>) -> bool {
        self.written.touches(sectors) || self.syncing.touches(sectors)
    }

    /// A sync begins: what was written before it is its business.
    pub(crate) fn begin_sync(&mut self) {
        self.syncing.append(&mut self.written);
        self.syncing_reloaded.append(&mut self.reloaded);
    }

    /// A sync has succeeded. Returns the sets that are of no use any more, to be dropped without the lock.
    pub(crate) fn end_sync(&mut self) -> [Extents; 2] {
        if mutant("sync-forgets-what-came-meanwhile") {
            self.written = Extents::default();
        }
        [&mut self.syncing, &mut self.syncing_reloaded].map(std::mem::take)
    }

    /// The device is about to be read for a block that the cache does not have.
    fn note_load(&mut self, sectors: &Range<u64>) {
        let Self { written, syncing, reloaded, syncing_reloaded } = self;
        for (written, reloaded) in [(written, reloaded), (syncing, syncing_reloaded)] {
            if written.touches(sectors) {
                reloaded.insert(sectors.clone());
                // As after a discard of a whole disk: from here on all between them counts as read again.
                if reloaded.len() > MOST_RELOADED {
                    reloaded.insert_hull();
                }
            }
        }
    }

    /// The block is written as a whole: its bytes are not those that were read.
    fn forget_load(&mut self, sectors: &Range<u64>) {
        self.reloaded.remove(sectors);
        self.syncing_reloaded.remove(sectors);
    }

    /// Whether a copy of the block need not be what was written.
    pub(crate) fn is_reloaded(&self, sectors: &Range<u64>) -> bool {
        self.reloaded.touches(sectors) || self.syncing_reloaded.touches(sectors)
    }
}

/// How far a device is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stage {
    Open,
    /// Nobody begins to write; what is dirty is written.
    Closing,
    /// Nothing is written or read.
    Closed,
}

impl Writes {
    /// Of the device with that number.
    pub(crate) fn new(id: u16, options: AttachOptions, holds: Holds) -> Self {
        Self {
            dirty: TimedLock::new(DirtyList::new(id), holds),
            unsynced: Mutex::new(Unsynced::default()),
            has_unsynced: AtomicBool::new(false),
            group: Group::new(),
            excluded: Exclusion::new(),
            options,
            poison: AtomicI32::new(0),
            stage: AtomicU32::new(Stage::Open as u32),
            alone: Mutex::new(()),
            errors: AtomicU64::new(0),
            load: Load::default(),
        }
    }

    /// Nothing that was written since the last good sync is known to be durable. The first errno stays.
    pub(crate) fn poison(&self, errno: i32) {
        // Ordering: Release pairs with the Acquire in `poisoned`. No model needs it: the extents are read under
        // their lock, which orders them.
        let _ = self.poison.compare_exchange(0, errno.max(1), Ordering::Release, Ordering::Relaxed);
        // After the exchange: a sync that begins behind this does not see the loss in the group, so it has to
        // find the device poisoned.
        self.group.lose();
    }

    pub(crate) fn poisoned(&self) -> Option<i32> {
        // Ordering: Acquire pairs with the Release in `poison`, which no model needs.
        Some(self.poison.load(Ordering::Acquire)).filter(|&errno| errno != 0)
    }

    pub(crate) fn forgive(&self) {
        // Ordering: Release pairs with the Acquire in `poisoned`, which may miss it: a reset that is not
        // over.
        self.poison.store(0, Ordering::Release);
    }

    /// The caller is the one who closes it. Followed by a fence, where it begins.
    pub(crate) fn set_stage(&self, stage: Stage) {
        // Ordering: Release pairs with the Acquire in `is_closed`; it carries what was done before.
        self.stage.store(stage as u32, Ordering::Release);
    }

    /// Whether nobody is to begin to write: it is closed, or is about to be.
    pub(crate) fn refuses_writers(&self) -> bool {
        // Ordering: Relaxed; a writer asks once more after it has marked its block, behind a fence that
        // pairs with the closer's: see `cache::close`.
        self.stage.load(Ordering::Relaxed) != Stage::Open as u32
    }

    /// Nothing is written any more.
    pub(crate) fn is_closed(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `set_stage`.
        self.stage.load(Ordering::Acquire) == Stage::Closed as u32
    }

    /// A write failed.
    pub(crate) fn record(&self, errno: i32) {
        // Ordering: Relaxed, all; a fact of its own.
        let mut seen = self.errors.load(Ordering::Relaxed);
        loop {
            let next = ((seen >> 32) + 1) << 32 | u64::from(errno.max(1).unsigned_abs());
            let order = Ordering::Relaxed;
            match self.errors.compare_exchange_weak(seen, next, order, order) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Where a handle stands that has seen every error so far.
    pub(crate) fn seen_now(&self) -> u64 {
        self.errors.load(Ordering::Relaxed) // see `record`
    }

    /// The last errno since a handle looked last, which stands there now.
    pub(crate) fn look(&self, handle: &AtomicU64) -> Option<i32> {
        let now = self.seen_now();
        // Ordering: Relaxed; one of two that look at once is told.
        (handle.swap(now, Ordering::Relaxed) != now).then_some((now & 0x7fff_ffff) as i32)
    }

    pub(crate) fn unsynced<T>(&self, look: impl FnOnce(&Unsynced) -> T) -> T {
        look(&self.unsynced.lock())
    }

    pub(crate) fn change_unsynced<T>(&self, change: impl FnOnce(&mut Unsynced) -> T) -> T {
        let mut unsynced = self.unsynced.lock();
        let result = change(&mut unsynced);
        // Ordering: Relaxed; see `has_unsynced`.
        self.has_unsynced.store(!unsynced.is_empty(), Ordering::Relaxed);
        result
    }

    /// Whether a write of a block may be unsynced that is not in the cache, or that the caller has for
    /// writing. Spares misses the lock.
    fn has_unsynced(&self) -> bool {
        // Ordering: Relaxed. A block is evicted or invalidated after its write was noted, and its key is
        // hidden under the lock of its home, which the caller had when it inserted the block. Discards and
        // writes past the cache note theirs while the block is excluded; `Exclusion::has` carries that.
        self.has_unsynced.load(Ordering::Relaxed)
    }

    /// The device is about to be read for a block that was just inserted. Allocates only if the block was
    /// written since the last good sync.
    pub(crate) fn note_load(&self, sectors: &Range<u64>) {
        if self.has_unsynced() {
            self.unsynced.lock().note_load(sectors);
        }
    }

    /// The block, which the caller has for writing, is written as a whole.
    pub(crate) fn forget_load(&self, sectors: &Range<u64>) {
        if self.has_unsynced() {
            self.unsynced.lock().forget_load(sectors);
        }
    }

    /// Whether what the device says of these sectors may not be what it was given.
    pub(crate) fn is_lost(&self, sectors: &Range<u64>) -> bool {
        self.poisoned().is_some() && self.unsynced(|unsynced| unsynced.touches(sectors))
    }
}
