//! Durability: syncs, durable writes (FUA) and resets.
//!
//! # The rule
//!
//! A block is durable once a sync of the device that began after the block's write ended has
//! succeeded, or if that write was durable. So a sync of the cache first writes the dirty blocks,
//! and then waits for a sync of the device that begins after that. A sync that runs already is not
//! enough.

use std::ops::Range;
use std::time::Instant;

use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::{Arc, check, step};

use super::Shared;
use super::completion::{Change, make};
use super::pool::Lane;
use super::write::is_marked;
use super::write_back::Selection;
use crate::dirty::{Extents, Stage, Unsynced, WriteError};
use crate::engine::refuses_wait;
use crate::error::GetError;
use crate::source::{Operation, Source};
use crate::wait::{block_on, is_blocking};
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, Key, STALE, VALID, WRITE};

impl Shared {
    /// Returns an error if the device is closed or poisoned.
    pub(super) fn check_sync(&self, source: &Source) -> Result<(), WriteError> {
        if source.writes.is_closed() {
            return Err(WriteError::Closed);
        }
        self.check_poison(source)
    }

    fn check_poison(&self, source: &Source) -> Result<(), WriteError> {
        source.writes.poisoned().map_or(Ok(()), |errno| Err(WriteError::Poisoned { errno }))
    }

    /// Writes the dirty blocks of a range to the device, which does not make them durable.
    pub(crate) async fn flush(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
    ) -> Result<(), WriteError> {
        self.check_sync(source)?;
        let selection = Selection { sectors: source.sectors_of(blocks), ..Selection::all() };
        self.flush_selected(source, &selection).await
    }

    /// Writes the selected dirty blocks to the device, even if that is closed.
    async fn flush_selected(
        &self,
        source: &Arc<Source>,
        selection: &Selection,
    ) -> Result<(), WriteError> {
        let summary = self.write_back(source, selection).await;
        self.check_poison(source)?;
        summary.error.map_or(Ok(()), Err)
    }

    /// Makes all blocks durable that were dirtied before this call.
    pub(crate) async fn sync(&self, source: &Arc<Source>) -> Result<(), WriteError> {
        let losses = source.writes.group.losses();
        let flushed = self.flush(source, 0..u64::MAX).await;
        if flushed == Err(WriteError::Closed) {
            return flushed;
        }
        // Also after an error, so that the blocks that could be written are durable.
        self.sync_device(source, losses).await?;
        flushed
    }

    /// Waits for a sync of the device that begins after this call. Fails if the device has reported
    /// lost writes since the caller read `losses`.
    pub(super) async fn sync_device(
        &self,
        source: &Arc<Source>,
        losses: u64,
    ) -> Result<(), WriteError> {
        self.check_poison(source)?;
        if source.is_read_only {
            return Ok(()); // the cache has written nothing
        }
        let _operation = Operation::begin(&**source).ok_or(WriteError::Closed)?;
        let sync = async {
            // The sync before this one may have failed. The kernel reports lost writes once, so
            // this sync would succeed without them.
            if !check!("sync: the device is not poisoned", source.writes.poisoned().is_none()) {
                return false;
            }
            source.writes.change_unsynced(Unsynced::begin_sync);
            self.counters.syncs.add(1);
            let mut result = Ok(());
            step!("sync: ask the device", result = make(source, Change::Sync).await);
            let poison = |errno: &Option<i32>| source.writes.poison(errno.unwrap_or(libc::EIO));
            result.inspect_err(poison).is_ok()
        };
        let durable = || source.writes.change_unsynced(Unsynced::end_sync);
        if source.writes.group.join(losses, sync, durable).await {
            return Ok(());
        }
        // A reset by another thread may have ended the poisoning meanwhile. That does not make the
        // caller's blocks durable.
        Err(WriteError::Poisoned { errno: source.writes.poisoned().unwrap_or(libc::EIO) })
    }

