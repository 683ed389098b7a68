//! The state of a device's writes: its dirty buffers, the sectors that are written but not durable,
//! and its errors.
//!
//! ```text
//!  write guard ends ──► list, DIRTY ──► BACK ──► device writes ──► unsynced ──► clean, off list
//!                            ▲                    │ fails             │
//!                            └────────────────────┘                   ▼ a sync begins
//!                       poisoned, until a reset ◄── fails ── syncing ── succeeds ──► durable
//! ```

mod exclusion;
mod group;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write as _};
use std::ops::Range;
use std::sync::Arc;

use offlock_sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use offlock_sync::std_lock::Mutex;
use offlock_sync::{WordLock, order};
use thiserror::Error;

pub(crate) use self::exclusion::Exclusion;
pub(crate) use self::group::Group;
use crate::error::{GetError, system};
use crate::frames::{Frame, FrameMemory, List};

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
    /// Excludes closes and resets of the device from each other.
    pub(crate) alone: Exclusion,
    /// The number of failed writes (upper half) and the errno of the last one.
    errors: AtomicU64,
    pub(crate) load: Load,
}

/// Measures that decide whether a device may have more dirty buffers; see the limits in `cache::write_back`.
///
/// Atomics of `std`, which no model explores, because no other data depends on them.
#[derive(Debug, Default)]
pub(crate) struct Load {
    pub(crate) dirty_bytes: std::sync::atomic::AtomicUsize,
    /// The errno of the last write to the device, or 0 if it succeeded.
    failing: std::sync::atomic::AtomicI32,
    /// The number of write calls to the device that are running.
    pub(crate) writing: std::sync::atomic::AtomicUsize,
    /// Set once a writer of the device has asked for a buffer.
    wants: std::sync::atomic::AtomicBool,
}

