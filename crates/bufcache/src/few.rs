//! A list with room for a few, for whom no memory is asked.

use std::ops::{Deref, DerefMut};

#[derive(Debug)]
pub(crate) struct Few<T, const N: usize> {
    all: [T; N],
    len: usize,
}

impl<T: Copy, const N: usize> Few<T, N> {
    /// An empty one; `filler` is never seen.
    pub(crate) fn new(filler: T) -> Self {
        Self { all: [filler; N], len: 0 }
    }

    /// Adds one, for which there is room.
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
