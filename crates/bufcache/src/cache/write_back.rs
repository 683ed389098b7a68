//! Write-back: writes dirty buffers to the device, in the order of their blocks, adjacent blocks
//! together.
//!
//! ```text
//!  dirty list ──copy──► sort ──► mark BACK ──► log? refused? ──► window ──► write
//!                                   │              │ yes                        │
//!                                   ▼ clean by now ▼                            ▼
//!                                  skip     unmark, DIRTY stays     clean, or DIRTY stays
//! ```
//!
//! # Invariants
//!
//! 1. A block becomes clean only after the device has reported its write. Until then `DIRTY` stays
//!    set beside `BACK`, and the frame stays on the dirty list.
//! 2. A write-back does not wait while it has blocks marked: it writes its window first. For a task
//!    it occupies no thread while the device writes. It waits for a block that another thread has
//!    marked once it has written the others: a discard or a bypass keeps its marks for as long as
//!    the device takes, and beside several of them a flush would wait for one after the other.
//! 3. A written block is among the unsynced sectors before it becomes clean. So a reset after a
//!    failed sync finds the block there, or finds it dirty.

use std::io::IoSlice;
use std::ops::Range;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::{Arc, check, coarse_clock, step};
use smallvec::SmallVec;

use super::Shared;
use super::completion::{Batch, Change, DeviceChange, Outcome, RUNS};
use super::evict::LOOKS;
use super::pool::Pool;
use super::write::is_marked;
use crate::dirty::{DirtyList, Unsynced, WriteError, errno_of};
use crate::error::GetError;
use crate::frames::{Frame, FrameMemory};
use crate::policy::is_evictable_but_dirty;
use crate::source::{Operation, Source};
use crate::wait::{block_on, contain, is_blocking};
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, Key, STALE, VALID, WRITE};

/// The most blocks that a write-back has marked at a time. A MiB of blocks of 4,096 bytes.
const WINDOW: usize = if cfg!(offlock_model) { 2 } else { 256 };
/// After this time a write-back begins no further write before it has made the written blocks clean,
/// because a call may wait for one of them. Matters for a device that makes each write in
/// [`begin`](crate::BlockDevice::begin).
const ROUND: Duration = Duration::from_millis(10);
/// A write-back reads the clock once for this many writes.
const LOOK_AT_TIME: usize = 32;
/// The most written blocks that become clean under one hold of each lock. A microsecond if
/// no header is in a CPU cache. A model has two.
const TOGETHER: usize = if cfg!(offlock_model) { 2 } else { 16 };

/// The dirty buffers of all devices, and the threads that write them. The state of each device is in its
/// [`Writes`](crate::dirty::Writes).
///
/// # Locks
///
/// Each device has a lock of its dirty list, of the unsynced sectors, of the group of its syncs and of its
/// excluded ranges. The lock of the pool is taken under that of a dirty list, and no other lock under
/// either.
///
/// # Invariants
///
/// 1. A buffer is on the dirty list of its device from before `DIRTY` is set until the device has the
///    bytes, or the block is invalidated. So no dirty buffer is missed by a sync that begins later.
/// 2. `dirty_bytes` counts a buffer at least as long.
/// 3. A device with a dirty buffer is known to the pool, which keeps it alive.
pub(crate) struct WriteBack {
    pub(super) pool: Pool,
    dirty_bytes: AtomicUsize,
    /// The capacity of the cache in bytes, and the dirty bytes above which the cleaner begins, and writers wait.
    room: usize,
    begin: usize,
    most: usize,
    /// A buffer that has been dirty for so many milliseconds is written.
    age: u64,
    /// The number of attached devices. A hint, so a plain atomic, which no model explores.
    devices: std::sync::atomic::AtomicUsize,
    /// The number of devices that have asked for a buffer. A hint, as `devices`.
    wanting: std::sync::atomic::AtomicUsize,
    /// The coarse time at which the cache was made.
    since: u64,
}

impl WriteBack {
    pub(super) fn new(limits: Limits, room: usize) -> Self {
        let share = |of_256: u32| (room as u64 * u64::from(of_256) / 256) as usize;
        Self {
            pool: Pool::new(),
            dirty_bytes: AtomicUsize::new(0),
            room,
            begin: share(limits.begin),
            most: share(limits.most),
            age: limits.age.as_millis().try_into().unwrap_or(u64::MAX),
            devices: std::sync::atomic::AtomicUsize::new(0),
            wanting: std::sync::atomic::AtomicUsize::new(0),
            since: coarse_clock(),
        }
    }

