//! The guards of one slot and of all slots.
//!
//! The guards are `!Send`, because a slot stores the id of the thread that locked it. They are
//! `Sync` if `T` is, because a shared guard only gives out `&T`.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crossbeam_utils::CachePadded;

use crate::cpu::CpuId;

use super::slot::{RawGuard, Slot};

/// Makes a guard `!Send` and `!Sync`; an `impl` for each guard restores `Sync` for `T: Sync`.
type NotSend = PhantomData<*mut ()>;

/// Exclusive access to one slot; unlocks on drop.
///
/// The guard keeps the slot that it locked, even if the thread moves to another CPU. A forgotten
/// guard leaves the slot locked for ever: see the [module](super).
///
/// ```
/// use offlock_percpu::lglock::{LgLock, LocalGuard, LockError};
///
/// fn push(mut list: LocalGuard<'_, Vec<u32>>) {
///     println!("one more on {}", list.cpu());
///     list.push(7);
/// }
///
/// let lists = LgLock::new(|_cpu| Vec::new());
/// push(lists.local()?);
/// # Ok::<(), LockError>(())
/// ```
#[must_use = "the slot is unlocked when the guard drops"]
pub struct LocalGuard<'a, T> {
    slot: &'a Slot<T>,
    _raw: RawGuard<'a>,
    _not_send: NotSend,
}

// SAFETY: a shared guard only gives out `&T`, for which `T: Sync` suffices; unlocking consumes it.
unsafe impl<T: Sync> Sync for LocalGuard<'_, T> {}

impl<'a, T> LocalGuard<'a, T> {
    /// # Safety
    ///
    /// While `raw` lives, its thread may use the slot's value, and no other code may.
    #[inline(always)]
    pub(super) unsafe fn new(slot: &'a Slot<T>, raw: RawGuard<'a>) -> Self {
        Self { slot, _raw: raw, _not_send: PhantomData }
    }

    /// Returns the CPU of the slot.
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
        // SAFETY: by the contract of `new` this thread may use the value while `raw` lives; `&self`
        // excludes `deref_mut`.
        unsafe { &*self.slot.as_ptr() }
    }
}

impl<T> DerefMut for LocalGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: by the contract of `new` this thread may use the value while `raw` lives; `&mut
        // self` excludes other references.
        unsafe { &mut *self.slot.as_mut_ptr() }
    }
}

impl<T: fmt::Debug> fmt::Debug for LocalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalGuard").field("cpu", &self.cpu()).field("value", &**self).finish()
    }
}

/// Exclusive access to every slot; unlocks them on drop. Otherwise like [`LocalGuard`].
///
/// ```
/// use offlock_percpu::lglock::{GlobalGuard, LgLock, LockError};
///
/// fn drain(all: &mut GlobalGuard<'_, Vec<u32>>) -> Vec<u32> {
///     all.iter_mut().flat_map(|(_cpu, list)| list.drain(..)).collect()
/// }
///
/// let lists = LgLock::new(|cpu| vec![cpu.get()]);
/// assert_eq!(drain(&mut lists.global()?).len(), lists.capacity());
/// # Ok::<(), LockError>(())
/// ```
#[must_use = "the slots are unlocked when the guard drops"]
pub struct GlobalGuard<'a, T> {
    slots: &'a [CachePadded<Slot<T>>],
    _not_send: NotSend,
}

// SAFETY: a shared guard only gives out `&T`, for which `T: Sync` suffices; unlocking consumes it.
unsafe impl<T: Sync> Sync for GlobalGuard<'_, T> {}

impl<'a, T> GlobalGuard<'a, T> {
    /// # Safety
    ///
    /// The calling thread has acquired the words of all `slots`, and only the guard releases them.
    pub(super) unsafe fn new(slots: &'a [CachePadded<Slot<T>>]) -> Self {
        Self { slots, _not_send: PhantomData }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Returns the value of `cpu`, or `None` if it has no slot.
    #[must_use]
    pub fn get(&self, cpu: CpuId) -> Option<&T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: by the contract of `new` this thread holds the slot; `&self` excludes `get_mut`.
        Some(unsafe { &*slot.as_ptr() })
    }

    /// Returns the value of `cpu`, or `None` if it has no slot.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: by the contract of `new` this thread holds the slot; `&mut self` excludes other
        // references.
        Some(unsafe { &mut *slot.as_mut_ptr() })
    }

    /// Iterates over all slots in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (CpuId, &T)> + ExactSizeIterator + Clone {
        // The `&self` in the closure makes the iterator `Send` only if `T` is `Sync`.
        let value = move |cpu| (cpu, self.get(cpu).expect("below the capacity"));
        (0..self.slots.len() as u32).map(CpuId::new).map(value)
    }

    /// Iterates over all slots in ascending order.
    pub fn iter_mut(
        &mut self,
    ) -> impl DoubleEndedIterator<Item = (CpuId, &mut T)> + ExactSizeIterator {
        self.slots.iter().map(|slot| {
            // SAFETY: by the contract of `new` this thread holds the slot. The mutable borrow of the
            // guard excludes every other use, and each slot is visited once.
            (slot.cpu, unsafe { &mut *slot.as_mut_ptr() })
        })
    }
}

impl<T> Drop for GlobalGuard<'_, T> {
    fn drop(&mut self) {
        for slot in self.slots {
            // SAFETY: by the contract of `new` this thread holds the word, and only this drop
            // releases it.
            drop(unsafe { RawGuard::new(slot) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for GlobalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
