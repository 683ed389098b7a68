//! The shard of an owning list, together with the type of its values.

use std::marker::PhantomData;
use std::ops::Deref;

use percpu::lglock::LockError;

use crate::core::{LockedShard, ShardRef};

use super::deferred::flush;
use super::node::DropList;

/// A reference to a shard whose anchors are those of nodes of `T`.
pub(super) struct NodeShard<'a, T> {
    shard: ShardRef<'a>,
    /// Makes the reference invariant in `T`, like the list.
    _value: PhantomData<*mut T>,
}

impl<T> Clone for NodeShard<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for NodeShard<'_, T> {}

impl<'a, T> Deref for NodeShard<'a, T> {
    type Target = ShardRef<'a>;

    #[inline(always)]
    fn deref(&self) -> &ShardRef<'a> {
        &self.shard
    }
}

impl<'a, T> NodeShard<'a, T> {
    /// # Safety
    ///
    /// The shard belongs to a [`PerCpuList<T>`](crate::PerCpuList).
    #[inline(always)]
    pub(super) unsafe fn new(shard: ShardRef<'a>) -> Self {
        Self { shard, _value: PhantomData }
    }

    /// Locks the slot, and performs the removals that were deferred there. The caller drops
    /// `removed` after the unlock. Blocks while another thread holds the slot.
    #[inline(always)]
    pub(super) fn lock(self, removed: &mut DropList<T>) -> Result<LockedShard<'a>, LockError> {
        self.lock_or_try(true, removed)
    }

    /// Locks the slot like [`lock`](Self::lock). If `may_wait` is false, never blocks.
    #[inline(always)]
    pub(super) fn lock_or_try(
        self,
        may_wait: bool,
        removed: &mut DropList<T>,
    ) -> Result<LockedShard<'a>, LockError> {
        let mut locked = if may_wait { self.shard.lock()? } else { self.shard.try_lock()? };
        // SAFETY: by the contract of `new` the shard belongs to a list of `T`.
        unsafe { flush(self.shard.core(), &mut locked, removed) };
        Ok(locked)
    }
}
