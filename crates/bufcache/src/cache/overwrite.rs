//! Discards, zeroes and writes past the cache.
//!
//! The range is [excluded](crate::dirty::Exclusion) first, so that no block of it is inserted.
//! Clean blocks are invalidated. Dirty blocks get the mark of a write-back, so that they neither
//! change nor leave the cache, and are dropped once the device has succeeded. If the device fails,
//! they stay dirty.

use std::io::{self, IoSlice};
use std::mem;
use std::ops::Range;

use offlock_sync::{Arc, check, step, thread};

use super::Shared;
use super::completion::{Change, Outcome, make};
use super::write::is_marked;
use crate::dirty::{Extents, WriteError, errno_of};
use crate::error::GetError;
use crate::frames::Frame;
use crate::hazard;
use crate::source::{Operation, Source};
use crate::wait::is_blocking;
use crate::word::{BACK, DIRTY, Key, STALE, WAITED, WRITE};

/// The operation on a range of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrite<'b> {
    Discard,
    Zero,
    Write(&'b [u8]),
}

/// Dirty blocks that are marked `BACK`.
type Marked = Vec<(Key, Frame)>;

/// A range of a device that is excluded from the cache while the device changes. The drop ends the
/// exclusion, and leaves the dirty blocks dirty.
#[derive(Debug)]
struct ExcludedRange {
    source: Operation<Arc<Source>>,
    sectors: Range<u64>,
    marked: Marked,
}

impl ExcludedRange {
    /// Adds the range to the unsynced sectors: the device may have changed it, and not durably.
    fn note_unsynced(&self) {
        let written = self.sectors.clone();
        self.source.writes.change_unsynced(|unsynced| unsynced.written.insert(written));
    }

    /// Ends the exclusion with the result of the device. After a success the dirty blocks are dropped.
    fn end(mut self, result: Outcome) -> Result<(), WriteError> {
        let block = self.source.block(Key::new(self.source.id, self.sectors.start));
        result.map_err(|errno| WriteError::of_change(errno, block))?;
        let Self { source, marked, .. } = &mut self;
        marked.drain(..).for_each(|(key, frame)| source.cache.drop_marked(source, key, frame));
        Ok(())
    }
}

impl Drop for ExcludedRange {
    fn drop(&mut self) {
        self.source.cache.unmark_all(&self.source, &mut self.marked);
        self.source.writes.excluded.leave(&self.sectors);
    }
}

impl Shared {
    /// Discards, zeroes or writes whole blocks on the device, and drops their cached buffers.
    pub(crate) async fn overwrite(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
        how: Overwrite<'_>,
    ) -> Result<(), WriteError> {
        self.check_sync(source)?;
        if source.is_read_only {
            return Err(WriteError::ReadOnly);
        }
        let sectors = source.sectors_of(blocks);
        if sectors.is_empty() {
            return Ok(());
        }
        // Keeps the device attached: the task and the last handle may be dropped before the end.
        let operation = Operation::begin(Arc::clone(source)).ok_or(WriteError::Closed)?;
        // The cleaner does this only for devices with dirty blocks.
        self.limit_extents(source).await;
        self.check_sync(source)?;
        // The drop of the `ExcludedRange` ends the exclusion.
        mem::forget(source.writes.excluded.enter(sectors.clone()).await);
        let mut excluded = ExcludedRange { source: operation, sectors, marked: Vec::new() };
        // Before the device changes, because `drop_marked` waits for memory if the thread has no slot.
        hazard::reserve().map_err(GetError::from)?;
        if source.writes.refuses_writers() || source.in_flight.is_abandoned() {
            return Err(WriteError::Closed); // otherwise the close waits for the exclusion
        }
        self.invalidate_or_mark_all(&mut excluded).await?;
        // Noted before the operation, because it may lose the old contents even if it fails. `new`
        // are the sectors that become unsynced by a discard or a zero.
        let (sectors, is_write) = (&excluded.sectors, matches!(how, Overwrite::Write(_)));
        let new = source.writes.change_unsynced(|unsynced| {
            let mut new = Extents::default();
            if !is_write {
                new.insert(sectors.clone());
                for known in [&unsynced.written, &unsynced.syncing] {
                    known.overlapping(sectors).for_each(|range| new.remove(&range));
                }
            }
            unsynced.written.insert(sectors.clone());
            new
        });
        let offset = sectors.start << 9;
        let len = (sectors.end << 9).min(source.len) - offset;
        let parts = &[IoSlice::new(if let Overwrite::Write(bytes) = how { bytes } else { &[] })];
        let change = match how {
            Overwrite::Write(_) => Change::Write { offset, parts, durable: false },
            Overwrite::Discard => Change::Discard { offset, len },
            Overwrite::Zero => Change::Zero { offset, len },
        };
        self.counters.write_calls.add(is_write.into());
        let result = make(source, change).await;
        if result == Err(Some(libc::EOPNOTSUPP)) && !is_write {
            // The device has changed nothing, and no other operation overlaps the range.
            source.writes.change_unsynced(|unsynced| {
                for range in new.iter() {
                    unsynced.written.remove(&range);
                    unsynced.syncing.remove(&range);
                }
            });
        } else {
            // Again, because a sync that began meanwhile does not make the change durable.
            excluded.note_unsynced();
        }
        if is_write && result.is_ok() {
            source.writes.load.set_succeeding();
        }
        excluded.end(result)
    }