    /// Puts a buffer on the dirty list. The caller has marked its entry `WRITE`, and sets `DIRTY`
    /// next.
    pub(super) fn list(&self, frames: &FrameMemory, source: &Arc<Source>, frame: Frame) {
        let mut list = source.writes.dirty.lock();
        let header = frames.header(frame);
        header.set_failed(false);
        header.set_since(self.now());
        let was_empty = list.is_empty();
        list.push(frames, frame);
        if was_empty {
            self.pool.add_dirty(source);
        }
        drop(list);
        let load = &source.writes.load;
        load.dirty_bytes.fetch_add(frames.size(), Ordering::Relaxed); // a measure
        // Ordering: Relaxed; it carries no memory. `Shared::is_newer` relies on the order of the
        // changes of this count alone: it is raised before `DIRTY` is set, and lowered only after
        // the device has the block or the block is invalidated.
        self.dirty_bytes.fetch_add(frames.size(), Ordering::Relaxed);
    }

    /// Takes frames off the dirty list of a device if `are_there` returns true under its lock. A
    /// frame without a mark of the caller may be on the list of another device by now.
    pub(super) fn unlist(
        &self,
        frames: &FrameMemory,
        source: &Arc<Source>,
        listed: impl IntoIterator<Item = Frame>,
        are_there: impl FnOnce(&DirtyList) -> bool,
    ) {
        let mut list = source.writes.dirty.lock();
        let mut bytes = 0;
        if are_there(&list) {
            let has_log = source.writes.options.wal.is_some();
            let removed = listed.into_iter().filter(|&frame| {
                let is_removed = list.remove(frames, frame);
                if is_removed && has_log {
                    source.writes.positions.remove(frame);
                }
                is_removed
            });
            bytes = removed.count() * frames.size();
        }
        let gone = if list.is_empty() { self.pool.remove_dirty(source) } else { None };
        drop(list);
        drop(gone); // perhaps the last reference to the device: not under the lock
        if bytes > 0 {
            source.writes.load.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed); // a measure
            // Ordering: Relaxed; see `list`.
            self.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Returns the milliseconds since the cache was made.
    pub(super) fn now(&self) -> u64 {
        (coarse_clock() - self.since) / 1_000_000
    }

    pub(crate) fn dirty_bytes(&self) -> usize {
        // Ordering: Relaxed; see `list`.
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether a sync is due because the unsynced sectors are in many ranges.
    pub(super) fn has_many_extents(&self, source: &Source) -> bool {
        // The devices share the limit of the cache, which is about 3 % of its memory.
        let devices = self.devices.load(Ordering::Relaxed).max(1); // a hint
        let most = MOST_EXTENTS.max(4 * (self.room >> source.shift) / devices);
        source.writes.unsynced(|unsynced| unsynced.written.len()) > most
    }

    /// Returns whether dirty buffers have to be written before another becomes dirty. If fewer are
    /// dirty, but enough for the cleaner to begin, wakes it.
    fn is_too_dirty(&self) -> bool {
        let dirty = self.dirty_bytes();
        let too_dirty = dirty > self.most;
        if !too_dirty && dirty > self.begin {
            self.pool.hurry();
        }
        too_dirty
    }

    /// Makes the cleaner begin a round now.
    pub(super) fn hurry(&self) {
        self.pool.hurry();
    }

    pub(crate) fn add_device(&self) {
        self.devices.fetch_add(1, Ordering::Relaxed); // a hint, also below
    }

    pub(crate) fn remove_device(&self, source: &Source) {
        self.devices.fetch_sub(1, Ordering::Relaxed);
        if source.writes.load.wants() {
            self.wanting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn has_one_device(&self) -> bool {
        self.devices.load(Ordering::Relaxed) <= 1
    }

    /// Notes that the device has asked for a buffer.
    pub(super) fn note_want(&self, source: &Source) {
        if !source.writes.load.set_wants() {
            self.wanting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether another device has asked for a buffer.
    pub(super) fn is_shared(&self, source: &Source) -> bool {
        let own = usize::from(source.writes.load.wants());
        self.wanting.load(Ordering::Relaxed) > own
    }

    /// Returns whether a task may begin one more load of the device, which has asked for a buffer.
    pub(super) fn may_load(&self, source: &Source) -> bool {
        let wanting = self.wanting.load(Ordering::Relaxed).max(1); // a hint, as the next
        let quiet = self.devices.load(Ordering::Relaxed).saturating_sub(wanting).min(QUIET);
        let share = (self.room / (wanting + quiet)).max(1 << source.shift);
        wanting + quiet == 1 || source.in_flight.count() << source.shift < share
    }

    /// Returns whether one more block of the device may become dirty now.
    fn may_dirty(&self, source: &Source) -> bool {
        if self.has_one_device() {
            return true;
        }
        let load = &source.writes.load;
        let is_within = || {
            let free = self.most.saturating_sub(self.dirty_bytes());
            let floor = (self.room / FLOOR).max(1 << source.shift);
            load.dirty_bytes() < free.max(floor)
        };
        // Without dirty buffers no write is left that could succeed and end the refusal.
        let is_failing = load.failing().is_some() && load.dirty_bytes() > 0;
        !is_failing && (!self.is_shared(source) || is_within())
    }
}

/// The result of a write-back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    /// The number of blocks written.
    pub(crate) written: usize,
    /// Set if a block was left out because another thread was writing it to the device.
    pub(crate) overlapped: bool,
    /// The first error.
    pub(crate) error: Option<WriteError>,
}

impl Summary {
    fn fail(&mut self, error: WriteError) {
        self.error.get_or_insert(error);
    }
}

/// The marked blocks that are written next, in the order of the device.
struct Window<'t> {
    blocks: ArrayVec<DirtyBlock, WINDOW>,
    selection: &'t Selection,
    summary: Summary,
    /// Set in the second pass, over the blocks that other threads had marked in the first. It waits for
    /// each of them.
    waits: bool,
    /// Set once the wait for a block that another thread had marked has timed out. The write-back
    /// does not wait for such a block again.
    gave_up: bool,
}

/// Why a block is not written now.
enum WriteBackSkip {
    /// The block is clean, or has left the cache.
    Clean,
    /// The block has `WRITE` or `BACK`: a thread modifies it, or writes it to the device.
    Marked,
    /// The log must be durable up to this position first.
    Log(u64),
    /// A callback has refused the block, or has panicked.
    Refused(WriteError),
}

impl Shared {
    /// Writes the dirty blocks that `selection` names. A block that fails does not keep the others
    /// from being written.
    pub(crate) async fn write_back(&self, source: &Arc<Source>, selection: &Selection) -> Summary {
        let mut summary = Summary::default();
        let Some(_operation) = Operation::begin(&**source) else {
            summary.fail(WriteError::Closed);
            return summary;
        };
        let mut found = match self.dirty_blocks(source, selection) {
            Ok(found) => found,
            Err(error) => {
                summary.fail(error);
                return summary;
            }
        };
        found.sort_unstable_by_key(|dirty| dirty.key.sector());
        let blocks = ArrayVec::new();
        let mut window = Window { blocks, selection, summary, waits: false, gave_up: false };
        let mut count = found.len();
        loop {
            // The blocks that are left for the second pass move to the front.
            let mut left = 0;
            for at in 0..count {
                if let Some(errno) = source.writes.poisoned() {
                    // The sync or durable write that needs these blocks can no longer succeed, even
                    // if a reset ends the poisoning meanwhile.
                    window.summary.fail(WriteError::Poisoned { errno });
                    break;
                }
                if window.blocks.len() == WINDOW {
                    self.write_window(source, &mut window).await;
                }
                if self.add_to_window(source, &mut window, found[at]).await {
                    found[left] = found[at];
                    left += 1;
                }
            }
            if left == 0 || !selection.wait {
                break;
            }
            (count, window.waits) = (left, true);
        }
        self.write_window(source, &mut window).await;
        window.summary
    }

    /// Marks a block and adds it to the window. If that has to wait, writes the window first. Returns
    /// whether another thread has marked the block and this pass does not wait.
    async fn add_to_window(
        &self,
        source: &Arc<Source>,
        window: &mut Window<'_>,
        next: DirtyBlock,
    ) -> bool {
        let (mut since, mut flushed) = (None, 0);
        loop {
            let obstacle = match self.mark_if_writable(source, next, flushed) {
                Ok(()) => {
                    window.blocks.push(next);
                    return false;
                }
                Err(WriteBackSkip::Clean) => return false,
                Err(WriteBackSkip::Refused(error)) => {
                    window.summary.fail(error);
                    return false;
                }
                Err(WriteBackSkip::Marked) if !window.waits => {
                    window.summary.overlapped |= self.entry(next.frame).word().has(BACK);
                    return true;
                }
                Err(WriteBackSkip::Marked)
                    if check!("write-back: a wait has timed out", window.gave_up) =>
                {
                    return false;
                }
                Err(obstacle) => obstacle,
            };
            self.write_window(source, window).await;
            let waited = match obstacle {
                WriteBackSkip::Log(number) => {
                    flushed = number;
                    self.flush_log(source, next, number).await
                }
                _ => {
                    let waited =
                        self.wait_for_mark(next.frame, next.key, is_marked, &mut since).await;
                    waited.map_err(|error| WriteError::of_wait(error, source.block(next.key)))
                }
            };
            if let Err(error) = waited {
                window.gave_up |= matches!(error, WriteError::Busy { .. });
                window.summary.fail(error);
                return false;
            }
        }
    }

    /// Marks a dirty block if it may be written now. The log is durable up to `flushed`.
    fn mark_if_writable(
        &self,
        source: &Arc<Source>,
        dirty: DirtyBlock,
        flushed: u64,
    ) -> Result<(), WriteBackSkip> {
        let entry = self.mark_back(dirty)?;
        let may_write = self.may_write(source, dirty, flushed);
        if may_write.is_err() {
            self.unmark_back(entry, dirty.frame, 0);
            self.drop_if_abandoned(source, dirty.key);
        }
        may_write
    }

    /// Sets `BACK` on the entry of a dirty block.
    fn mark_back(&self, dirty: DirtyBlock) -> Result<&Entry, WriteBackSkip> {
        let entry = self.entry(dirty.frame);
        let mut word = entry.word();
        loop {
            if word.has(WRITE | BACK) && entry.key() == dirty.key {
                return Err(WriteBackSkip::Marked);
            }
            let ready = word.has(VALID) && word.has(DIRTY) && word.frame() == dirty.frame;
            if !ready || word.has(WRITE | BACK | EVICT | IO | STALE) {
                return Err(WriteBackSkip::Clean);
            }
            match entry.try_change(word, BACK, 0) {
                Ok(()) => break,
                Err(now) => word = now,
            }
        }
        // The frame may belong to another block by now, which is not selected.
        if entry.key() != dirty.key {
            self.unmark_back(entry, dirty.frame, 0);
            return Err(WriteBackSkip::Clean);
        }
        Ok(entry)
    }

    /// Returns whether a marked block may be written now, or why not.
    ///
    /// While `BACK` is set no log position is raised, because that needs `WRITE`. So a positive answer
    /// stays true.
    fn may_write(
        &self,
        source: &Source,
        dirty: DirtyBlock,
        flushed: u64,
    ) -> Result<(), WriteBackSkip> {
        let options = &source.writes.options;
        let lsn = self.frames.header(dirty.frame).lsn();
        let is_flushed = check!("write-back: the log was flushed that far", lsn <= flushed);
        if let Some(wal) = options.wal.as_ref().filter(|_| !is_flushed) {
            let durable = contain(|| wal.durable());
            let block = source.block(dirty.key);
            match durable {
                Ok(durable) if check!("write-back: the log is durable", durable >= lsn) => {}
                Ok(_) => return Err(WriteBackSkip::Log(lsn)),
                Err(_) => return Err(WriteBackSkip::Refused(WriteError::Panicked { block })),
            }
        }
        if let Some(look) = &options.before_write {
            let block = source.block(dirty.key);
            // SAFETY: by rules 4 and 5 of `word`: while `BACK` is set no thread writes the bytes,
            // and the entry keeps its frame.
            let bytes = unsafe { self.frames.bytes(dirty.frame).as_ref() };
            match contain(|| look(block, bytes)) {
                Ok(true) => {}
                Ok(false) => return Err(WriteBackSkip::Refused(WriteError::Verify { block })),
                Err(_) => return Err(WriteBackSkip::Refused(WriteError::Panicked { block })),
            }
        }
        Ok(())
    }

    /// Makes the log durable up to `number`. For a task a thread of the pool does that,
    /// because it blocks.
    async fn flush_log(
        &self,
        source: &Arc<Source>,
        dirty: DirtyBlock,
        number: u64,
    ) -> Result<(), WriteError> {
        let Some(wal) = &source.writes.options.wal else { return Ok(()) };
        let block = source.block(dirty.key);
        let flushed = if is_blocking().await {
            contain(|| wal.flush(number))
        } else {
            let wal = std::sync::Arc::clone(wal);
            self.call(source.id, move || wal.flush(number)).wait().await
        };
        match flushed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(WriteError::Wal { errno: errno_of(&error), block }),
            Err(_) => Err(WriteError::Panicked { block }),
        }
    }

    /// Writes the blocks of the window and empties it. Adjacent blocks are one operation; if that
    /// fails, each of them is written alone.
    ///
    /// A failed durable write is not repeated: it may have consumed the kernel's single error report, and
    /// the repetition could then succeed although bytes are lost.
    async fn write_window(&self, source: &Arc<Source>, window: &mut Window<'_>) {
        let Window { blocks, selection, summary, .. } = window;
        for together in [true, false] {
            let (mut left, mut again) = (&blocks[..], ArrayVec::new());
            while !left.is_empty() {
                let mut results = [Err(None); RUNS];
                // Registered before the write, and ended after a failed block has poisoned the device:
                // a sync that runs beside this write then sees the failure.
                let writing = selection.durable.then(|| source.writes.group.begin_write());
                let how = (together, selection.durable);
                let given = self.write_runs(source, left, how, &mut results).await;
                let (now, behind) = left.split_at(given);
                let runs = || self.runs(source, now, together).zip(results);
                for (run, result) in runs() {
                    match result {
                        Ok(()) => {}
                        Err(_) if run.len() > 1 && !selection.durable => {
                            again.extend(run.iter().copied())
                        }
                        Err(errno) => run.iter().for_each(|&one| {
                            summary.fail(self.fail_write(source, one, selection, errno));
                        }),
                    }
                }
                let durable = match writing {
                    Some(writing) => writing.end().await,
                    None => false,
                };
                let is_written = |result| check!("write-back: the device has it", result == Ok(()));
                let written = runs().filter(|(_, result)| is_written(*result));
                let mut written = written.flat_map(|(run, _)| run).copied();
                loop {
                    let some: ArrayVec<_, TOGETHER> = written.by_ref().take(TOGETHER).collect();
                    if some.is_empty() {
                        break;
                    }
                    self.finish(source, &some, durable);
                    summary.written += some.len();
                }
                if selection.durable && !durable {
                    let errno = source.writes.poisoned().unwrap_or(libc::EIO);
                    summary.fail(WriteError::Poisoned { errno });
                }
                left = behind;
            }
            *blocks = again;
        }
    }

    /// Returns the runs of adjacent blocks, or the blocks one by one.
    fn runs<'b>(
        &self,
        source: &Source,
        blocks: &'b [DirtyBlock],
        together: bool,
    ) -> impl Iterator<Item = &'b [DirtyBlock]> {
        blocks.chunk_by(move |one, next| together && self.is_next(source, *one, *next))
    }

    /// Returns whether `next` begins on the device where `one` ends.
    fn is_next(&self, source: &Source, one: DirtyBlock, next: DirtyBlock) -> bool {
        source.sectors(one.key).end == next.key.sector()
    }

    /// Writes the first [`runs`](Self::runs), as many as the device takes at a time, and waits
    /// for them. Stores the outcome of each run in `results`. Returns the number of blocks of these
    /// runs.
    async fn write_runs(
        &self,
        source: &Arc<Source>,
        blocks: &[DirtyBlock],
        (together, durable): (bool, bool),
        results: &mut [Outcome],
    ) -> usize {
        let mut parts = [IoSlice::new(&[]); WINDOW];
        for (part, dirty) in parts.iter_mut().zip(blocks) {
            self.frames.reading(dirty.frame);
            // SAFETY: by rules 4 and 5 of `word`: while `BACK` is set no thread writes the bytes,
            // and the entry keeps its frame.
            let bytes = unsafe { self.frames.bytes(dirty.frame).as_ref() };
            // The last block may extend beyond the end of the device.
            let left = source.len.saturating_sub(Source::offset(dirty.key));
            *part = IoSlice::new(&bytes[..left.min(bytes.len() as u64) as usize]);
        }
        let batch = Batch::new(source).await;
        let depth = source.write_depth.clamp(1, RUNS);
        let (mut runs, mut given) = (0, 0);
        let since = Instant::now();
        let writing = &source.writes.load.writing;
        writing.fetch_add(1, Ordering::Relaxed); // a measure, also below
        for run in self.runs(source, blocks, together).take(depth) {
            let (offset, parts) = (Source::offset(run[0].key), &parts[given..given + run.len()]);
            let write = Change::Write { offset, parts, durable };
            // SAFETY: until the wait below, the batch is neither moved nor forgotten, the parts
            // live, and their bytes do not change because the blocks keep their marks.
            let write = unsafe { DeviceChange::new(&batch, runs, write) };
            self.counters.write_calls.add(1);
            // If the device panics, the write is dropped, which ends it.
            let _ = contain(|| source.device.begin(write));
            (runs, given) = (runs + 1, given + run.len());
            if runs.is_multiple_of(LOOK_AT_TIME) && since.elapsed() >= ROUND && batch.has_ended() {
                break;
            }
        }
        batch.wait().await;
        #[cfg(not(offlock_model))]
        if runs > 1 && is_blocking().await {
            // If the page cache took the bytes, this thread has not slept, and would go on until the end of
            // its time slice of some milliseconds. Threads with less to do run first.
            std::thread::yield_now();
        }
        writing.fetch_sub(1, Ordering::Relaxed);
        for (number, result) in results.iter_mut().enumerate().take(runs) {
            *result = batch.result(number);
        }
        given
    }

    /// Makes blocks clean that the device has written. There is at least one, and they are in the
    /// order of the device.
    fn finish(&self, source: &Arc<Source>, blocks: &[DirtyBlock], durable: bool) {
        if !durable {
            let note = |unsynced: &mut Unsynced| {
                for run in self.runs(source, blocks, true) {
                    let end = source.sectors(run[run.len() - 1].key).end;
                    unsynced.written.insert(run[0].key.sector()..end);
                }
            };
            step!("write-back: note the sectors as unsynced", source.writes.change_unsynced(note));
        }
        self.counters.written.add(blocks.len() as i64);
        source.writes.load.set_succeeding();
        self.write_back.unlist(&self.frames, source, blocks.iter().map(|one| one.frame), |_| true);
        for one in blocks {
            self.unmark_back(self.entry(one.frame), one.frame, DIRTY);
        }
        // After the marks are cleared: an evictor that finds a marked buffer next in turn moves it to the
        // front of main again.
        step!("write-back: evict the buffers next", self.evict_next(blocks));
    }

    /// Makes the written buffers that were due for eviction the next victims, in the order of `blocks`.
    fn evict_next(&self, blocks: &[DirtyBlock]) {
        let mut lists = self.frames.lists.lock();
        blocks.iter().rev().for_each(|one| lists.evict_next(one.frame));
    }

    /// Notes that the write of a block has failed, and clears its mark. The block stays dirty.
    /// Returns the error to report.
    fn fail_write(
        &self,
        source: &Arc<Source>,
        dirty: DirtyBlock,
        selection: &Selection,
        errno: Option<i32>,
    ) -> WriteError {
        let number = errno.unwrap_or(libc::EIO);
        source.writes.record(number);
        source.writes.load.set_failing(number);
        if selection.durable {
            source.writes.poison(number);
        }
        self.frames.header(dirty.frame).set_failed(true);
        self.unmark_back(self.entry(dirty.frame), dirty.frame, 0);
        self.drop_if_abandoned(source, dirty.key);
        WriteError::of_change(errno, source.block(dirty.key))
    }

    fn unmark_back(&self, entry: &Entry, frame: Frame, clear: u64) {
        self.clear_marks_and_wake(entry, frame, BACK | clear, 0);
    }
}

// The dirty blocks that a write-back selects.

/// The most buffers that a thread writes if it needs one, which a selection returns without an allocation.
/// Enough that the next few misses find clean ones.
const SOME: usize = 64;

/// Which dirty blocks of a device a write-back writes, and how.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// Only blocks in this range. No selection has both a range and another condition.
    pub(crate) sectors: Range<u64>,
    /// The most blocks. If there are more, the oldest are taken.
    pub(crate) most: usize,
    /// Only blocks that became dirty before this time, in milliseconds since the cache was made.
    pub(crate) before: u64,
    /// Makes the blocks durable (FUA).
    pub(crate) durable: bool,
    /// Waits for blocks that are marked.
    pub(crate) wait: bool,
    /// Only blocks whose write has not failed. With a limit of few blocks, older ones that cannot be
    /// written do not take the places of others.
    pub(crate) promising: bool,
    /// Only those that would be evicted next if they were not dirty.
    pub(crate) is_due: bool,
}