// Ordering: Relaxed in all accesses; each value is a measure that carries nothing.
impl Load {
    pub(crate) fn dirty_bytes(&self) -> usize {
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Returns the errno of the last write if that failed.
    pub(crate) fn failing(&self) -> Option<i32> {
        Some(self.failing.load(Ordering::Relaxed)).filter(|&errno| errno != 0)
    }

    pub(crate) fn set_failing(&self, errno: i32) {
        self.failing.store(errno.max(1), Ordering::Relaxed);
    }

    pub(crate) fn set_succeeding(&self) {
        if self.failing().is_some() {
            self.failing.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn wants(&self) -> bool {
        self.wants.load(Ordering::Relaxed)
    }

    /// Notes that a writer asks for a buffer. Returns whether one had asked before.
    pub(crate) fn set_wants(&self) -> bool {
        self.wants() || self.wants.swap(true, Ordering::Relaxed)
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

/// The most ranges that were read back; more become one range. As many as written ranges before a sync.
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
            positions: Positions::default(),
            unsynced: Mutex::new(Unsynced::default()),
            has_unsynced: AtomicBool::new(false),
            has_reloaded: AtomicBool::new(false),
            group: Group::new(),
            excluded: Exclusion::new(),
            options,
            poison: AtomicI32::new(0),
            stage: AtomicU32::new(Stage::Open as u32),
            alone: Exclusion::new(),
            errors: AtomicU64::new(0),
            load: Load::default(),
        }
    }

    /// Notes a failed sync: writes since the last good sync may be lost. The first errno stays.
    pub(crate) fn poison(&self, errno: i32) {
        // Under the lock of the group, because a sync that begins after `lose` does not see the loss
        // in the group and must find the device poisoned, and a reset must not end the poisoning
        // between the exchange and the note of the loss.
        self.group.lose(|| {
            // Ordering: Relaxed. The unsynced sectors and the group, which belong to the errno, are
            // behind locks: a lock that is taken after the load comes after one that was released
            // before the store.
            let (errno, relaxed) = (errno.max(1), Ordering::Relaxed);
            let _ = self.poison.compare_exchange(0, errno, relaxed, relaxed);
        });
    }

    /// Returns the errno of the sync that failed since the last reset.
    pub(crate) fn poisoned(&self) -> Option<i32> {
        // Ordering: Acquire pairs with the Release in `forgive`.
        Some(self.poison.load(order!(Acquire, "poisoned: the reset has dirtied its blocks")))
            .filter(|&errno| errno != 0)
    }

    /// Ends the poisoning after `look`, which looks at the unsynced sectors for a reset, and returns
    /// its result. Calls `look` again if a loss was reported meanwhile, which may be of other sectors.
    ///
    /// # Errors
    ///
    /// Returns the error of `look`. The device then stays poisoned.
    pub(crate) async fn forgive_after<T, E>(
        &self,
        mut look: impl AsyncFnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        loop {
            let losses = self.group.losses();
            let found = look().await?;
            if self.forgive(losses) {
                return Ok(found);
            }
        }
    }

    /// Ends the poisoning unless more losses than `losses` were reported. Returns whether it did.
    fn forgive(&self, losses: u64) -> bool {
        // Ordering: Release pairs with the Acquire in `poisoned`; it carries the blocks that the
        // reset has made dirty, for `is_newer` and the lookups of `dirty_blocks`, which take no lock. A
        // thread that still finds the errno acts as before the reset.
        let order = order!(Release, "forgive: the blocks are dirty before");
        self.group.forgive(losses, || self.poison.store(0, order))
    }

    /// Sets the stage. The caller closes the device, and calls a fence after the stage `Closing`.
    pub(crate) fn set_stage(&self, stage: Stage) {
        // Ordering: Relaxed; a call that is refused reads nothing that came before.
        self.stage.store(stage as u32, Ordering::Relaxed);
    }

    /// Returns whether writes are refused, because the device is closed or being closed.
    pub(crate) fn refuses_writers(&self) -> bool {
        // Ordering: Relaxed; a writer calls this again after its mark on the block and a fence,
        // which pairs with the fence in `Shared::close`.
        self.stage.load(Ordering::Relaxed) != Stage::Open as u32
    }

    /// Returns whether the device is closed.
    pub(crate) fn is_closed(&self) -> bool {
        // Ordering: Relaxed; as in `set_stage`.
        self.stage.load(Ordering::Relaxed) == Stage::Closed as u32
    }

    /// Counts a failed write. Lock-free.
    pub(crate) fn record(&self, errno: i32) {
        let next =
            |seen: u64| Some(((seen >> 32) + 1) << 32 | u64::from(errno.max(1).unsigned_abs()));
        // Ordering: Relaxed in all accesses of `errors`; the count carries nothing else.
        _ = self.errors.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
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

// The errors of writes, flushes and syncs.

/// Returns the errno of an error that a device or a log returned: that of the system, or that of an
/// error of this crate, which a device on another one passes on; otherwise `EIO`. An errno of a
/// failed call is positive: 0 would count as success.
pub(crate) fn errno_of(error: &io::Error) -> i32 {
    let ours = || {
        let ours = error.get_ref()?;
        let of_write = || ours.downcast_ref().map(WriteError::errno);
        ours.downcast_ref().map(GetError::errno).or_else(of_write)
    };
    error.raw_os_error().or_else(ours).filter(|&errno| errno > 0).unwrap_or(libc::EIO)
}

/// Why a write, a flush, a sync or a close failed. Blocks that could not be written stay dirty and
/// are never dropped.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteError {
    /// The device refused a block. The block stays dirty, and the next flush tries again.
    #[error("writing block {block}: {}", system(.errno))]
    Io {
        /// The errno of the device.
        errno: i32,
        /// The block.
        block: u64,
    },
    /// A write of any handle failed since this handle last asked.
    #[error("an earlier write failed: {}", system(.errno))]
    Earlier {
        /// The errno of the last failed write.
        errno: i32,
    },
    /// `before_write` refused the block. The block was not written and stays dirty.
    #[error("`before_write` refused block {block}")]
    Verify {
        /// The block.
        block: u64,
    },
    /// The device or a callback panicked. The block stays dirty.
    #[error("writing block {block} panicked")]
    Panicked {
        /// The block.
        block: u64,
    },
    /// The log could not be flushed up to the position of the block, which stays dirty.
    #[error("flushing the log for block {block}: {}", system(.errno))]
    Wal {
        /// The errno of the log.
        errno: i32,
        /// The block.
        block: u64,
    },
    /// The block was written or read for as long as the cache waits. It stays dirty.
    #[error("block {block} was in use for as long as the cache waits")]
    Busy {
        /// The block.
        block: u64,
    },
    /// This thread has a guard of the block, or an operation in its [engine](crate::lend_engine) while
    /// a change of the device is in an engine, too: it would wait for itself.
    #[error("{}this thread would wait for its own guard or engine", of_block(.block))]
    WouldDeadlock {
        /// The block of the guard.
        block: Option<u64>,
    },
    /// A sync or a durable write of the device failed, now or since the last
    /// [`reset`](crate::Device::reset). Writes since the last good sync may be lost.
    #[error("a sync failed, so earlier writes may be lost: {}", system(.errno))]
    Poisoned {
        /// The errno of the device.
        errno: i32,
    },
    /// The device was closed, or is [being closed](crate::Device::close), and the call would change
    /// it.
    #[error("the device was closed")]
    Closed,
    /// The device [cannot be written](crate::BlockDevice::is_read_only).
    #[error("the device is read-only")]
    ReadOnly,
    /// The range ends beyond the end of the device.
    #[error("the range ends beyond the end of the device")]
    OutOfRange,
    /// A block that is to be written in part could not be loaded.
    #[error("{0}")]
    Get(GetError),
    /// There is no memory for the list of blocks to write.
    #[error("no memory for the list of blocks to write")]
    NoMemory,
}

/// Returns the beginning of a message about a block, or an empty string without a block.
fn of_block(block: &Option<u64>) -> String {
    block.map(|block| format!("block {block}: ")).unwrap_or_default()
}

impl WriteError {
    /// Returns the error of a change of that block which has failed with an errno, or panicked.
    pub(crate) fn of_change(errno: Option<i32>, block: u64) -> Self {
        errno.map_or(Self::Panicked { block }, |errno| Self::Io { errno, block })
    }

    /// Converts the error of a wait for that block.
    pub(crate) fn of_wait(error: GetError, block: u64) -> Self {
        match error {
            GetError::Busy => Self::Busy { block },
            GetError::WouldDeadlock => Self::WouldDeadlock { block: Some(block) },
            other => other.into(),
        }
    }

    /// Returns the errno that fits the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Io { errno, .. }
            | Self::Earlier { errno }
            | Self::Wal { errno, .. }
            | Self::Poisoned { errno } => *errno,
            Self::Verify { .. } => libc::EUCLEAN,
            Self::Panicked { .. } => libc::EIO,
            Self::Busy { .. } => libc::ETIMEDOUT,
            Self::WouldDeadlock { .. } => libc::EDEADLK,
            Self::Closed => libc::EBADF,
            Self::ReadOnly => libc::EROFS,
            Self::OutOfRange => libc::EINVAL,
            Self::Get(error) => error.errno(),
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}

impl From<GetError> for WriteError {
    fn from(error: GetError) -> Self {
        match error {
            GetError::Poisoned { errno } => Self::Poisoned { errno },
            GetError::Closed => Self::Closed,
            GetError::ReadOnly => Self::ReadOnly,
            GetError::OutOfRange { .. } => Self::OutOfRange,
            other => Self::Get(other),
        }
    }
}

// The options of an attached device: its callbacks and its log.

/// A callback that gets the number and the bytes of a block and accepts or refuses it.
pub(crate) type Look = Box<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// A write-ahead log, which must be durable before the blocks that it describes are written.
///
/// The cache calls it with no lock held. It must not write blocks of a device that is attached with
/// it.
pub trait Wal: Send + Sync + 'static {
    /// Returns the largest number up to which the log is durable. It must not wait, because the
    /// blocks that are about to be written are marked meanwhile, and writers of these blocks wait.
    fn durable(&self) -> u64;

    /// Makes the log durable up to a number. No block is marked meanwhile. Several threads may call
    /// this at once, and the log may be durable beyond the number already: then it returns at once.
    ///
    /// # Errors
    ///
    /// The error of the log. The blocks that need it stay dirty.
    fn flush(&self, number: u64) -> io::Result<()>;
}

/// How a device is attached; see [`Cache::attach_with`](crate::Cache::attach_with).
#[derive(Default)]
#[must_use = "options do nothing until a device is attached with them"]
pub struct AttachOptions {
    pub(crate) grows: bool,
    pub(crate) verify: Option<Look>,
    pub(crate) before_write: Option<Look>,
    pub(crate) wal: Option<Arc<dyn Wal>>,
    on_loss: Option<Box<dyn Fn(WriteError) + Send + Sync>>,
}

impl AttachOptions {
    /// Returns the options without callbacks and without a log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows the device to become longer while it is attached. The cache accepts any block behind
    /// the end: the program knows the length. A get of such a block fails with
    /// [`GetError::ShortRead`] until the device has the block.
    ///
    /// A write or a zero behind the end makes a file longer; another device may refuse it, and then the
    /// block stays dirty.
    ///
    /// A block is written as a whole, so the device must grow by whole blocks. A device whose length
    /// is not a multiple of the block size when it is attached keeps that length.
    pub fn growing(mut self) -> Self {
        self.grows = true;
        self
    }

    /// Sets a check of each block that is read, by its number and its bytes. A block for which
    /// `verify` returns false is not cached, and its gets fail with
    /// [`GetError::Verify`].
    ///
    /// `verify` may [get](crate::Device::get) other blocks, but must not block for a future of the
    /// device: the threads that would end it may all be in `verify`.
    pub fn verify(mut self, verify: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static) -> Self {
        self.verify = Some(Box::new(verify));
        self
    }

    /// Sets a check of each block before it is written. A block for which `look` returns false is
    /// not written and stays dirty.
    ///
    /// Other threads may read the block meanwhile, so a checksum must be stored under the write
    /// guard. `look` runs inside a write-back, which may be that of a [close](crate::Device::close) or
    /// a [reset](crate::Device::reset): a call of either in `look` then waits for itself, without an
    /// end. A flush or sync in `look` fails with [`WriteError::Busy`]. `look` must
    /// get no block that is not cached: the write-back of a task may run on the thread that ends timed
    /// waits of the cache, and the get may have to wait for that thread.
    pub fn before_write(
        mut self,
        look: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.before_write = Some(Box::new(look));
        self
    }

    /// Sets the log of blocks with a [log position](crate::WriteGuard::set_lsn), which panics
    /// without a log.
    pub fn wal(mut self, wal: Arc<dyn Wal>) -> Self {
        self.wal = Some(wal);
        self
    }

    /// Sets a callback for data loss: the last handle of the device is dropped, and its writes
    /// could not be made durable. Blocks that are still dirty are lost, except for those of a write
    /// that another thread has begun: after [`WriteError::Busy`] such a write goes on, unsynced.
    /// Without the callback, a line on standard error reports the loss.
    pub fn on_loss(mut self, tell: impl Fn(WriteError) + Send + Sync + 'static) -> Self {
        self.on_loss = Some(Box::new(tell));
        self
    }

    pub(crate) fn tell_loss(&self, error: WriteError) {
        match &self.on_loss {
            Some(tell) => tell(error),
            None => {
                let line =
                    format!("bufcache: a device was dropped, and blocks are lost: {error}\n");
                // Not `eprintln`, which panics if standard error is closed.
                let _ = io::stderr().write_all(line.as_bytes());
            }
        }
    }
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachOptions").finish_non_exhaustive()
    }
}

// The dirty buffers of one device, in the order in which they became dirty.
//
// The links are in the headers of the frames, so a buffer becomes dirty without an allocation. A
// frame is put on a list before its entry says `DIRTY`, and taken off before `DIRTY` is cleared or
// when the block is invalidated. The links are accessed only under the lock of the list.
//
// A list may have as many frames as the cache. A [`Walk`] visits them in pieces, and the lock is
// released between these. Each insertion has a serial number that no insertion into any list
// repeats, so a walk detects that the frame it stands at was taken off meanwhile.

/// The most frames of one piece of a walk. A few microseconds if no header is in a CPU cache.
const PIECE: usize = if cfg!(offlock_model) { 1 } else { 64 };

/// A doubly linked list of frames.
#[derive(Debug)]
pub(crate) struct DirtyList {
    list: List,
    /// The last serial number. The upper 16 bits are the number of the device, so that the numbers
    /// of two lists differ. The other 48 last for nine years at a million insertions per second.
    number: u64,
}

/// The position of a walk over a list, which visits the frames that are on the list from its begin
/// until their turn.
#[derive(Debug)]
pub(crate) struct Walk {
    /// The frame visited last, and its serial number.
    at: Option<(Frame, u64)>,
    /// The largest serial number visited. A walk that restarts at the oldest frame skips up to
    /// here.
    seen: u64,
    /// The largest serial number at the begin of the walk.
    end: u64,
    is_over: bool,
}

impl Walk {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }
}

