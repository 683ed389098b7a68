//! Iterators over every slot, in ascending order of the CPUs.

use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::{slice, vec};

use crate::cpu::CpuId;

use super::slot::Slot;

/// The values of all slots, to read; from [`GlobalGuard::iter`](super::GlobalGuard::iter).
#[derive(Debug)]
pub struct Iter<'a, T> {
    slots: slice::Iter<'a, Slot<T>>,
    /// Borrows a guard, and is as little `Send` as that.
    _guard: PhantomData<*const T>,
}

impl<'a, T> Iter<'a, T> {
    /// # Safety
    ///
    /// The calling thread holds the slots for `'a`, and changes no value in that time.
    pub(super) unsafe fn new(slots: &'a [Slot<T>]) -> Self {
        Self { slots: slots.iter(), _guard: PhantomData }
    }
}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self { slots: self.slots.clone(), _guard: PhantomData }
    }
}

/// The values of all slots, to change; from `iter_mut` of a lock or of a
/// [`GlobalGuard`](super::GlobalGuard).
#[derive(Debug)]
pub struct IterMut<'a, T> {
    slots: slice::Iter<'a, Slot<T>>,
    _guard: PhantomData<*mut T>,
}

impl<'a, T> IterMut<'a, T> {
    /// # Safety
    ///
    /// The calling thread holds the slots for `'a`, and uses no value in that time but through
    /// the iterator.
    pub(super) unsafe fn new(slots: &'a [Slot<T>]) -> Self {
        Self { slots: slots.iter(), _guard: PhantomData }
    }
}

/// The values of all slots, to keep; from `into_iter` of a lock.
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
    // SAFETY: whoever made the iterator holds the slot for `'a` and does not write.
    unsafe { &*slot.as_ptr() }
});
iterator!(['a, T] IterMut<'a, T>, &'a mut T, slot => {
    // SAFETY: whoever made the iterator holds the slot for `'a`, and the iterator comes by it once.
    unsafe { &mut *slot.as_mut_ptr() }
});
iterator!([T] IntoIter<T>, T, slot => slot.into_inner());