impl Selection {
    /// Returns a selection of all blocks that are dirty now.
    pub(crate) fn all() -> Self {
        Self {
            sectors: 0..u64::MAX,
            most: usize::MAX,
            before: u64::MAX,
            durable: false,
            wait: true,
            promising: false,
            is_due: false,
        }
    }

    /// Returns a selection of a few blocks, for a thread that needs a buffer.
    fn few(promising: bool) -> Self {
        Self { most: SOME, wait: false, promising, ..Self::all() }
    }
}

/// A dirty block to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirtyBlock {
    pub(super) key: Key,
    pub(super) frame: Frame,
}

/// The selected dirty blocks.
type DirtyBlocks = SmallVec<[DirtyBlock; SOME]>;

impl Shared {
    /// Returns the selected blocks of the device.
    pub(super) fn dirty_blocks(
        &self,
        source: &Source,
        selection: &Selection,
    ) -> Result<DirtyBlocks, WriteError> {
        if selection.is_due {
            return Ok(self.due_blocks(source, selection));
        }
        let (len, mut walk) = {
            let list = source.writes.dirty.lock();
            (list.len(), list.walk())
        };
        let Selection { sectors, most, before, promising, .. } = selection;
        let step = source.sectors_of_block();
        let count = sectors.end.saturating_sub(sectors.start) / step;
        let is_short = count < len as u64;
        // Allocates without the lock. The length suffices, because the walk leaves out blocks that
        // became dirty after its begin.
        let most = if is_short { count as usize } else { len.min(*most) };
        let mut blocks = DirtyBlocks::new();
        blocks.try_reserve_exact(most).map_err(|_| WriteError::NoMemory)?;
        if is_short {
            // Looks up each block of a range of fewer blocks than the list has.
            let keys = sectors.clone().step_by(step as usize);
            let keys = keys.map(|sector| Key::new(source.id, sector));
            let dirty = |key| Some(DirtyBlock { key, frame: self.dirty_frame(key)? });
            blocks.extend(keys.filter_map(dirty));
            return Ok(blocks);
        }
        while blocks.len() < most && !walk.is_over() {
            let list = source.writes.dirty.lock();
            for frame in list.piece(&self.frames, &mut walk) {
                let (header, key) = (self.frames.header(frame), self.entry(frame).key());
                if header.since() >= *before || blocks.len() == most {
                    return Ok(blocks);
                }
                if sectors.contains(&key.sector()) && !(*promising && header.has_failed()) {
                    blocks.push(DirtyBlock { key, frame });
                }
            }
        }
        Ok(blocks)
    }