impl DirtyList {
    /// Returns the empty list of the device with that number.
    pub(crate) fn new(id: u16) -> Self {
        Self { list: List::new(), number: u64::from(id) << 48 }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Inserts a frame that is on no list, as the newest.
    pub(crate) fn push(&mut self, frames: &FrameMemory, frame: Frame) {
        debug_assert!(frames.header(frame).number() == 0);
        self.number += 1;
        frames.header(frame).set_number(self.number);
        self.list.push(frame, |at| &frames.header(Frame(at)).links);
    }

    /// Removes a frame. Returns whether it was on the list.
    pub(crate) fn remove(&mut self, frames: &FrameMemory, frame: Frame) -> bool {
        let is_there = frames.header(frame).number() != 0;
        if is_there {
            frames.header(frame).set_number(0);
            self.list.remove(frame, |at| &frames.header(Frame(at)).links);
        }
        is_there
    }

    /// Returns the oldest frame.
    pub(crate) fn last(&self) -> Option<Frame> {
        self.list.last()
    }

    /// Returns a walk over the frames that are on the list now, the oldest first.
    pub(crate) fn walk(&self) -> Walk {
        Walk { at: None, seen: 0, end: self.number, is_over: false }
    }

    /// Returns the next frames of a walk. A piece may be empty before the walk is over.
    pub(crate) fn piece<'l>(
        &'l self,
        frames: &'l FrameMemory,
        walk: &'l mut Walk,
    ) -> impl Iterator<Item = Frame> + 'l {
        (0..PIECE).map_while(move |_| self.step(frames, walk)).flatten()
    }

    /// Moves the walk by one frame. Returns `None` at the end, `Some(None)` for a frame visited
    /// before.
    fn step(&self, frames: &FrameMemory, walk: &mut Walk) -> Option<Option<Frame>> {
        let stays = walk.at.filter(|&(at, number)| frames.header(at).number() == number);
        let next = match stays {
            Some((at, _)) => frames.header(at).links.newer(),
            None => self.last(),
        };
        let next = next.map(|frame| (frame, frames.header(frame).number()));
        let Some((frame, number)) = next.filter(|&(_, number)| !walk.is_over && number <= walk.end)
        else {
            walk.is_over = true;
            return None;
        };
        walk.at = Some((frame, number));
        let is_new = number > walk.seen;
        walk.seen = walk.seen.max(number);
        Some(is_new.then_some(frame))
    }
}

