//! A list of at most `N` elements, which needs no allocation.

use std::ops::{Deref, DerefMut};

/// The first `len` elements of an array.
#[derive(Debug)]
pub(crate) struct Few<T, const N: usize> {
    all: [T; N],
    len: usize,
}

impl<T: Copy, const N: usize> Few<T, N> {
    /// Returns an empty list. `filler` initialises the array and is never an element.
    pub(crate) fn new(filler: T) -> Self {
        Self { all: [filler; N], len: 0 }
    }

    /// Adds an element.
    ///
    /// # Panics
    ///
    /// Panics if the list has `N` elements.
    pub(crate) fn push(&mut self, one: T) {
        self.all[self.len] = one;
        self.len += 1;
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T, const N: usize> Deref for Few<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.all[..self.len]
    }
}

impl<T, const N: usize> DerefMut for Few<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.all[..self.len]
    }
}
