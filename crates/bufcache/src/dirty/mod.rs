//! The state of a device's writes: its dirty buffers, the sectors that are written but not durable,
//! and its errors.
//!
//! ```text
//!  write guard ends ──► list, DIRTY ──► BACK ──► device writes ──► unsynced ──► clean, off list
//!                            ▲                    │ fails             │
//!                            └────────────────────┘                   ▼ a sync begins
//!                       poisoned, until a reset ◄── fails ── syncing ── succeeds ──► durable
//! ```

mod errors;
mod exclusion;
mod extents;
mod group;
mod list;
mod positions;
mod rules;

use std::ops::Range;

use offlock_sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use offlock_sync::std_lock::Mutex;
use offlock_sync::{WordLock, order};

pub use self::errors::WriteError;
pub(crate) use self::errors::errno_of;
pub(crate) use self::exclusion::Exclusion;
pub(crate) use self::extents::Extents;
pub(crate) use self::group::Group;
pub(crate) use self::list::DirtyList;
pub(crate) use self::positions::Positions;
pub use self::rules::{AttachOptions, Wal};

/// The state of the writes of one device.
pub(crate) struct Writes {
    pub(crate) dirty: WordLock<DirtyList>,
    pub(crate) positions: Positions,
    /// A lock of `std`, as a miss takes it: `parking_lot` allocates when a thread first waits.
    unsynced: Mutex<Unsynced>,
    /// Set while `unsynced` is not empty.
    has_unsynced: AtomicBool,
    /// Set while `unsynced` has sectors that were read back.
    has_reloaded: AtomicBool,
    pub(crate) group: Group,
    pub(crate) excluded: Exclusion,
    pub(crate) options: AttachOptions,
    /// The errno of the sync that failed; 0 if none did since the last reset.
    poison: AtomicI32,
    /// The [`Stage`] of the device.
    stage: AtomicU32,
    /// Held by the thread that closes or resets the device.
    pub(crate) alone: Mutex<()>,
    /// The number of failed writes (upper half) and the errno of the last one.
    errors: AtomicU64,
    pub(crate) load: Load,
}

/// Measures that decide whether a device may have more dirty buffers; see `cache::fairness`.
///
/// Atomics of `std`, which no model explores, because no other data depends on them.
#[derive(Debug, Default)]
pub(crate) struct Load {
    dirty_bytes: std::sync::atomic::AtomicUsize,
    /// The errno of the last write to the device, or 0 if it succeeded.
    failing: std::sync::atomic::AtomicI32,
    /// The number of write calls to the device that are running.
    writing: std::sync::atomic::AtomicUsize,
    /// Set once a writer of the device has asked for a buffer.
    wants: std::sync::atomic::AtomicBool,
}