// The log positions of blocks whose changes the device does not have: what a checkpoint keeps of
// the log.
//
// A position is noted when it is set, under the block's write guard, not when the guard drops: a
// checkpoint beside a guard that is held must keep the log of its changes. It is forgotten when the
// block becomes clean or is dropped, before another thread can write the block.

/// The smallest log position of each block whose changes the device does not have, by its frame.
#[derive(Debug, Default)]
pub(crate) struct Positions(WordLock<BTreeMap<Frame, u64>>);

impl Positions {
    /// Notes a position of a block. The caller has marked its entry `WRITE`.
    pub(crate) fn add(&self, frame: Frame, lsn: u64) {
        let mut all = self.0.lock();
        let first = all.entry(frame).or_insert(lsn);
        *first = lsn.min(*first);
    }

    /// Forgets the position of a block that is clean or dropped. The caller keeps other threads from
    /// writing it.
    pub(crate) fn remove(&self, frame: Frame) {
        self.0.lock().remove(&frame);
    }

    /// Returns the smallest position. Visits all of them under the lock that [`add`](Self::add) takes:
    /// 0.3 ms for 100,000. Only checkpoints call this; an order by position would cost each change two
    /// more steps in a tree.
    pub(crate) fn first(&self) -> Option<u64> {
        self.0.lock().values().min().copied()
    }
}

