//! Taking everything off a list.

use std::fmt;
use std::iter::FusedIterator;

use percpu::CpuId;
use percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::core::Core;
use crate::shard::Shard;

use super::PerCpuList;
use super::deferred::settle;
use super::node::{Chain, NodePtr, Ref};

/// Takes entries off a [`PerCpuList`], and gives them out: from [`PerCpuList::drain`].
///
/// Every entry that is on the list throughout is taken, by this drain or another; of those that are
/// added meanwhile some are. To leave nothing, [`close`](PerCpuList::close) the list before. The
/// entries' owners keep their [`Entry`](super::Entry), which is no longer linked; the value is
/// dropped with the last of that and the [`Ref`]s.
///
/// Locks as a walk does, and gives the same errors. A drain that is dropped leaves the rest on the
/// list; what it took but did not give out is off.
#[must_use = "it does nothing until it is iterated over"]
pub struct Drain<'a, T> {
    list: &'a PerCpuList<T>,
    slot: u32,
    /// How many of the slot's are left to take: those that were there first, so that it ends.
    left: Option<u32>,
    chunk: Chunk<Ref<T>>,
}

impl<'a, T> Drain<'a, T> {
    pub(super) fn new(list: &'a PerCpuList<T>) -> Self {
        Self { list, slot: 0, left: None, chunk: Chunk::new() }
    }
}

impl<T> Iterator for Drain<'_, T> {
    type Item = Result<Ref<T>, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (core, slot, left) = (self.list.core(), &mut self.slot, &mut self.left);
        let slots = core.domain().slots() as u32;
        self.chunk.next(|chunk| {
            while chunk.is_empty() && *slot < slots {
                if let Some(shard) = core.shard(CpuId::new(*slot)) {
                    *left = Some(take(core, shard, *left, chunk).inspect_err(|_| *slot = slots)?);
                    core.shrink(shard);
                    if *left != Some(0) {
                        continue;
                    }
                }
                (*slot, *left) = (*slot + 1, None);
            }
            Ok(())
        })
    }
}

/// Takes a chunk of the entries of a slot, the last first; says how many are left to take, of those
/// that were left before, or are there.
fn take<T>(
    core: &Core,
    shard: &Shard,
    left: Option<u32>,
    chunk: &mut Chunk<Ref<T>>,
) -> Result<u32, LockError> {
    let from = core.domain().here();
    let mut removed = Chain::<T>::new(); // dropped after the lock
    let mut locked = core.lock_shard(shard)?;
    settle(core, &mut locked, &mut removed);
    let mut left = left.unwrap_or(u32::MAX).min(locked.array().entries());
    while left != 0 && !chunk.is_full() {
        let last = locked.array().len() - 1;
        let Some(anchor) = locked.array().get(last) else { unreachable!("the last is an entry") };
        // SAFETY: an entry of this list is a node of its `T`.
        let node = unsafe { NodePtr::of(anchor) };
        // SAFETY: linked, under its slot's lock.
        chunk.push(unsafe { node.acquire() });
        // SAFETY: we have just taken a count.
        let anchor = unsafe { node.anchor() };
        // SAFETY: found in this shard's array.
        unsafe { locked.remove(anchor, from, core.domain()) };
        left -= 1;
    }
    Ok(left)
}

impl<T> FusedIterator for Drain<'_, T> {}

impl<T> fmt::Debug for Drain<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("slot", &self.slot).finish_non_exhaustive()
    }
}
