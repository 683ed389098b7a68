//! Discards, zeroes and writes past the cache.
//!
//! The range is [excluded](crate::dirty::Exclusion) first, so that no block of it is inserted.
//! Clean blocks are invalidated. Dirty blocks get the mark of a write-back, so that they neither
//! change nor leave the cache, and are dropped once the device has succeeded. If the device fails,
//! they stay dirty.

use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::ops::Range;

use offlock_sync::{Arc, check, step, thread};

use super::Shared;
use super::completion::{Batch, Change, DeviceChange, Outcome};
use super::write::is_marked;
use crate::dirty::{Extents, WriteError, errno_of};
use crate::error::GetError;
use crate::frames::Frame;
use crate::hazard;
use crate::source::{Operation, Source};
use crate::wait::{contain, is_blocking};
use crate::word::{BACK, DIRTY, Key, STALE, WAITED, WRITE};

/// The operation on a range of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrite<'b> {
    Discard,
    Zero,
    Write(&'b [u8]),
}

/// Dirty blocks that are marked `BACK`.
pub(super) type Marked = Vec<(Key, Frame)>;

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
        let _operation = Operation::begin(&**source).ok_or(WriteError::Closed)?;
        // The cleaner does this only for devices with dirty blocks.
        self.limit_extents(source).await;
        self.check_sync(source)?;
        let _excluded = source.writes.excluded.enter(sectors.clone()).await;
        // Before blocks are marked, because an error after that would leave them marked.
        hazard::reserve().map_err(GetError::from)?;
        if source.writes.refuses_writers() || source.in_flight.is_abandoned() {
            return Err(WriteError::Closed); // otherwise the close waits for the exclusion
        }
        let marked = self.invalidate_or_mark_all(source, &sectors).await?;
        // Before the operation, because it may lose the old contents even if it fails.
        let new = source.writes.change_unsynced(|unsynced| {
            let mut new = Extents::default();
            new.insert(sectors.clone());
            for known in [&unsynced.written, &unsynced.syncing] {
                known.overlapping(&sectors).for_each(|range| new.remove(&range));
            }
            unsynced.written.insert(sectors.clone());
            new
        });
        let offset = sectors.start << 9;
        let len = (sectors.end << 9).min(source.len) - offset;
        let result = self.overwrite_on_device(source, (offset, len), how).await;
        // After the wait this may run on another thread, which has reserved no slot yet.
        while hazard::reserve().is_err() {
            self.waiting.sleep().await;
        }
        source.writes.change_unsynced(|unsynced| {
            if result == Err(Some(libc::EOPNOTSUPP)) && !matches!(how, Overwrite::Write(_)) {
                // The device has changed nothing, and no other operation overlaps the range.
                for range in new.iter() {
                    unsynced.written.remove(&range);
                    unsynced.syncing.remove(&range);
                }
            } else {
                // Again, because a sync that began meanwhile does not make it durable.
                unsynced.written.insert(sectors.clone());
            }
        });
        if result.is_err() {
            self.unmark_all(source, &marked);
        }
        let block = source.block(Key::new(source.id, sectors.start));
        match result {
            Ok(()) => {
                if matches!(how, Overwrite::Write(_)) {
                    source.writes.load.set_succeeding();
                }
                marked.iter().for_each(|&(key, frame)| self.drop_marked(source, key, frame));
                Ok(())
            }
            Err(Some(errno)) => Err(WriteError::Io { errno, block }),
            Err(None) => Err(WriteError::Panicked { block }),
        }
    }

    /// Begins the operation on the device, and waits for its end.
    async fn overwrite_on_device(
        &self,
        source: &Arc<Source>,
        (offset, len): (u64, u64),
        how: Overwrite<'_>,
    ) -> Outcome {
        let bytes = if let Overwrite::Write(bytes) = how { bytes } else { &[] };
        let parts = &[IoSlice::new(bytes)];
        let change = match how {
            Overwrite::Write(_) => Change::Write { offset, parts, durable: false },
            Overwrite::Discard => Change::Discard { offset, len },
            Overwrite::Zero => Change::Zero { offset, len },
        };
        let batch = Batch::new(source).await;
        // SAFETY: the batch is waited for below, before it or the parts go.
        let change = unsafe { DeviceChange::new(&batch, 0, change) };
        self.counters.write_calls.add(matches!(how, Overwrite::Write(_)).into());
        // If the device panics, the change is dropped, which ends it.
        let _ = contain(|| source.device.begin(change));
        batch.wait().await;
        batch.result(0)
    }

    /// Drops the clean buffers of an excluded range, and marks and returns the dirty ones.
    async fn invalidate_or_mark_all(
        &self,
        source: &Arc<Source>,
        sectors: &Range<u64>,
    ) -> Result<Marked, WriteError> {
        let (mut marked, mut since) = (Marked::new(), None);
        let is_blocking = is_blocking().await;
        loop {
            let mut one = |key| self.invalidate_or_mark(source, key, is_blocking, &mut marked);
            let ranges = std::iter::once(sectors.clone());
            let mut keys = self.lookup.keys_in(source, ranges, |sector| sectors.contains(&sector));
            let obstacle = keys.find_map(|key| one(key).err());
            drop(keys);
            let Some(obstacle) = obstacle else { return Ok(marked) };
            // No thread waits while it has blocks marked.
            self.unmark_all(source, &marked);
            marked.clear();
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

    pub(super) fn invalidate_or_mark(
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
            if word.has(WRITE) && is_blocking && hazard::protected_by_me(entry) > 0 {
                return Err(OverwriteBlocked::Error(key, GetError::WouldDeadlock));
            }
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
    pub(super) fn unmark_all(&self, source: &Arc<Source>, marked: &Marked) {
        for &(key, frame) in marked {
            self.clear_marks_and_wake(self.entry(frame), frame, BACK, 0);
            self.drop_if_abandoned(source, key);
        }
    }

    /// Drops a block that the caller has marked. Waits for memory if the thread has no slot,
    /// because a mark that stays would block the other users of the block for ever.
    pub(super) fn drop_marked(&self, source: &Arc<Source>, key: Key, frame: Frame) {
        while hazard::reserve().is_err() {
            thread::yield_now();
        }
        let home = self.lookup.lock(key);
        let entry = self.entry(frame);
        // As in `try_invalidate`: the slot keeps the frame until it is on the list of the dead.
        let slot = hazard::protect(entry).expect("a slot is reserved");
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
pub(super) enum OverwriteBlocked {
    Marked(Key, Frame),
    /// It is being read or evicted.
    Loading(Key),
    Error(Key, GetError),
}

// Bypasses: the caller writes blocks to the device by its own means, while the cache excludes
// them. A bypass begins and ends without a wait.
//
// The blocks are treated as in a [discard](super::overwrite): their range is excluded, clean
// buffers are invalidated, and dirty ones are marked, and dropped once the device has the new
// bytes.

/// A bypass prefetches the home of the block that is this many behind the one it looks up, because
/// neighbours have homes at random places of the table. More than the misses that a CPU has
/// in flight.
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
    source: Option<Operation<Arc<Source>>>,
    sectors: Range<u64>,
    marked: Marked,
    /// Set once the holder may have begun to write.
    is_begun: bool,
    /// Not `Send`, because its end needs the slots that this thread has reserved.
    _thread: PhantomData<*const ()>,
}

impl Bypass {
    /// Ends the bypass with the result of the write. After a success the cache drops its buffers of
    /// the blocks. After an error each sector has its old or its new bytes, and dirty buffers stay
    /// dirty.
    ///
    /// # Errors
    ///
    /// [`WriteError::Io`] with the errno of `result` and the first block.
    pub fn finish(mut self, result: io::Result<()>) -> Result<(), WriteError> {
        self.end(result)
    }

    fn end(&mut self, result: io::Result<()>) -> Result<(), WriteError> {
        let Some(source) = self.source.take() else { return Ok(()) };
        let _leaves = Leaves { source: &source, sectors: &self.sectors };
        let shared = &source.cache;
        // Inserted again at the end, because a sync that began meanwhile does not make the write
        // durable.
        if self.is_begun {
            source.writes.change_unsynced(|unsynced| unsynced.written.insert(self.sectors.clone()));
        }
        if let Err(error) = result {
            shared.unmark_all(&source, &self.marked);
            let block = source.block(Key::new(source.id, self.sectors.start));
            return Err(WriteError::Io { errno: errno_of(&error), block });
        }
        source.writes.load.set_succeeding();
        shared.counters.write_calls.add(1);
        let marked = self.marked.iter();
        marked.for_each(|&(key, frame)| shared.drop_marked(&source, key, frame));
        Ok(())
    }
}

/// Ends the exclusion of the range, also if the end of the write panics.
struct Leaves<'b> {
    source: &'b Source,
    sectors: &'b Range<u64>,
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.source.writes.excluded.leave(self.sectors);
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
        if is_long || self.write_back.has_many_extents(source, self.frames.count()) {
            return Ok(None);
        }
        // Reserved first: once blocks are marked, no step that unmarks them may fail.
        hazard::reserve().map_err(GetError::from)?;
        let operation = Operation::begin(Arc::clone(source)).ok_or(WriteError::Closed)?;
        if !source.writes.excluded.try_enter(&sectors) {
            return Ok(None);
        }
        let (marked, is_begun) = (Marked::new(), false);
        let source_of = Some(operation);
        let mut bypass =
            Bypass { source: source_of, sectors, marked, is_begun, _thread: PhantomData };
        if source.writes.refuses_writers() {
            return Err(WriteError::Closed); // the drop of `bypass` changes nothing
        }
        let ahead = blocks.clone().skip(AHEAD).map(Some).chain(std::iter::repeat(None));
        for (block, ahead) in blocks.zip(ahead) {
            if let Some(key) = ahead.and_then(|ahead| source.key(ahead)) {
                self.lookup.prefetch(key);
            }
            let Some(key) = source.key(block) else { continue };
            if self.invalidate_or_mark(source, key, true, &mut bypass.marked).is_err() {
                return Ok(None); // the drop of `bypass` unmarks the blocks
            }
        }
        // Before the write: whether it succeeds or not, the old bytes may be gone.
        source.writes.change_unsynced(|unsynced| unsynced.written.insert(bypass.sectors.clone()));
        bypass.is_begun = true;
        Ok(Some(bypass))
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