    /// Drops the clean buffers of an excluded range, and marks the dirty ones.
    async fn invalidate_or_mark_all(&self, excluded: &mut ExcludedRange) -> Result<(), WriteError> {
        let ExcludedRange { source, sectors, marked } = excluded;
        let (is_blocking, mut since) = (is_blocking().await, None);
        loop {
            let mut one = |key| self.invalidate_or_mark(source, key, is_blocking, marked);
            let ranges = std::iter::once(sectors.clone());
            let mut keys = self.lookup.keys_in(source, ranges, |sector| sectors.contains(&sector));
            let obstacle = keys.find_map(|key| one(key).err());
            drop(keys);
            let Some(obstacle) = obstacle else { return Ok(()) };
            // No thread waits while it has blocks marked.
            self.unmark_all(source, marked);
            let (key, waited) = match obstacle {
                OverwriteBlocked::Error(key, error) => {
                    return Err(WriteError::of_wait(error, source.block(key)));
                }
                OverwriteBlocked::Loading(key) => {
                    (key, self.invalidate(source, key, DIRTY).await.map(drop))
                }
                OverwriteBlocked::Marked(key, frame) => {
                    (key, self.wait_for_mark(frame, key, is_marked, &mut since).await)
                }
            };
            waited.map_err(|error| WriteError::of_wait(error, source.block(key)))?;
        }
    }

    fn invalidate_or_mark(
        &self,
        source: &Arc<Source>,
        key: Key,
        is_blocking: bool,
        marked: &mut Marked,
    ) -> Result<(), OverwriteBlocked> {
        loop {
            let home = self.lookup.lock(key);
            let Some(entry) = home.find() else { return Ok(()) };
            let word = entry.word();
            if !check!("discard: no write or write-back runs", !word.has(WRITE | BACK)) {
                return Err(OverwriteBlocked::Marked(key, word.frame()));
            }
            if !word.has(DIRTY) {
                drop(home);
                match self.try_invalidate(Some(source), key, DIRTY, is_blocking) {
                    Ok(Some(true)) => return Ok(()),
                    Ok(Some(false)) => continue, // dirty by now
                    Ok(None) => {
                        step!(
                            "discard: wait for the load",
                            return Err(OverwriteBlocked::Loading(key))
                        );
                        return Ok(());
                    }
                    Err(error) => return Err(OverwriteBlocked::Error(key, error)),
                }
            }
            if marked.len() == marked.capacity() {
                drop(home); // no allocation under the lock
                marked
                    .try_reserve(1)
                    .map_err(|_| OverwriteBlocked::Error(key, GetError::NoMemory))?;
                continue;
            }
            if entry.try_change(word, BACK, 0).is_ok() {
                marked.push((key, word.frame()));
                return Ok(());
            }
        }
    }

    /// Clears the marks. The blocks stay dirty, unless the last handle of the device is dropped.
    fn unmark_all(&self, source: &Arc<Source>, marked: &mut Marked) {
        for (key, frame) in marked.drain(..) {
            self.clear_marks_and_wake(self.entry(frame), frame, BACK, 0);
            self.drop_if_abandoned(source, key);
        }
    }

    /// Drops a block that the caller has marked. Waits for memory if the thread has no slot,
    /// because a mark that stays would block the other users of the block for ever.
    fn drop_marked(&self, source: &Arc<Source>, key: Key, frame: Frame) {
        while hazard::reserve().is_err() {
            thread::yield_now();
        }
        let home = self.lookup.lock(key);
        let entry = self.entry(frame);
        // As in `try_invalidate`: the slot keeps the frame until it is on the list of the dead.
        let (slot, _) = hazard::protect(entry).expect("a slot is reserved");
        entry.change(STALE, DIRTY | BACK | WAITED);
        home.hide(self.frames.header(frame).place());
        drop(home);
        self.write_back.unlist(&self.frames, source, [frame], |_| true);
        self.frames.move_to_dead(frame);
        slot.clear();
        self.waiting.wake(frame);
    }
}

/// Why a block can be neither dropped nor marked.
enum OverwriteBlocked {
    Marked(Key, Frame),
    /// It is being read or evicted.
    Loading(Key),
    Error(Key, GetError),
}

// Bypasses: the caller writes blocks to the device by its own means, while the cache excludes
// them. A bypass begins and ends without a wait.

