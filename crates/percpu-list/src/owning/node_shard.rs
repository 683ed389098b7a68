//! A slot of an owning list: what is in there are nodes of its `T`.

use std::marker::PhantomData;
use std::ops::Deref;

use percpu::lglock::LockError;

use crate::core::{LockedShard, ShardRef};

use super::deferred::flush;
use super::node::DropList;

/// A list's part of a slot, and what the list's values are.
pub(super) struct NodeShard<'a, T> {
    shard: ShardRef<'a>,
    /// Invariant, as the list is.
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
    /// The part is of a [`PerCpuList<T>`](crate::PerCpuList).
    #[inline(always)]
    pub(super) unsafe fn new(shard: ShardRef<'a>) -> Self {
        Self { shard, _value: PhantomData }
    }

    /// Locks the slot, and removes what had been left to be removed there: into `removed`, to be
    /// dropped after the unlock.
    #[inline(always)]
    pub(super) fn lock(self, removed: &mut DropList<T>) -> Result<LockedShard<'a>, LockError> {
        self.lock_or_try(true, removed)
    }

    /// The same, if the slot is free or the caller `may_wait`.
    #[inline(always)]
    pub(super) fn lock_or_try(
        self,
        may_wait: bool,
        removed: &mut DropList<T>,
    ) -> Result<LockedShard<'a>, LockError> {
        let mut locked = if may_wait { self.shard.lock()? } else { self.shard.try_lock()? };
        // SAFETY: of a list of `T`: see `of`.
        unsafe { flush(self.shard.core(), &mut locked, removed) };
        Ok(locked)
    }
}
