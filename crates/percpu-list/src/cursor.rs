//! The position of a walk that releases the lock between chunks.

use std::ptr::NonNull;

use offlock_percpu::CpuId;
use offlock_percpu::lglock::LockError;

use crate::anchor::Anchor;
use crate::chunk::CHUNK;
use crate::core::{Core, ShardRef};
use crate::shard::WalkGuard;

/// The number of cells that a walk reads under one lock, including holes. A guess, like [`CHUNK`].
const CELLS_PER_LOCK: u32 = 128;

/// The position of a walk: between slots, or before a cell of one slot.
///
/// While the cursor is inside a slot, the entries there keep their indexes.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    core: &'a Core,
    next_slot: u32,
    position: Option<Position<'a>>,
}

/// A position inside a slot.
#[derive(Debug)]
struct Position<'a> {
    index: u32,
    /// The length of the array when the walk reached the slot. Entries that are added behind it are
    /// left out, so the walk ends.
    end: u32,
    _walk: WalkGuard<'a>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        Self { core, next_slot: 0, position: None }
    }

    /// Calls `visit` with up to [`CHUNK`] entries, under the lock of their slot.
    ///
    /// # Errors
    ///
    /// The error of a slot that cannot be locked. It ends the walk.
    pub(crate) fn visit_chunk(
        &mut self,
        mut visit: impl FnMut(NonNull<Anchor>),
    ) -> Result<(), LockError> {
        let mut left = CHUNK;
        while left != 0 {
            let mut cells = CELLS_PER_LOCK;
            let Some(shard) = self.current_shard() else { break };
            let locked = shard.lock().inspect_err(|_| self.finish())?;
            let array = locked.array();
            let position = self.position.get_or_insert_with(|| Position {
                index: 0,
                end: array.len(),
                _walk: shard.get().begin_walk(),
            });
            let end = position.end.min(array.len());
            while left != 0 && position.index < end && cells != 0 {
                let entry = array.get(position.index);
                position.index += 1;
                cells -= 1;
                if let Some(entry) = entry {
                    left -= 1;
                    visit(entry);
                }
            }
            if position.index >= end {
                self.position = None;
                self.next_slot += 1;
            }
        }
        Ok(())
    }

    /// Moves to the end of the walk.
    fn finish(&mut self) {
        self.position = None;
        self.next_slot = self.core.slot_count();
    }

    /// Returns the shard of the slot that the walk is in, or the next shard that exists.
    fn current_shard(&mut self) -> Option<ShardRef<'a>> {
        while self.next_slot < self.core.slot_count() {
            if let Some(shard) = self.core.shard(CpuId::new(self.next_slot)) {
                return Some(shard);
            }
            self.next_slot += 1;
        }
        None
    }
}