    /// Returns the dirty blocks of the device that would be evicted next, from the end of the list
    /// that has the next victim. They stay on it. Releases the lock after a few visits each.
    fn due_blocks(&self, source: &Source, selection: &Selection) -> DirtyBlocks {
        let (mut blocks, mut visits, mut at) = (DirtyBlocks::new(), 0..selection.most, None);
        while !visits.is_empty() {
            let lists = self.frames.lists.lock();
            for _ in visits.by_ref().take(LOOKS as usize) {
                let Some(frame) = lists.next_due(at) else { return blocks };
                at = Some(frame);
                let entry = self.entry(frame);
                let (word, key) = (entry.word(), entry.key());
                let is_due = is_evictable_but_dirty(word) && word.used() == 0;
                if is_due && key.device() == source.id && !self.frames.header(frame).has_failed() {
                    blocks.push(DirtyBlock { key, frame });
                }
            }
        }
        blocks
    }
}

// The cleaner: writes back buffers that have been dirty for long, or because too many are dirty.
// Runs in the rounds of the [pool](super::pool), and in threads that need a buffer.

/// The cleaner syncs a device once its unsynced sectors are in more ranges than this, and in more
/// than four for each buffer. A range takes about 30 bytes. An earlier sync would make the device
/// write blocks that are about to be overwritten.
const MOST_EXTENTS: usize = 16 << 10;