/// A bypass prefetches the home of the block that is this many behind the one it looks up, because
/// neighbours have homes at random places of the table. More than the misses that a CPU has
/// in flight. A block of a bypass of 256 takes 12 to 18 ns with it, and 20 to 43 without.
const AHEAD: usize = 16;

/// The exclusive right to write a range of blocks to the device directly, from
/// [`Device::try_bypass`](crate::Device::try_bypass).
///
/// Keep it until the write has ended, even if the write is abandoned: a write that reaches the
/// device after that overwrites newer bytes, even of a file that is closed and attached again.
///
/// A get of one of the blocks waits until [`finish`](Self::finish) or the drop, which counts as a
/// failed write. A thread that holds a bypass deadlocks if it gets one of the blocks or closes the
/// device.
#[derive(Debug)]
#[must_use = "a drop counts as a failed write: end it with `finish`"]
pub struct Bypass {
    /// `None` once it has ended.
    excluded: Option<ExcludedRange>,
}

impl Bypass {
    /// Ends the bypass with the result of the write. After a success the cache drops its buffers of
    /// the blocks. After an error, which is returned as [`WriteError::Io`], each sector has its old or its new
    /// bytes, and dirty buffers stay dirty.
    pub fn finish(mut self, result: io::Result<()>) -> Result<(), WriteError> {
        self.end(result)
    }

    fn end(&mut self, result: io::Result<()>) -> Result<(), WriteError> {
        let Some(excluded) = self.excluded.take() else { return Ok(()) };
        // Again, because a sync that began meanwhile does not make the write durable.
        excluded.note_unsynced();
        if result.is_ok() {
            excluded.source.writes.load.set_succeeding();
            excluded.source.cache.counters.write_calls.add(1);
        }
        excluded.end(result.map_err(|error| Some(errno_of(&error))))
    }
}

impl Drop for Bypass {
    fn drop(&mut self) {
        let _ = self.end(Err(io::Error::from_raw_os_error(libc::ECANCELED)));
    }
}

impl Shared {
    /// Excludes a range of blocks, and drops or marks their buffers. Returns `None` if that has to
    /// wait, or if the range is long.
    pub(crate) fn try_bypass(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
    ) -> Result<Option<Bypass>, WriteError> {
        self.check_sync(source)?;
        if source.is_read_only {
            return Err(WriteError::ReadOnly);
        }
        let is_long = blocks.end.saturating_sub(blocks.start) > self.frames.count() as u64;
        let sectors = source.sectors_of(blocks.clone());
        if is_long || self.write_back.has_many_extents(source) {
            return Ok(None);
        }
        // As in `overwrite`, if this thread ends the bypass.
        hazard::reserve().map_err(GetError::from)?;
        let operation = Operation::begin(Arc::clone(source)).ok_or(WriteError::Closed)?;
        if !source.writes.excluded.try_enter(&sectors) {
            return Ok(None);
        }
        let mut excluded = ExcludedRange { source: operation, sectors, marked: Vec::new() };
        if source.writes.refuses_writers() {
            return Err(WriteError::Closed);
        }
        let ahead = blocks.clone().skip(AHEAD).map(Some).chain(std::iter::repeat(None));
        for (block, ahead) in blocks.zip(ahead) {
            if let Some(key) = ahead.and_then(|ahead| source.key(ahead)) {
                self.lookup.prefetch(key);
            }
            let Some(key) = source.key(block) else { continue };
            if self.invalidate_or_mark(source, key, true, &mut excluded.marked).is_err() {
                return Ok(None);
            }
        }
        // Before the write: whether it succeeds or not, the old bytes may be gone.
        excluded.note_unsynced();
        Ok(Some(Bypass { excluded: Some(excluded) }))
    }
}

impl Shared {
    /// Returns whether the device may lack a write of these blocks whose guard has dropped: a block
    /// is dirty, or a failed sync may have lost it.
    pub(crate) fn is_newer(&self, source: &Source, blocks: Range<u64>) -> bool {
        let sectors = source.sectors_of(blocks);
        if source.writes.is_lost(&sectors) {
            return true;
        }
        // A block counts in `dirty_bytes` from before `DIRTY` is set until the device has it; see
        // `WriteBack::list` for the ordering.
        if self.write_back.dirty_bytes() == 0 {
            return false;
        }
        let ranges = std::iter::once(sectors.clone());
        let mut keys = self.lookup.keys_in(source, ranges, |sector| sectors.contains(&sector));
        keys.any(|key| self.is_dirty(key))
    }

    /// Returns whether the block is cached and dirty.
    pub(super) fn is_dirty(&self, key: Key) -> bool {
        self.dirty_frame(key).is_some()
    }

    /// Returns the frame of a block that is cached and dirty.
    pub(super) fn dirty_frame(&self, key: Key) -> Option<Frame> {
        // A block that leaves the table during this call was clean before, or was invalidated.
        let word = self.lookup.find(key).and_then(|entry| entry.look(key))?;
        word.has(DIRTY).then(|| word.frame())
    }
}
