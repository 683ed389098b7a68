//! Closing a device, and the end of a device whose last handle is dropped.
//!
//! ```text
//!   closer                                     writer
//!   stage = Closing                            word |= WRITE
//!   fence                                      fence
//!   until no word of the device has WRITE      stage: not Open? take WRITE off again
//!   sync                                       ... write ...
//!   stage = Closed, or Open                    DIRTY, without WRITE
//! ```
//!
//! With a fence on both sides, at least one of the two sees the other. So a writer is refused, or
//! its block is dirty before the sync begins.

use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::{Arc, check, step};

use super::Shared;
use crate::dirty::{Stage, WriteError};
use crate::engine::refuses_wait;
use crate::hazard;
use crate::source::Source;
use crate::wait::{Mode, poll_ready};
use crate::word::{BACK, Key, WRITE};

impl Shared {
    /// Closes a device: refuses writers, calls `sync`, and then refuses all calls. After an error
    /// of `sync` the device is open as before.
    pub(crate) fn close(
        &self,
        source: &Arc<Source>,
        sync: impl FnOnce() -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        let _alone = source.writes.alone.lock();
        if source.writes.is_closed() {
            return Err(WriteError::Closed);
        }
        step!("close: refuse writers", source.writes.set_stage(Stage::Closing));
        // Ordering: SeqCst fence, against the barrier in `Shared::mark_write` and the fence in
        // `Shared::create`, each of which follows the mark `WRITE`:
        // - ours first: the writer finds the stage `Closing`, and clears its mark;
        // - theirs first: `wait_for_writers` finds the mark, and waits for its end.
        fence(Ordering::SeqCst);
        let closed = self.wait_for_writers(source).and_then(|()| sync());
        if closed.is_ok() {
            source.writes.set_stage(Stage::Closed);
            self.detach_source(source);
        } else {
            source.writes.set_stage(Stage::Open);
        }
        closed
    }

    /// Waits for the writes, discards and zeroes that began before writers were refused.
    fn wait_for_writers(&self, source: &Arc<Source>) -> Result<(), WriteError> {
        // No discard or zero runs once the whole device is excluded.
        drop(poll_ready(source.writes.excluded.enter(0..u64::MAX, Mode::Thread)));
        let mut since = None;
        for place in 0..self.table.places() {
            let entry = self.table.entry(place);
            loop {
                let (word, key) = (entry.word(), entry.key());
                let is_written = word.has(WRITE) && key.device() == source.id;
                if check!("close: no thread writes the block", !is_written) {
                    break;
                }
                let block = source.block(key);
                if hazard::protected_by_me(entry) > 0 {
                    return Err(WriteError::WouldDeadlock { block: Some(block) });
                }
                self.wait_for_mark(word.frame(), key, &mut since)
                    .map_err(|error| WriteError::of_wait(error, block))?;
            }
        }
        Ok(())
    }

    /// Lets the file of a closed device be attached again: at once if its operations end within the
    /// cache's patience, and otherwise, or if one may be in an engine of this thread, when the last of
    /// them ends.
    pub(crate) fn detach_source(&self, source: &Source) {
        let (mut rounds, mut since) = (0, None);
        while source.in_flight.any() {
            if refuses_wait(|| true) || self.pause(&mut rounds, &mut since).is_err() {
                break;
            }
        }
        source.detach();
    }

    /// Writes the dirty blocks of a device without handles, and syncs it. Drops blocks that cannot
    /// be written, and returns the error.
    pub(crate) fn flush_orphan(&self, source: &Arc<Source>) -> Result<(), WriteError> {
        let idle = {
            let dirty = source.writes.dirty.lock().is_empty();
            dirty && source.writes.unsynced(|unsynced| unsynced.is_empty())
        };
        if idle {
            return Ok(());
        }
        let losses = source.writes.group.losses();
        // Also of a closed device, because a reset may have dirtied blocks.
        let flushed = poll_ready(self.flush_even_closed(source, Mode::Thread));
        let synced = poll_ready(self.sync_device(source, losses, Mode::Thread)).and(flushed);
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
            if is_written || self.invalidate(Some(source), key) != Ok(true) {
                self.unlist_dirty_if(source, [frame], |list| list.last() == Some(frame));
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
        let invalidated = self.try_invalidate(Some(source), key, 0, Mode::Task);
        if !matches!(invalidated, Ok(Some(_))) {
            // The thread that ends an operation of the device must not wait for a reader or an
            // evictor.
            let of = Arc::clone(source);
            self.call_blocking(source.id, move || _ = of.cache.invalidate(Some(&of), key));
        }
    }
}
