//! A slot of an owning list: what is in there are nodes of its `T`.

use std::marker::PhantomData;
use std::ops::Deref;

use percpu::lglock::LockError;

use crate::core::{Locked, Part};

use super::deferred::settle;
use super::node::Chain;

/// A list's part of a slot, and what the list's values are.
pub(super) struct Slot<'a, T> {
    part: Part<'a>,
    /// Invariant, as the list is.
    _value: PhantomData<*mut T>,
}

impl<T> Clone for Slot<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Slot<'_, T> {}

impl<'a, T> Deref for Slot<'a, T> {
    type Target = Part<'a>;

    #[inline(always)]
    fn deref(&self) -> &Part<'a> {
        &self.part
    }
}

impl<'a, T> Slot<'a, T> {
    /// # Safety
    ///
    /// The part is of a [`PerCpuList<T>`](crate::PerCpuList).
    #[inline(always)]
    pub(super) unsafe fn of(part: Part<'a>) -> Self {
        Self { part, _value: PhantomData }
    }

    /// Locks the slot, and removes what had been left to be removed there: into `removed`, to be
    /// dropped after the unlock.
    #[inline(always)]
    pub(super) fn lock(self, removed: &mut Chain<T>) -> Result<Locked<'a>, LockError> {
        self.lock_or_try(true, removed)
    }

    /// The same, if the slot is free or the caller `may_wait`.
    #[inline(always)]
    pub(super) fn lock_or_try(
        self,
        may_wait: bool,
        removed: &mut Chain<T>,
    ) -> Result<Locked<'a>, LockError> {
        let mut locked = if may_wait { self.part.lock()? } else { self.part.try_lock()? };
        // SAFETY: of a list of `T`: see `of`.
        unsafe { settle(self.part.core(), &mut locked, removed) };
        Ok(locked)
    }
}
