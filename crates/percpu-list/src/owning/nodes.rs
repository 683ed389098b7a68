//! The core of an owning list, together with the type of its values.
//!
//! # Invariants
//!
//! 1. Every anchor in the shards of the core is that of a node of `T`.
//! 2. The home of a node never changes, and the node is only inserted into the shard of that slot.

use std::marker::PhantomData;

use offlock_percpu::CpuId;
use offlock_percpu::lglock::LockError;

use crate::core::{Core, LockedShard};

use super::deferred::remove_all;
use super::node::{DropList, NodePtr, Ref};
use super::pool;

/// A core whose anchors are all of nodes of `T`.
pub struct Nodes<T> {
    core: Core,
    /// Makes the list invariant in `T`. The `Drop` below tells the compiler that values are owned.
    _value: PhantomData<*mut T>,
}

// SAFETY: any thread that has the list may drop values, and shares values with references on other
// threads. `T` is `Send` and `Sync`, and so is the core.
unsafe impl<T: Send + Sync> Send for Nodes<T> {}
// SAFETY: a shared list gives out references to values, the last of which drops the value on any
// thread. `T` is `Send` and `Sync`. The core is `Sync`, and the nodes change under the locks of the
// slots or by atomics.
unsafe impl<T: Send + Sync> Sync for Nodes<T> {}

/// A removed entry: holds the value if its node was kept in the pool, otherwise the entry's count.
pub(super) struct RemovedEntry<T> {
    /// Whether this call unlinked the node.
    pub(super) removed: bool,
    _value: Option<T>,
    _count: Option<Ref<T>>,
}

impl<T> Nodes<T> {
    pub(super) fn new(counts_hits: bool) -> Self {
        Self { core: Core::new(counts_hits), _value: PhantomData }
    }

    #[inline(always)]
    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// Unlinks a node, and returns whether it was linked. `from` is the slot of the removing CPU.
    ///
    /// # Safety
    ///
    /// The node was inserted into this list, and the caller has a count of it.
    #[inline(always)]
    pub(super) unsafe fn unlink(&self, node: NodePtr<T>, from: CpuId) -> Result<bool, LockError> {
        // SAFETY: by the contract of this function the caller has a count.
        let anchor = unsafe { node.anchor() };
        let Some(slot) = self.core.shard(anchor.home()) else { return Ok(false) };
        let mut locked = slot.lock()?;
        // SAFETY: by invariant 2 the node's home is this slot, and it can only be in this shard.
        let done = unsafe { locked.remove(anchor, from, self.core.slots()) };
        let surplus = locked.surplus();
        drop(locked);
        drop(surplus); // after the unlock
        Ok(done)
    }

    /// Unlinks the node of an entry, and uses up the entry's count. `from` is the slot of the
    /// removing CPU.
    ///
    /// Drops no value: the caller drops the result with no lock held.
    ///
    /// # Safety
    ///
    /// The node was inserted into this list, and the caller has the entry's count. If the result is
    /// not an error, the count passes to this function.
    #[inline(always)]
    pub(super) unsafe fn remove_entry(
        &self,
        node: NodePtr<T>,
        from: CpuId,
    ) -> Result<RemovedEntry<T>, LockError> {
        // SAFETY: by the contract of this function the caller has a count.
        let anchor = unsafe { node.anchor() };
        let Some(slot) = self.core.shard(anchor.home()) else {
            unreachable!("a node was inserted in its home")
        };
        let mut locked = slot.lock()?;
        // SAFETY: by invariant 2 the node's home is this slot, and it can only be in this shard.
        let removed = unsafe { locked.remove(anchor, from, self.core.slots()) };
        // SAFETY: the caller has the entry's count. The node was inserted into this shard, and was
        // unlinked by the line above or before it.
        let value = unsafe { pool::release(&locked, node) };
        let surplus = locked.surplus();
        drop(locked);
        drop(surplus); // after the unlock
        // SAFETY: the pool did not keep the node, so the entry's count passes to the reference. The
        // node is unlinked for good, because only a pooled node is inserted again.
        let count = value.is_none().then(|| unsafe { Ref::from_count(node) });
        Ok(RemovedEntry { removed, _value: value, _count: count })
    }
}

impl<T> Drop for Nodes<T> {
    fn drop(&mut self) {
        let mut removed = DropList::<T>::new();
        for slot in self.core.all_slots() {
            let Some(shard) = self.core.shard(slot) else { continue };
            // SAFETY: `&mut self` excludes other uses of this shard.
            let mut locked = unsafe { LockedShard::new(shard.get(), ()) };
            // SAFETY: by invariant 1 the anchors are those of nodes of `T`. There are no entries,
            // because an entry borrows or holds the list.
            unsafe { remove_all(&self.core, &mut locked, &mut removed) };
            // SAFETY: by invariant 1 the shard is that of a list of `T`.
            drop(unsafe { pool::remove_all::<T, _>(&locked) });
        }
    }
}
