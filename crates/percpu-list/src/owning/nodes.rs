//! The core of an owning list, together with the type of its values.
//!
//! # Invariants
//!
//! 1. Every anchor in the core's shards is that of a node of `T`.

use std::marker::PhantomData;

use percpu::lglock::LockError;
use percpu::{AllocError, CpuId};

use crate::core::{Core, LockedShard};
use crate::domain::Domain;

use super::deferred::remove_all;
use super::node::{DropList, NodePtr, Ref};
use super::node_shard::NodeShard;
use super::pool;

/// A core whose anchors are all of nodes of `T`.
pub struct Nodes<T> {
    core: Core,
    /// Invariant in `T`. The `Drop` below tells the compiler that values are owned.
    _value: PhantomData<*mut T>,
}

// SAFETY: values are dropped on any thread that has the list, and shared by all.
unsafe impl<T: Send + Sync> Send for Nodes<T> {}
// SAFETY: as above; what is shared beside them is under the slots' locks, or atomic.
unsafe impl<T: Send + Sync> Sync for Nodes<T> {}

/// An entry that is no more: its value, or its count if somebody else has one too; and what had been
/// left to be removed in its slot. All of them are dropped, whichever panics.
pub(super) struct RemovedEntry<T> {
    pub(super) removed: bool,
    _value: Option<T>,
    _count: Option<Ref<T>>,
    _others: DropList<T>,
}

impl<T> Nodes<T> {
    pub(super) fn try_new(domain: &Domain, counts_hits: bool) -> Result<Self, AllocError> {
        Ok(Self { core: Core::new(domain, counts_hits)?, _value: PhantomData })
    }

    #[inline(always)]
    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// The list's part of a slot, if it ever had an entry there.
    #[inline(always)]
    pub(super) fn slot(&self, slot: CpuId) -> Option<NodeShard<'_, T>> {
        // SAFETY: of this list.
        self.core.shard(slot).map(|shard| unsafe { NodeShard::new(shard) })
    }

    /// The parts of all slots that ever had an entry, ascending.
    pub(super) fn slots(&self) -> impl Iterator<Item = NodeShard<'_, T>> {
        // SAFETY: of this list.
        self.core.shards().map(|shard| unsafe { NodeShard::new(shard) })
    }

    /// Takes a node off the list, if it is on it.
    ///
    /// # Safety
    ///
    /// The caller has a count of the node, which was inserted into this list.
    #[inline(always)]
    pub(super) unsafe fn unlink(&self, node: NodePtr<T>, from: CpuId) -> Result<bool, LockError> {
        // SAFETY: the caller's count.
        let anchor = unsafe { node.anchor() };
        let Some(slot) = self.slot(anchor.home()) else { return Ok(false) };
        let mut removed = DropList::<T>::new(); // dropped after the lock
        let mut locked = slot.lock(&mut removed)?;
        // SAFETY: a node's home never changes, and this list's shard of it is the node's.
        let done = unsafe { locked.remove(anchor, from, self.core.domain()) };
        let surplus = locked.surplus();
        drop(locked);
        drop(surplus); // after the unlock
        Ok(done)
    }

    /// Ends an entry: takes its node off the list, if it is on it, and its count.
    ///
    /// Unless it `may_wait` it does not. Calls nothing of the values: what comes back does when it is
    /// dropped.
    ///
    /// # Safety
    ///
    /// The node was inserted into this list, and the entry's count is the caller's; if the answer is
    /// not an error it passes on.
    #[inline(always)]
    pub(super) unsafe fn remove_entry(
        &self,
        node: NodePtr<T>,
        from: CpuId,
        may_wait: bool,
    ) -> Result<RemovedEntry<T>, LockError> {
        // SAFETY: the caller's count.
        let anchor = unsafe { node.anchor() };
        let Some(slot) = self.slot(anchor.home()) else {
            unreachable!("a node was inserted in its home")
        };
        let mut others = DropList::<T>::new();
        let mut locked = slot.lock_or_try(may_wait, &mut others)?;
        // SAFETY: a node's home never changes, and this list's shard of it is the node's.
        let removed = unsafe { locked.remove(anchor, from, self.core.domain()) };
        // SAFETY: the entry's count; the node is unlinked, here or before, and of this shard.
        let value = unsafe { pool::release(&locked, node) };
        let surplus = locked.surplus();
        drop(locked);
        drop(surplus); // after the unlock
        // SAFETY: the entry's count, of a node that is unlinked for good.
        let count = value.is_none().then(|| unsafe { Ref::from_count(node) });
        Ok(RemovedEntry { removed, _value: value, _count: count, _others: others })
    }

    /// Removes what this thread, or another, left to be removed while it held slots' locks. Where a
    /// lock is refused that stays for later.
    pub(super) fn flush_deferred(&self) {
        for slot in self.slots().filter(|slot| slot.has_deferred()) {
            let mut removed = DropList::<T>::new(); // dropped after the lock
            let _ = slot.lock(&mut removed); // which settles, and unlocks at once
        }
    }
}

impl<T> Drop for Nodes<T> {
    fn drop(&mut self) {
        let mut removed = DropList::<T>::new();
        for slot in self.core.slots() {
            let Some(shard) = self.core.shard(slot) else { continue };
            // SAFETY: `&mut self` says that no other thread uses the list's shards; a thread that
            // holds the slot's lock is at another list of the domain.
            let mut locked = unsafe { LockedShard::new(shard.get(), ()) };
            // SAFETY: of this list; and entries borrow or hold it, so there are none.
            unsafe { remove_all(&self.core, &mut locked, &mut removed) };
            // SAFETY: of this list.
            drop(unsafe { pool::remove_all::<T, _>(&locked) });
        }
    }
}
