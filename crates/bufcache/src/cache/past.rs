//! Calls for programs that must not wait, or that also read the device themselves: writes without a
//! wait, and the question whether the cache has newer bytes than the device.

use std::ops::Range;

use offlock_sync::Arc;

use super::selection::Selection;
use super::{Protected, Shared};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::hazard;
use crate::source::Source;
use crate::wait::Mode;
use crate::word::{DIRTY, Key};

impl Shared {
    /// Locks the buffer of a block that the caller overwrites, if that needs no wait. The bytes may
    /// be those of an earlier block.
    pub(crate) fn try_create(&self, source: &Arc<Source>, key: Key) -> Result<Protected, GetError> {
        let refused = |error| {
            self.counters.get.add(1);
            self.counters.busy_locked.add(1);
            error
        };
        let is_too_dirty = self.must_clean(source);
        if is_too_dirty || !self.may_dirty(source, key) {
            return Err(refused(GetError::WouldBlock));
        }
        match self.try_lock_write(source, key, Mode::Thread) {
            Ok(buffer) => {
                self.counters.get.add(1);
                return Ok(buffer);
            }
            Err(GetError::WouldBlock) if !self.is_cached(key) => {}
            Err(error) => return Err(refused(error)),
        }
        hazard::reserve()?;
        match self.insert_load(source, key) {
            Some(frame) => self.create(source, key, frame), // and counted
            None => Err(refused(GetError::WouldBlock)),
        }
    }

    /// Returns whether the device may lack a write of these blocks whose guard has dropped: a block
    /// is dirty, or a failed sync may have lost it.
    pub(crate) fn is_newer(&self, source: &Source, blocks: Range<u64>) -> bool {
        let sectors = source.sectors_of(blocks.clone());
        if source.writes.is_lost(&sectors) {
            return true;
        }
        // A block counts in `dirty_bytes` from before `DIRTY` is set until the device has it; see
        // `list_dirty` for the ordering.
        if self.dirty_bytes() == 0 {
            return false;
        }
        let end = blocks.end.min(source.blocks);
        if end.saturating_sub(blocks.start) <= self.places().into() {
            return (blocks.start..end)
                .filter_map(|block| source.key(block))
                .any(|key| self.is_dirty(key));
        }
        let mut place = 0;
        while let Some((key, next)) = self.next_cached(source.id, &sectors, place) {
            if self.is_dirty(key) {
                return true;
            }
            place = next;
        }
        false
    }

    /// Returns whether the block is cached and dirty.
    pub(super) fn is_dirty(&self, key: Key) -> bool {
        // A block that leaves the table during this call was clean before, or was invalidated.
        let word = self.table.find(key).and_then(|entry| entry.look(key));
        word.is_some_and(|word| word.has(DIRTY))
    }

    /// Writes the dirty blocks of a range.
    pub(crate) async fn flush_range(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
    ) -> Result<(), WriteError> {
        self.check_sync(source)?;
        let selection = Selection { sectors: source.sectors_of(blocks), ..Selection::all() };
        let summary = self.write_back(source, &selection, Mode::Thread).await;
        self.check_sync(source)?;
        summary.error.map_or(Ok(()), Err)
    }
}