/// When the cleaner writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A buffer that has been dirty for this long is written.
    pub(crate) age: Duration,
    /// The share of the capacity, in parts of 256, above which all dirty buffers are written.
    pub(crate) begin: u32,
    /// The share of the capacity, in parts of 256, above which writers wait for write-backs.
    pub(crate) most: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { age: Duration::from_secs(5), begin: 26, most: 192 }
    }
}

impl Shared {
    /// Writes the buffers of a device that are due in this round: all dirty ones if it is `urgent`,
    /// otherwise those that are old enough.
    pub(super) fn clean(&self, source: &Arc<Source>, urgent: bool) {
        let old = self.write_back.now().saturating_sub(self.write_back.age);
        let before = if urgent { u64::MAX } else { old };
        let selection = Selection { before, wait: false, ..Selection::all() };
        // The device remembers an error for its handles.
        block_on(self.write_back(source, &selection));
        block_on(self.limit_extents(source));
    }

    /// Syncs a device if its unsynced sectors are in so many ranges that these take much memory. A
    /// failure poisons the device, so later calls report it.
    pub(super) async fn limit_extents(&self, source: &Arc<Source>) {
        if self.write_back.has_many_extents(source) {
            let _ = self.sync_device(source, source.writes.group.losses()).await;
        }
    }

