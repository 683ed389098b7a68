//! The position of a walk that releases the lock between chunks.

use std::ptr::NonNull;

use percpu::CpuId;
use percpu::lglock::LockError;

use crate::anchor::Anchor;
use crate::chunk::CHUNK;
use crate::core::{Core, LockedShard, ShardRef};
use crate::shard::WalkGuard;

/// The number of cells that a walk reads under one lock, including holes and entries that it leaves
/// out. A guess, like [`CHUNK`].
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

    /// Calls `visit` with entries, under the lock of their slot, until it has returned true
    /// [`CHUNK`] times or the walk is at its end. Each locked shard goes to `prepare` before its
    /// entries.
    ///
    /// # Errors
    ///
    /// The error of a slot that cannot be locked. It ends the walk.
    pub(crate) fn visit_chunk(
        &mut self,
        mut prepare: impl FnMut(&mut LockedShard<'_>),
        mut visit: impl FnMut(NonNull<Anchor>) -> bool,
    ) -> Result<(), LockError> {
        let mut left = CHUNK;
        while left != 0 {
            let mut cells = CELLS_PER_LOCK;
            let Some(shard) = self.current_shard() else { break };
            let mut locked = shard.lock().inspect_err(|_| self.finish())?;
            prepare(&mut locked);
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
                left -= usize::from(entry.is_some_and(&mut visit));
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

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;
    use crate::domain::Domain;

    /// A walk that leaves out most entries does not hold the lock for longer.
    #[test]
    fn inv11_a_walk_that_leaves_entries_out_releases_the_lock_as_often() {
        let slot = CpuId::new(0);
        let core = Core::new(&Domain::new(), true).unwrap();
        let anchors: Vec<Anchor> = (0..1000).map(|_| Anchor::new(slot)).collect();
        let shard = core.shard_or_new(slot).unwrap();
        for anchor in &anchors {
            if !shard.lock().unwrap().array().has_room() {
                shard.make_room().unwrap();
            }
            // SAFETY: there is room. The anchor is new, its home is this slot, and `core` does not
            // use it after the end of the test.
            unsafe { shard.lock().unwrap().add(NonNull::from(anchor)) };
        }
        let (mut locks, mut visited) = (0, 0);
        let mut cursor = Cursor::new(&core);
        let leave_out = |_| {
            visited += 1;
            visited == 1000
        };
        cursor.visit_chunk(|_| locks += 1, leave_out).unwrap();
        assert_eq!((locks, visited), (1000_u32.div_ceil(CELLS_PER_LOCK), 1000));
    }
}