    /// Makes the blocks of a range durable (FUA).
    pub(crate) async fn write_through(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
    ) -> Result<(), WriteError> {
        self.check_sync(source)?;
        let losses = source.writes.group.losses();
        let sectors = source.sectors_of(blocks);
        let selection = Selection { sectors: sectors.clone(), durable: true, ..Selection::all() };
        self.flush_selected(source, &selection).await?;
        // Another thread may have written some of the blocks without FUA.
        let is_synced = !source.writes.unsynced(|unsynced| unsynced.touches(&sectors));
        let is_synced = check!("write through: no sector is unsynced", is_synced);
        if is_synced { Ok(()) } else { self.sync_device(source, losses).await }
    }

    /// Ends the poisoning of a device whose sync failed, so that it can be written again.
    ///
    /// A block that was written since the last good sync becomes dirty again if it stayed in the
    /// cache since that write. Returns the other blocks. These are lost even if they are cached,
    /// because the bytes that were read from the device after the write may be older ones.
    pub(crate) async fn reset(&self, source: &Arc<Source>) -> Result<Vec<Range<u64>>, WriteError> {
        // One reset at a time, and none beside a close.
        let _alone = source.writes.alone.enter(0..1).await;
        if source.writes.poisoned().is_none() {
            return Ok(Vec::new());
        }
        // A write that began before the failure may note its sectors after the look at them, and the
        // sync that covers the write may fail then. This failure changes no errno, so the reset looks
        // again if a loss was reported.
        let lost = source.writes.forgive_after(async || self.keep_or_lose(source).await).await?;
        // All these sectors stay unsynced until a sync succeeds, because the device may lose their
        // writes after this reset, too.
        let by = source.shift - 9;
        Ok(lost.iter().map(|range| range.start >> by..range.end >> by).collect())
    }

    /// Makes the blocks dirty that were written since the last good sync and stayed in the cache
    /// since. Returns the sectors of the others.
    async fn keep_or_lose(&self, source: &Arc<Source>) -> Result<Extents, WriteError> {
        self.wait_for_overwrites(source).await?;
        step!("reset: wait for the write-backs", self.wait_for_write_backs(source).await?);
        let taken = source.writes.change_unsynced(|unsynced| {
            unsynced.begin_sync();
            unsynced.syncing.clone()
        });
        let mut lost = taken.clone();
        let has = |sector| taken.touches(&(sector..sector + 1));
        for key in self.lookup.keys_in(source, taken.iter(), has) {
            if self
                .dirty_again(source, key)
                .await
                .map_err(|error| WriteError::of_wait(error, source.block(key)))?
            {
                lost.remove(&source.sectors(key));
            }
        }
        Ok(lost)
    }

    /// Waits for the discards, zeroes and writes past the cache that may have run beside the failed sync,
    /// which may have given them up. One that ended after the reset would count as made durable by the
    /// next sync. A poisoned device begins no others.
    async fn wait_for_overwrites(&self, source: &Source) -> Result<(), WriteError> {
        let (mut rounds, mut since) = (0, None);
        while let Some(sector) = source.writes.excluded.first() {
            let block = source.block(Key::new(source.id, sector));
            let waited = self.waiting.pause(&mut rounds, &mut since).await;
            waited.map_err(|error| WriteError::of_wait(error, block))?;
        }
        Ok(())
    }

    /// Waits for the write-backs that may have run beside the failed sync. Afterwards each of their
    /// blocks is dirty, or among the unsynced sectors.
    async fn wait_for_write_backs(&self, source: &Source) -> Result<(), WriteError> {
        let mut since = None;
        let mut walk = source.writes.dirty.lock().walk();
        while !walk.is_over() {
            let marked = {
                let list = source.writes.dirty.lock();
                let keyed = |frame| (frame, self.entry(frame).key());
                let mut frames = list.piece(&self.frames, &mut walk);
                frames.find(|frame| self.entry(*frame).word().has(BACK)).map(keyed)
            };
            let Some((frame, key)) = marked else { continue };
            let of_wait = |error| WriteError::of_wait(error, source.block(key));
            // If the key differs, the frame belongs to another block by now.
            let is_there = |entry: &Entry| entry.word().has(BACK) && entry.key() == key;
            while is_there(self.entry(frame)) {
                let waited = self.wait_for_mark(frame, key, is_marked, &mut since).await;
                waited.map_err(of_wait)?;
            }
        }
        Ok(())
    }

