//! What a locked slot, a pair and all slots look like to their holder.
//!
//! None is `Send`, since the slot holds the thread's id; a shared one shares `&T`.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::cpu::CpuId;

use super::iter::{Iter, IterMut};
use super::slot::{RawGuard, Slot};

/// Makes a guard `!Send` and `!Sync`; the latter is given back where `T` allows it.
type NotSend = PhantomData<*mut ()>;

/// One slot, locked; unlocks on drop.
///
/// It keeps the slot that it locked, wherever its thread moves meanwhile.
/// [`mem::forget`](std::mem::forget) leaves the slot locked for ever: then this thread is told
/// [`Deadlock`](super::LockError::Deadlock), and every other one waits; when it has ended, a later
/// thread may be told so in its place (ids are used again).
#[must_use = "the slot is unlocked when the guard drops"]
pub struct LocalGuard<'a, T> {
    slot: &'a Slot<T>,
    raw: RawGuard<'a>,
    _not_send: NotSend,
}

// SAFETY: a shared guard gives `&T`, for which `T: Sync`; unlocking takes the guard itself.
unsafe impl<T: Sync> Sync for LocalGuard<'_, T> {}

impl<'a, T> LocalGuard<'a, T> {
    /// # Safety
    ///
    /// As long as `hold` lives, its thread may use the slot's value, and nobody else may.
    #[inline(always)]
    pub(super) unsafe fn new(slot: &'a Slot<T>, raw: RawGuard<'a>) -> Self {
        Self { slot, raw, _not_send: PhantomData }
    }

    /// The right alone, without the way to the value.
    #[inline(always)]
    pub(super) fn into_raw(self) -> RawGuard<'a> {
        self.raw
    }

    /// Whose slot it is.
    #[inline]
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.slot.cpu
    }
}

impl<T> Deref for LocalGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: see `new`; `hold` lives, and `&self` keeps `deref_mut` away.
        unsafe { &*self.slot.as_ptr() }
    }
}

impl<T> DerefMut for LocalGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: see `new`; `hold` lives, and `&mut self` keeps other references away.
        unsafe { &mut *self.slot.as_mut_ptr() }
    }
}

impl<T: fmt::Debug> fmt::Debug for LocalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalGuard").field("cpu", &self.cpu()).field("value", &**self).finish()
    }
}

/// Two slots, locked together; unlocks both on drop. See [`LocalGuard`] for what holds for each.
#[must_use = "the slots are unlocked when the guard drops"]
pub struct PairGuard<'a, T> {
    slots: (&'a Slot<T>, &'a Slot<T>),
    _raw: (RawGuard<'a>, RawGuard<'a>),
    _not_send: NotSend,
}

// SAFETY: as for `LocalGuard`.
unsafe impl<T: Sync> Sync for PairGuard<'_, T> {}

impl<'a, T> PairGuard<'a, T> {
    /// # Safety
    ///
    /// As long as `holds` live, their thread may use the values of both slots, and nobody else
    /// may; and the slots are different.
    pub(super) unsafe fn new(
        slots: (&'a Slot<T>, &'a Slot<T>),
        raw: (RawGuard<'a>, RawGuard<'a>),
    ) -> Self {
        Self { slots, _raw: raw, _not_send: PhantomData }
    }

    /// The CPUs, in the order in which they were asked for.
    #[must_use]
    pub fn cpus(&self) -> (CpuId, CpuId) {
        (self.slots.0.cpu, self.slots.1.cpu)
    }

    /// The values, in the order in which they were asked for.
    #[must_use]
    pub fn get(&self) -> (&T, &T) {
        // SAFETY: see `new`; `&self` keeps `get_mut` away.
        let first = unsafe { &*self.slots.0.as_ptr() };
        // SAFETY: as above.
        let second = unsafe { &*self.slots.1.as_ptr() };
        (first, second)
    }

    /// The values, in the order in which they were asked for.
    #[must_use]
    pub fn get_mut(&mut self) -> (&mut T, &mut T) {
        // SAFETY: see `new`; `&mut self` keeps other references away.
        let first = unsafe { &mut *self.slots.0.as_mut_ptr() };
        // SAFETY: as above, and another slot than the first.
        let second = unsafe { &mut *self.slots.1.as_mut_ptr() };
        (first, second)
    }
}

impl<T: fmt::Debug> fmt::Debug for PairGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.get();
        f.debug_struct("PairGuard").field("cpus", &self.cpus()).field("values", &values).finish()
    }
}

/// Every slot, locked; unlocks them on drop. See [`LocalGuard`] for what holds for each.
#[must_use = "the slots are unlocked when the guard drops"]
pub struct GlobalGuard<'a, T> {
    slots: &'a [Slot<T>],
    _not_send: NotSend,
}

// SAFETY: as for `LocalGuard`.
unsafe impl<T: Sync> Sync for GlobalGuard<'_, T> {}

impl<'a, T> GlobalGuard<'a, T> {
    /// # Safety
    ///
    /// The calling thread took the words of all `slots`, and leaves it to the guard to release them.
    pub(super) unsafe fn new(slots: &'a [Slot<T>]) -> Self {
        Self { slots, _not_send: PhantomData }
    }

    /// How many slots there are.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The value of `cpu`, if it has a slot.
    #[must_use]
    pub fn get(&self, cpu: CpuId) -> Option<&T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: see `new`; `&self` keeps `get_mut` away.
        Some(unsafe { &*slot.as_ptr() })
    }

    /// The value of `cpu`, if it has a slot.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: see `new`; `&mut self` keeps other references away.
        Some(unsafe { &mut *slot.as_mut_ptr() })
    }

    /// Goes over all slots, ascending.
    pub fn iter(&self) -> Iter<'_, T> {
        // SAFETY: see `new`; the borrow of the guard keeps it, and writers away.
        unsafe { Iter::new(self.slots) }
    }

    /// Goes over all slots, ascending.
    pub fn iter_mut(&mut self) -> IterMut<'_, T> {
        // SAFETY: see `new`; the borrow of the guard keeps it, and everybody else away.
        unsafe { IterMut::new(self.slots) }
    }
}

impl<T> Drop for GlobalGuard<'_, T> {
    fn drop(&mut self) {
        for slot in self.slots {
            // SAFETY: see `new`: the word is this thread's, for the guard to release.
            drop(unsafe { RawGuard::new(slot) });
        }
    }
}

impl<'g, T> IntoIterator for &'g GlobalGuard<'_, T> {
    type Item = (CpuId, &'g T);
    type IntoIter = Iter<'g, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'g, T> IntoIterator for &'g mut GlobalGuard<'_, T> {
    type Item = (CpuId, &'g mut T);
    type IntoIter = IterMut<'g, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<T: fmt::Debug> fmt::Debug for GlobalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}