    /// Makes a write-back within another operation. If a thread blocks, the future of the write-back is
    /// on its stack and allocates nothing. For a task it is on the heap, so that the future of the
    /// operation stays small.
    async fn write_back_inside(&self, source: &Arc<Source>, selection: &Selection) -> Summary {
        if is_blocking().await {
            return block_on(self.write_back(source, selection));
        }
        Box::pin(self.write_back(source, selection)).await
    }

    /// Writes a few buffers of one device: those whose write has not failed, or if none of these was
    /// written and the device has refused none, any.
    async fn write_back_some(&self, source: &Arc<Source>) -> Summary {
        let summary = self.write_back_inside(source, &Selection::few(true)).await;
        // The oldest are often those that the device has just refused.
        let error = summary.error;
        if summary.written > 0
            || matches!(error, Some(WriteError::Io { .. } | WriteError::Panicked { .. }))
        {
            return summary;
        }
        self.write_back_inside(source, &Selection::few(false)).await
    }

    /// Writes the buffers of a device that would be evicted next if they were clean, for a thread
    /// that needs a buffer. Returns their number.
    pub(super) async fn write_back_due(&self, source: &Arc<Source>) -> usize {
        let selection = Selection { is_due: true, ..Selection::few(true) };
        self.write_back_inside(source, &selection).await.written
    }
}