    /// Makes a block dirty if it stayed in the cache since it was written. Returns whether it did,
    /// so that its write is not lost.
    ///
    /// A clean copy that was read from the device after the write is invalidated, so that the next
    /// get reads what the device has now. A dirty copy of that kind stays, because it was modified
    /// since.
    async fn dirty_again(&self, source: &Arc<Source>, key: Key) -> Result<bool, GetError> {
        let mut since: Option<Instant> = None;
        let mut rounds = 0;
        loop {
            let Some(entry) = self.lookup.find(key) else { return Ok(false) };
            let word = entry.word();
            // Before the test for `DIRTY`: a block that the device has just written still has the
            // flag, but is about to become clean.
            if word.has(WRITE | BACK) {
                self.wait_for_mark(word.frame(), key, is_marked, &mut since).await?;
                continue;
            }
            // If the block is `VALID`, a load of it was noted before it was published.
            let is_copy = || {
                let sectors = source.sectors(key);
                !source.writes.unsynced(|unsynced| unsynced.is_reloaded(&sectors))
            };
            if word.has(DIRTY) && !word.has(STALE) && entry.key() == key {
                return Ok(is_copy());
            }
            if word.has(VALID) && !word.has(EVICT | IO | STALE) {
                // Takes the mark of a writer, but changes no bytes, so readers go on. Writers are
                // refused, because the device is poisoned.
                if entry.try_change(word, WRITE, 0).is_ok() {
                    let is_there = entry.key() == key;
                    // Tested under the mark, so that the block is neither evicted nor loaded
                    // meanwhile.
                    if is_there && !is_copy() {
                        self.clear_marks_and_wake(entry, word.frame(), WRITE, 0);
                        self.invalidate(source, key, DIRTY).await?;
                        return Ok(false);
                    }
                    if is_there {
                        self.write_back.list(&self.frames, source, word.frame());
                        self.clear_marks_and_wake(entry, word.frame(), WRITE, DIRTY);
                        return Ok(true);
                    }
                    self.clear_marks_and_wake(entry, word.frame(), WRITE, 0);
                }
            }
            self.waiting.pause(&mut rounds, &mut since).await?;
        }
    }
}

// Closing a device, and the end of a device whose last handle is dropped.
//
// ```text
//   closer                                     writer
//   stage = Closing                            word |= WRITE
//   fence                                      fence
//   until no word of the device has WRITE      stage: not Open? take WRITE off again
//   sync                                       ... write ...
//   stage = Closed, or Open                    DIRTY, without WRITE
// ```
//
// With a fence on both sides, at least one of the two sees the other. So a writer is refused, or
// its block is dirty before the sync begins.

impl Shared {
    /// Closes a device: refuses writers, syncs, and then refuses all calls. After an error, of the
    /// sync or that `or_earlier` adds to it, the device is open as before.
    pub(crate) async fn close(
        &self,
        source: &Arc<Source>,
        or_earlier: impl FnOnce(Result<(), WriteError>) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        let _alone = source.writes.alone.enter(0..1).await;
        if source.writes.is_closed() {
            return Err(WriteError::Closed);
        }
        step!("close: refuse writers", source.writes.set_stage(Stage::Closing));
        // Ordering: SeqCst fence, against the barrier in `Shared::mark_write` and the fence in
        // `Shared::create`, each of which follows the mark `WRITE`:
        // - ours first: the writer finds the stage `Closing`, and clears its mark;
        // - theirs first: `wait_for_writers` finds the mark, and waits for its end.
        fence(Ordering::SeqCst);
        let closed = match self.wait_for_writers(source).await {
            Ok(()) => or_earlier(self.sync(source).await),
            refused => refused,
        };
        if closed.is_ok() {
            source.writes.set_stage(Stage::Closed);
            self.detach_source(source).await;
        } else {
            source.writes.set_stage(Stage::Open);
        }
        closed
    }