// A set of numbers in ranges: which sectors were written and are not known to be durable.

/// Ranges that neither touch nor overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    /// Start to end.
    ranges: BTreeMap<u64, u64>,
}

impl Extents {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        if start >= end {
            return;
        }
        // Merges the ranges that touch the new one, from the right. All but the leftmost begin
        // inside it.
        while let Some((&at, &till)) = self.ranges.range(..=end).next_back() {
            if till < start {
                break;
            }
            (start, end) = (start.min(at), end.max(till));
            self.ranges.remove(&at);
        }
        self.ranges.insert(start, end);
    }

    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        // Cuts the ranges that overlap, from the right.
        while let Some((&at, &till)) = self.ranges.range(..range.end).next_back() {
            if till <= range.start {
                break;
            }
            self.ranges.remove(&at);
            if range.end < till {
                self.ranges.insert(range.end, till);
            }
            if at < range.start {
                self.ranges.insert(at, range.start);
                break;
            }
        }
    }

    /// Inserts all numbers between the first and the last.
    pub(crate) fn insert_hull(&mut self) {
        let start = self.ranges.first_key_value().map(|(&start, _)| start);
        let end = self.ranges.last_key_value().map(|(_, &end)| end);
        if let Some((start, end)) = start.zip(end) {
            self.insert(start..end);
        }
    }

    /// Returns whether the set has a number of the range.
    pub(crate) fn touches(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, &till)| till > range.start)
    }

    /// Moves all numbers of `other` into this set.
    pub(crate) fn append(&mut self, other: &mut Self) {
        if self.is_empty() {
            return std::mem::swap(self, other);
        }
        for (start, end) in std::mem::take(&mut other.ranges) {
            self.insert(start..end);
        }
    }

    /// Returns the ranges of the set that overlap `range`, the last first.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let start = range.start;
        let before = self.ranges.range(..range.end).rev();
        before.map(|(&at, &till)| at..till).take_while(move |other| other.end > start)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + Clone {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(all(test, not(offlock_model)))]