// Ordering: Relaxed in all methods; each value is a measure that carries nothing.
impl Load {
    pub(crate) fn dirty_bytes(&self) -> usize {
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn add_dirty(&self, bytes: usize) {
        self.dirty_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove_dirty(&self, bytes: usize) {
        self.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the errno of the last write if that failed.
    pub(crate) fn failing(&self) -> Option<i32> {
        Some(self.failing.load(Ordering::Relaxed)).filter(|&errno| errno != 0)
    }

    /// Returns whether any thread writes to the device.
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

    /// Notes that a writer asks for a buffer. Returns whether one had asked before.
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

/// Sectors that were written to the device and that a power loss may revert.
///
/// A device may drop a write, serve the older bytes again, and report the error only later. So the
/// bytes that are read back after a write are known to be those that were written only once a sync
/// succeeds that began after the write.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    /// Sectors written since the last sync began.
    pub(crate) written: Extents,
    /// Sectors written before the sync that is running began.
    pub(crate) syncing: Extents,
    /// Sectors that were read back after a write that is in `written`.
    reloaded: Extents,
    /// Sectors that were read back after a write that is in `syncing`.
    syncing_reloaded: Extents,
}

/// The largest number of ranges that were read back. A guess, like the limit of the written ranges.
const MOST_RELOADED: usize = 16 << 10;

impl Unsynced {
    pub(crate) fn is_empty(&self) -> bool {
        self.written.is_empty() && self.syncing.is_empty()
    }

    fn has_reloaded(&self) -> bool {
        !(self.reloaded.is_empty() && self.syncing_reloaded.is_empty())
    }

    pub(crate) fn touches(&self, sectors: &Range<u64>) -> bool {
        self.written.touches(sectors) || self.syncing.touches(sectors)
    }

    /// A sync begins, which covers all writes before it.
    pub(crate) fn begin_sync(&mut self) {
        self.syncing.append(&mut self.written);
        self.syncing_reloaded.append(&mut self.reloaded);
    }

    /// A sync has succeeded. Returns the sets that it covered, which the caller drops without the
    /// lock.
    pub(crate) fn end_sync(&mut self) -> [Extents; 2] {
        [&mut self.syncing, &mut self.syncing_reloaded].map(std::mem::take)
    }

    /// The sectors are about to be read for a block that is not cached.
    fn note_load(&mut self, sectors: &Range<u64>) {
        let Self { written, syncing, reloaded, syncing_reloaded } = self;
        for (written, reloaded) in [(written, reloaded), (syncing, syncing_reloaded)] {
            if written.touches(sectors) {
                reloaded.insert(sectors.clone());
                // Too many ranges, as after a discard of a whole disk: count all between them as
                // read back.
                if reloaded.len() > MOST_RELOADED {
                    reloaded.insert_hull();
                }
            }
        }
    }

    /// The block is overwritten as a whole, so its bytes in the cache are not those that were read
    /// back.
    fn forget_load(&mut self, sectors: &Range<u64>) {
        self.reloaded.remove(sectors);
        self.syncing_reloaded.remove(sectors);
    }

    /// Returns whether the cached bytes of the block may differ from those that were written.
    pub(crate) fn is_reloaded(&self, sectors: &Range<u64>) -> bool {
        self.reloaded.touches(sectors) || self.syncing_reloaded.touches(sectors)
    }
}

/// The stages of closing a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stage {
    Open,
    /// No write begins, and dirty buffers are written back.
    Closing,
    /// Nothing is read or written.
    Closed,
}

impl Writes {
    /// Returns the state of the device with that number.
    pub(crate) fn new(id: u16, options: AttachOptions) -> Self {
        Self {
            dirty: WordLock::new(DirtyList::new(id)),
            positions: Positions::new(),
            unsynced: Mutex::new(Unsynced::default()),
            has_unsynced: AtomicBool::new(false),
            has_reloaded: AtomicBool::new(false),
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

    /// Notes a failed sync: writes since the last good sync may be lost. The first errno stays.
    pub(crate) fn poison(&self, errno: i32) {
        // Ordering: Relaxed. The unsynced sectors and the group, which belong to the errno, are
        // behind locks: a lock that is taken after the load comes after one that was released
        // before the store.
        let _ = self.poison.compare_exchange(0, errno.max(1), Ordering::Relaxed, Ordering::Relaxed);
        // After the exchange, because a sync that begins after `lose` does not see the loss in the
        // group and must find the device poisoned.
        self.group.lose();
    }

    /// Returns the errno of the sync that failed since the last reset.
    pub(crate) fn poisoned(&self) -> Option<i32> {
        // Ordering: Acquire pairs with the Release in `forgive`.
        Some(self.poison.load(order!(Acquire, "poisoned: the reset has dirtied its blocks")))
            .filter(|&errno| errno != 0)
    }

    /// Ends the poisoning, by a reset.
    pub(crate) fn forgive(&self) {
        // Ordering: Release pairs with the Acquire in `poisoned`; it carries the blocks that the
        // reset has made dirty, for `is_newer` and `dirty_blocks_in_range`, which take no lock. A
        // thread that still finds the errno acts as before the reset.
        self.poison.store(0, order!(Release, "forgive: the blocks are dirty before"));
    }

    /// Sets the stage. The caller closes the device, and calls a fence after the stage `Closing`.
    pub(crate) fn set_stage(&self, stage: Stage) {
        // Ordering: Relaxed; a call that is refused reads nothing that came before.
        self.stage.store(stage as u32, Ordering::Relaxed);
    }

    /// Returns whether writes are refused, because the device is closed or being closed.
    pub(crate) fn refuses_writers(&self) -> bool {
        // Ordering: Relaxed; a writer calls this again after its mark on the block and a fence,
        // which pairs with the fence in `cache::close`.
        self.stage.load(Ordering::Relaxed) != Stage::Open as u32
    }

    /// Returns whether the device is closed.
    pub(crate) fn is_closed(&self) -> bool {
        // Ordering: Relaxed; as in `set_stage`.
        self.stage.load(Ordering::Relaxed) == Stage::Closed as u32
    }

    /// Counts a failed write. Lock-free.
    pub(crate) fn record(&self, errno: i32) {
        // Ordering: Relaxed in all accesses of `errors`; the count carries nothing else.
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

    /// Returns the position of a handle that has seen every error so far.
    pub(crate) fn seen_now(&self) -> u64 {
        self.errors.load(Ordering::Relaxed) // see `record`
    }

    /// Moves a handle's position to the last error. Returns its errno if the handle had not seen
    /// it.
    pub(crate) fn take_new_error(&self, handle: &AtomicU64) -> Option<i32> {
        let now = self.seen_now();
        // Ordering: Relaxed; the swap reports an error to one of two concurrent calls.
        (handle.swap(now, Ordering::Relaxed) != now).then_some((now & 0x7fff_ffff) as i32)
    }

    /// Reads the unsynced sectors under their lock.
    pub(crate) fn unsynced<T>(&self, look: impl FnOnce(&Unsynced) -> T) -> T {
        look(&self.unsynced.lock())
    }

    /// Changes the unsynced sectors under their lock.
    pub(crate) fn change_unsynced<T>(&self, change: impl FnOnce(&mut Unsynced) -> T) -> T {
        let mut unsynced = self.unsynced.lock();
        let result = change(&mut unsynced);
        // Ordering: Relaxed, both; see `has_unsynced` and `forget_load`.
        self.has_unsynced.store(!unsynced.is_empty(), Ordering::Relaxed);
        self.has_reloaded.store(unsynced.has_reloaded(), Ordering::Relaxed);
        result
    }

    /// Returns whether there may be unsynced writes of the caller's block, without the lock.
    ///
    /// The block was not cached when the caller inserted it, or the caller writes it.
    fn has_unsynced(&self) -> bool {
        // Ordering: Relaxed. A block is evicted or invalidated after its write was noted, and its
        // key is hidden under the lock of its home, which the caller held to insert the block.
        // Discards and writes past the cache note theirs while the block is excluded, and
        // `Exclusion::has` carries it.
        self.has_unsynced.load(Ordering::Relaxed)
    }

    /// Notes that a block that was just inserted is about to be read from the device. Allocates
    /// only if the block was written since the last good sync.
    pub(crate) fn note_load(&self, sectors: &Range<u64>) {
        if self.has_unsynced() {
            self.change_unsynced(|unsynced| unsynced.note_load(sectors));
        }
    }

    /// Notes that the caller, which has the block marked `WRITE`, overwrites it as a whole.
    pub(crate) fn forget_load(&self, sectors: &Range<u64>) {
        // Ordering: Relaxed. An earlier load of the block was noted before its entry was published or
        // hidden, and the mark, or the lock of the home, carries that to the caller.
        if self.has_reloaded.load(Ordering::Relaxed) {
            self.change_unsynced(|unsynced| unsynced.forget_load(sectors));
        }
    }

    /// Returns whether the device may have lost writes of these sectors.
    pub(crate) fn is_lost(&self, sectors: &Range<u64>) -> bool {
        self.poisoned().is_some() && self.unsynced(|unsynced| unsynced.touches(sectors))
    }
}