// Limits that keep a full, slow or hung device from delaying the other devices of its cache.
//
// ```text
//  dirty buffers:  | device A, hung: 1/2 of what may be dirty | B: 1/2 of the rest | C: ... | clean |
// ```
//
// The device of a cache with one device may use all buffers. Among several devices:
//
// 1. Once another device has asked for a buffer, a device has at most as many dirty bytes as are
//    left of the cache's limit. So a device that hangs holds half of the limit, two hold a third
//    each, and some is always left. A device may always have a [`FLOOR`]th of the cache dirty, in
//    case another one took all before this one was attached.
// 2. A device whose last write failed gets no more dirty buffers while it has some. Its blocks can
//    be written past the cache. A write that succeeds, past the cache or from it, ends this.
// 3. A device without a write in flight, whose buffers wait for their log, may have more: it does
//    not hang.
// 4. While another device is attached, the loads in flight that the tasks of a device have begun,
//    and its claims, take at most an equal share of the cache. Of the devices that have not asked
//    for a buffer at most [`QUIET`] count. A thread that blocks has one load at most.
// 5. A thread writes back buffers of its own device only, and wakes the cleaner for the others.

/// A device may have the cache's size divided by this dirty, whatever the others have.
const FLOOR: usize = 64;
/// A share is reserved for at most this many devices that have not asked for a buffer.
/// Several hung devices leave a part of the cache, and many idle ones cost a busy one little.
const QUIET: usize = 3;