    /// Waits for the writes, discards and zeroes that began before writers were refused.
    async fn wait_for_writers(&self, source: &Arc<Source>) -> Result<(), WriteError> {
        // No discard or zero runs once the whole device is excluded.
        drop(source.writes.excluded.enter(0..u64::MAX).await);
        let mut since = None;
        for place in 0..self.lookup.places() {
            let entry = self.lookup.entry(place);
            loop {
                let (word, key) = (entry.word(), entry.key());
                let is_written = word.has(WRITE) && key.device() == source.id;
                if check!("close: no thread writes the block", !is_written) {
                    break;
                }
                let waited = self.wait_for_mark(word.frame(), key, is_marked, &mut since).await;
                waited.map_err(|error| WriteError::of_wait(error, source.block(key)))?;
            }
        }
        Ok(())
    }

    /// Lets the file of a closed device be attached again: at once if its operations end within the
    /// cache's patience, and otherwise, or if one may be in an engine of this thread, when the last of
    /// them ends.
    pub(crate) async fn detach_source(&self, source: &Source) {
        let (mut rounds, mut since) = (0, None);
        let blocks = is_blocking().await;
        while source.in_flight.any() && !(blocks && refuses_wait(|| true)) {
            if self.waiting.pause(&mut rounds, &mut since).await.is_err() {
                break;
            }
        }
        source.detach();
    }

    /// Writes the dirty blocks of a device without handles, and syncs it. Drops blocks that cannot
    /// be written, and returns the error.
    pub(crate) async fn flush_orphan(&self, source: &Arc<Source>) -> Result<(), WriteError> {
        let idle = {
            let dirty = source.writes.dirty.lock().is_empty();
            dirty && source.writes.unsynced(|unsynced| unsynced.is_empty())
        };
        if idle {
            return Ok(());
        }
        let losses = source.writes.group.losses();
        // Also of a closed device, because a reset may have dirtied blocks.
        let flushed = self.flush_selected(source, &Selection::all()).await;
        let synced = self.sync_device(source, losses).await.and(flushed);
        // A write-back that fails from now on drops its block, or has cleared the block's mark
        // before the loop below looks at it, which then drops the block.
        source.in_flight.abandon();
        // Blocks stay dirty if a forgotten guard keeps them or their write hangs.
        loop {
            // Under the lock, because the frame may belong to another device once it is clean.
            let last = {
                let list = source.writes.dirty.lock();
                list.last().map(|frame| (frame, self.entry(frame).key()))
            };
            let Some((frame, key)) = last else { break };
            let is_written = self.entry(frame).word().has(BACK);
            if is_written || self.invalidate(source, key, 0).await != Ok(true) {
                self.write_back
                    .unlist(&self.frames, source, [frame], |list| list.last() == Some(frame));
            }
        }
        synced
    }

    /// Drops a block whose write-back, discard or bypass has failed, if the last handle of its
    /// device is gone. The caller has taken the block's mark off.
    pub(super) fn drop_if_abandoned(&self, source: &Arc<Source>, key: Key) {
        if !source.in_flight.is_abandoned() {
            return;
        }
        // `flush_orphan` has reported the loss of the block, and has taken it off the dirty list.
        // In the cache it would stay dirty and keep its frame for ever.
        let invalidated = self.try_invalidate(Some(source), key, 0, false);
        if !matches!(invalidated, Ok(Some(_))) {
            // The thread that ends an operation of the device must not wait for a reader or an
            // evictor.
            let of = Arc::clone(source);
            self.call_blocking(source.id, Lane::Task, move || {
                // After an error the block stays: a guard that was forgotten keeps it.
                _ = block_on(of.cache.invalidate(&of, key, 0))
            });
        }
    }
}
