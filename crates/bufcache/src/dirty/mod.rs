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

use percpu::sync::Mutex;
use percpu::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

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
    pub(crate) unsynced: Mutex<Unsynced>,
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
}

/// Sectors that the device was given, and that need not be there after a loss of power.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    /// Since the last sync began.
    pub(crate) written: Extents,
    /// Before that, while the sync runs.
    pub(crate) syncing: Extents,
}

impl Unsynced {
    pub(crate) fn touches(&self, sectors: &Range<u64>) -> bool {
        self.written.touches(sectors) || self.syncing.touches(sectors)
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
            group: Group::new(),
            excluded: Exclusion::new(),
            options,
            poison: AtomicI32::new(0),
            stage: AtomicU32::new(Stage::Open as u32),
            alone: Mutex::new(()),
            errors: AtomicU64::new(0),
        }
    }

    /// Nothing that was written since the last good sync is known to be durable. The first errno stays.
    pub(crate) fn poison(&self, errno: i32) {
        self.group.lose();
        // Ordering: Release pairs with the Acquire in `poisoned`; it carries the extents.
        let _ = self.poison.compare_exchange(0, errno.max(1), Ordering::Release, Ordering::Relaxed);
    }

    pub(crate) fn poisoned(&self) -> Option<i32> {
        // Ordering: Acquire pairs with the Release in `poison`; it carries the extents.
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

    /// Whether what the device says of these sectors may not be what it was given.
    pub(crate) fn is_lost(&self, sectors: &Range<u64>) -> bool {
        self.poisoned().is_some() && self.unsynced.lock().touches(sectors)
    }
}
