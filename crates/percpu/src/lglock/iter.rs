//! Iterators over every slot, in ascending order of the CPUs.

use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::{slice, vec};

use crate::cpu::CpuId;

use super::slot::Slot;

/// An iterator over shared references to all values, from
/// [`GlobalGuard::iter`](super::GlobalGuard::iter).
///
/// ```
/// use offlock_percpu::lglock::{Iter, LgLock, LockError};
///
/// fn total(values: Iter<'_, u64>) -> u64 {
///     values.map(|(_cpu, value)| value).sum()
/// }
///
/// let counts = LgLock::new(|_cpu| 1_u64);
/// assert_eq!(total(counts.global()?.iter()), counts.capacity() as u64);
/// # Ok::<(), LockError>(())
/// ```
#[derive(Debug)]
pub struct Iter<'a, T> {
    slots: slice::Iter<'a, Slot<T>>,
    /// Makes the iterator `!Send`, like the guard that it borrows.
    _guard: PhantomData<*const T>,
}

impl<'a, T> Iter<'a, T> {
    /// # Safety
    ///
    /// The calling thread holds the slots for `'a`, and changes no value during `'a`.
    pub(super) unsafe fn new(slots: &'a [Slot<T>]) -> Self {
        Self { slots: slots.iter(), _guard: PhantomData }
    }
}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self { slots: self.slots.clone(), _guard: PhantomData }
    }
}

/// An iterator over mutable references to all values, from `iter_mut` of a lock or of a
/// [`GlobalGuard`](super::GlobalGuard).
///
/// ```
/// use offlock_percpu::lglock::{IterMut, LgLock};
///
/// fn reset(values: IterMut<'_, u64>) {
///     values.for_each(|(_cpu, value)| *value = 0);
/// }
///
/// let mut counts = LgLock::new(|_cpu| 1_u64);
/// reset(counts.iter_mut());
/// assert!(counts.into_iter().all(|(_cpu, count)| count == 0));
/// ```
#[derive(Debug)]
pub struct IterMut<'a, T> {
    slots: slice::Iter<'a, Slot<T>>,
    _guard: PhantomData<*mut T>,
}

impl<'a, T> IterMut<'a, T> {
    /// # Safety
    ///
    /// The calling thread holds the slots for `'a`, and uses the values only through the iterator
    /// during `'a`.
    pub(super) unsafe fn new(slots: &'a [Slot<T>]) -> Self {
        Self { slots: slots.iter(), _guard: PhantomData }
    }
}

/// An iterator over all values by value, from `into_iter` of a lock.
///
/// ```
/// use offlock_percpu::lglock::{IntoIter, LgLock};
///
/// let values: IntoIter<u32> = LgLock::new(|cpu| cpu.get()).into_iter();
/// assert!(values.into_iter().all(|(cpu, value)| cpu.get() == value));
/// ```
#[derive(Debug)]
pub struct IntoIter<T> {
    slots: vec::IntoIter<Slot<T>>,
}

impl<T> IntoIter<T> {
    pub(super) fn new(slots: Box<[Slot<T>]>) -> Self {
        Self { slots: slots.into_vec().into_iter() }
    }
}

macro_rules! iterator {
    ([$($generics:tt)*] $name:ty, $item:ty, $slot:ident => $value:expr) => {
        impl<$($generics)*> Iterator for $name {
            type Item = (CpuId, $item);

            fn next(&mut self) -> Option<Self::Item> {
                self.slots.next().map(|$slot| ($slot.cpu, $value))
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                self.slots.size_hint()
            }
        }

        impl<$($generics)*> DoubleEndedIterator for $name {
            fn next_back(&mut self) -> Option<Self::Item> {
                self.slots.next_back().map(|$slot| ($slot.cpu, $value))
            }
        }

        impl<$($generics)*> ExactSizeIterator for $name {}
        impl<$($generics)*> FusedIterator for $name {}
    };
}

iterator!(['a, T] Iter<'a, T>, &'a T, slot => {
    // SAFETY: by the contract of `new` this thread holds the slot for `'a` and does not write to
    // it.
    unsafe { &*slot.as_ptr() }
});
iterator!(['a, T] IterMut<'a, T>, &'a mut T, slot => {
    // SAFETY: by the contract of `new` this thread holds the slot for `'a`, and the iterator yields
    // each slot once.
    unsafe { &mut *slot.as_mut_ptr() }
});
iterator!([T] IntoIter<T>, T, slot => slot.into_inner());