impl Shared {
    /// Returns whether a thread that is about to dirty a block writes other blocks first.
    pub(crate) fn must_clean(&self, source: &Source) -> bool {
        self.write_back.is_too_dirty() && !self.write_back.is_shared(source)
    }

    /// Waits until a thread may dirty a block. Writes some of the device's buffers if too many are
    /// dirty.
    pub(super) async fn limit_dirty(&self, source: &Arc<Source>, key: Key) -> Result<(), GetError> {
        if self.must_clean(source) {
            self.write_back_for(source).await;
        }
        let mut since = None;
        while !self.may_dirty(source, key) {
            let load = &source.writes.load;
            let summary = self.write_back_some(source).await;
            if summary.written > 0 {
                continue;
            }
            source.check_write()?;
            let is_over = since.get_or_insert_with(Instant::now).elapsed() >= self.waiting.patience;
            // The result of another thread's write shows whether the device still fails.
            let is_told = summary.error.is_some() || !summary.overlapped || is_over;
            if let Some(errno) = load.failing().filter(|_| is_told) {
                return Err(GetError::Io { errno, block: source.block(key) });
            }
            if load.writing.load(Ordering::Relaxed) == 0 {
                // The blocks wait for their log: the device does not hang.
                return Ok(());
            }
            if is_over {
                return Err(GetError::NoFreeBuffers);
            }
            self.waiting.sleep().await;
        }
        Ok(())
    }

    /// Returns whether the block may become dirty now, or is dirty already.
    pub(super) fn may_dirty(&self, source: &Source, key: Key) -> bool {
        self.write_back.may_dirty(source) || self.is_dirty(key)
    }

    /// Writes some dirty buffers of a device because a miss of it needs a buffer. Returns the number.
    pub(super) async fn write_back_for(&self, source: &Arc<Source>) -> usize {
        if self.write_back.dirty_bytes() == 0 {
            return 0;
        }
        if !self.write_back.has_one_device() {
            self.write_back.hurry();
        }
        self.write_back_some(source).await.written
    }
}
