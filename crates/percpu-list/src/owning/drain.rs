//! Taking everything off a list.

use std::fmt;

use percpu::CpuId;
use percpu::lglock::LockError;

use super::PerCpuList;
use super::deferred::settle;
use super::node::{Chain, NodePtr, Ref};

/// Entries taken under one lock: see `walk`.
const CHUNK: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 32 };

/// Takes entries off a [`PerCpuList`], and gives them out: from [`PerCpuList::drain`].
///
/// Every entry that is on the list throughout is taken, by this drain or another; of those that are
/// added meanwhile some are. To leave nothing, [`close`](PerCpuList::close) the list before. The
/// entries' owners keep their [`Entry`](super::Entry), which is no longer linked; the value is
/// dropped with the last of that and the [`Ref`]s.
///
/// Locks as a walk does, and gives the same errors. A drain that is dropped leaves the rest on the
/// list; what it took but did not give out is off.
pub struct Drain<'a, T> {
    list: &'a PerCpuList<T>,
    slot: u32,
    /// How many of the slot's are left to take: those that were there first, so that it ends.
    left: Option<u32>,
    chunk: [Option<Ref<T>>; CHUNK],
    len: usize,
}

impl<'a, T> Drain<'a, T> {
    pub(super) fn new(list: &'a PerCpuList<T>) -> Self {
        Self { list, slot: 0, left: None, chunk: std::array::from_fn(|_| None), len: 0 }
    }

    /// Takes a chunk from the slots that are left.
    fn fill(&mut self) -> Result<(), LockError> {
        let core = self.list.core();
        let from = core.domain().here();
        while self.len == 0 && (self.slot as usize) < core.domain().slots() {
            if let Some(shard) = core.shard(CpuId::new(self.slot)) {
                let mut removed = Chain::<T>::new(); // dropped after the lock
                let mut locked = core.lock_shard(shard)?;
                settle(core, &mut locked, &mut removed);
                let mut left = self.left.unwrap_or_else(|| locked.array().entries());
                while left != 0 && self.len < CHUNK {
                    let last = locked.array().len().checked_sub(1);
                    let Some(anchor) = last.and_then(|last| locked.array().get(last)) else {
                        break;
                    };
                    // SAFETY: an entry of this list is a node of its `T`.
                    let node = unsafe { NodePtr::of(anchor) };
                    // SAFETY: linked, under its slot's lock.
                    self.chunk[self.len] = Some(unsafe { node.acquire() });
                    self.len += 1;
                    // SAFETY: we have just taken a count.
                    let anchor = unsafe { node.anchor() };
                    // SAFETY: found in this shard's array.
                    unsafe { locked.remove(anchor, from, core.domain()) };
                    left -= 1;
                }
                let more = left != 0 && locked.array().entries() != 0;
                drop(locked);
                core.shrink(shard);
                if more {
                    self.left = Some(left);
                    continue;
                }
            }
            (self.slot, self.left) = (self.slot + 1, None);
        }
        Ok(())
    }
}

impl<T> Iterator for Drain<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.len == 0 {
            if let Err(error) = self.fill() {
                return Some(Err(error));
            }
        }
        self.len = self.len.checked_sub(1)?;
        self.chunk[self.len].take().map(Ok)
    }
}

impl<T> fmt::Debug for Drain<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("slot", &self.slot).finish_non_exhaustive()
    }
}
