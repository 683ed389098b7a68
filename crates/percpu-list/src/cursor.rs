//! Where a walk is that lets go of the lock now and then.

use std::ptr::NonNull;

use percpu::CpuId;
use percpu::lglock::LockError;

use crate::anchor::Anchor;
use crate::chunk::CHUNK;
use crate::core::{Core, LockedShard, ShardRef};
use crate::shard::WalkGuard;

/// Places that a walk looks at under one lock, holes and what is left out among them. A guess, as
/// [`CHUNK`] is.
const CELLS_PER_LOCK: u32 = 128;

/// Where a walk is: in front of a place of a slot.
///
/// While it is in a slot, entries there do not move.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    core: &'a Core,
    next_slot: u32,
    position: Option<Position<'a>>,
}

/// A place in a slot, where entries stay.
#[derive(Debug)]
struct Position<'a> {
    index: u32,
    /// What was added since the walk came here may be left out, and is: so the walk ends.
    end: u32,
    _walk: WalkGuard<'a>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        Self { core, next_slot: 0, position: None }
    }

    /// Shows entries to `visit`, under their slot's lock, until it took [`CHUNK`]; fewer at the end only,
    /// or where a lock is refused, which ends the walk.
    ///
    /// `prepare` is called with each slot that was locked, before its entries.
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

    /// Leaves the slots that are left out.
    fn finish(&mut self) {
        self.position = None;
        self.next_slot = self.core.slot_count();
    }

    /// The slot where the walk is, or the next that ever had an entry.
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

    /// A walk that leaves nearly all out lets go of the lock now and then all the same.
    #[test]
    fn inv11_a_walk_that_takes_little_locks_anew_for_every_few_places() {
        let slot = CpuId::new(0);
        let core = Core::new(&Domain::new(), true).unwrap();
        let anchors: Vec<Anchor> = (0..1000).map(|_| Anchor::new(slot)).collect();
        let shard = core.shard_or_new(slot).unwrap();
        for anchor in &anchors {
            if !shard.lock().unwrap().array().has_room() {
                shard.make_room().unwrap();
            }
            // SAFETY: there is room, and the anchor is new and outlives `core`'s use of it.
            unsafe { shard.lock().unwrap().add(NonNull::from(anchor)) };
        }
        let (mut locks, mut looked) = (0, 0);
        let mut cursor = Cursor::new(&core);
        let leave_out = |_| {
            looked += 1;
            looked == 1000
        };
        cursor.visit_chunk(|_| locks += 1, leave_out).unwrap();
        assert_eq!((locks, looked), (1000_u32.div_ceil(CELLS_PER_LOCK), 1000));
    }
}