mod list_tests {
    use super::*;

    /// Random changes between the pieces: each frame that was there and stays is seen once, in
    /// order, and none that came later.
    #[test]
    fn a_walk_in_pieces_sees_what_was_there_and_stays() {
        const ALL: u32 = 300;
        let frames = FrameMemory::new(ALL as usize, 9).unwrap();
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for round in 0..20 {
            let mut lists = [DirtyList::new(1), DirtyList::new(2)];
            let mut on = [const { Vec::new() }; 2];
            for frame in (0..ALL).map(Frame) {
                let list = usize::from(random(8) == 0);
                lists[list].push(&frames, frame);
                on[list].push(frame);
            }
            let (before, mut gone) = (on[0].clone(), Vec::new());
            let (mut walk, mut seen) = (lists[0].walk(), Vec::new());
            while !walk.is_over() {
                seen.extend(lists[0].piece(&frames, &mut walk));
                for _ in 0..round {
                    // Off, and perhaps on again, here or there; often where the walk stands.
                    let from = random(2);
                    let last =
                        seen.last().and_then(|last| on[from].iter().position(|on| on == last));
                    let Some(at) = last.or((!on[from].is_empty()).then(|| random(on[from].len())))
                    else {
                        continue;
                    };
                    let frame = on[from].remove(at);
                    assert!(lists[from].remove(&frames, frame));
                    assert!(!lists[from].remove(&frames, frame));
                    gone.push(frame);
                    let to = random(3);
                    if to < 2 {
                        lists[to].push(&frames, frame);
                        on[to].push(frame);
                    }
                }
            }
            assert!(seen.iter().all(|frame| before.contains(frame)), "one that came later");
            let mut left = before.iter();
            assert!(seen.iter().all(|frame| left.any(|other| other == frame)), "not in order");
            let stayed = before.iter().filter(|frame| !gone.contains(frame));
            assert!(stayed.into_iter().all(|frame| seen.contains(frame)), "overlooked");
            for (list, on) in lists.iter_mut().zip(&on) {
                assert_eq!(list.len(), on.len());
                on.iter().for_each(|frame| assert!(list.remove(&frames, *frame)));
            }
        }
    }
}

#[cfg(test)]
mod extents_tests {
    use super::*;

    fn of(ranges: &[Range<u64>]) -> Extents {
        let mut extents = Extents::default();
        ranges.iter().cloned().for_each(|range| extents.insert(range));
        extents
    }

    #[test]
    fn the_hull_is_one_range() {
        let mut extents = of(&[10..20, 40..50, 30..31]);
        extents.insert_hull();
        assert!(extents.iter().eq(std::iter::once(10..50)));
        let mut none = Extents::default();
        none.insert_hull();
        assert!(none.is_empty());
    }

    #[test]
    fn against_a_set_of_bits() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut extents, mut bits) = (Extents::default(), [false; 200]);
        for round in 0..2000 {
            let start = random(190);
            let end = start + random(10);
            let put = random(3) > 0;
            if put {
                extents.insert(start..end);
            } else {
                extents.remove(&(start..end));
            }
            bits[start as usize..end as usize].fill(put);
            let told = |at: usize| extents.touches(&(at as u64..at as u64 + 1));
            assert!(bits.iter().enumerate().all(|(at, bit)| told(at) == *bit));
            let count: u64 = extents.iter().map(|range| range.end - range.start).sum();
            assert_eq!(count, bits.iter().filter(|bit| **bit).count() as u64);
            let some = start..end + 30;
            let overlaps = |range: &Range<u64>| range.start < some.end && some.start < range.end;
            let there = extents.iter().filter(overlaps).count();
            assert_eq!(extents.overlapping(&some).count(), there);
            let ranges: Vec<_> = extents.iter().collect();
            assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "{ranges:?}");
            if round % 50 == 0 {
                (extents, bits) = (Extents::default(), [false; 200]);
            }
        }
    }
}
