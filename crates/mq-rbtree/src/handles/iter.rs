//! A receiver's messages, one after the other.

use std::fmt;
use std::iter::FusedIterator;

use super::Receiver;
use crate::core::{Bitmap, Levels};
use crate::queue::Received;

/// Messages as they come, until the queue is closed and empty: [`Receiver::iter`].
pub struct Iter<'r, T, L: Levels = Bitmap> {
    pub(super) receiver: &'r Receiver<T, L>,
}

/// The messages that are there: [`Receiver::try_iter`].
pub struct TryIter<'r, T, L: Levels = Bitmap> {
    pub(super) receiver: &'r Receiver<T, L>,
}

/// As [`Iter`], with the receiver.
pub struct IntoIter<T, L: Levels = Bitmap> {
    receiver: Receiver<T, L>,
}

impl<T, L: Levels> Iterator for Iter<'_, T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.receive().ok()
    }
}

impl<T, L: Levels> Iterator for TryIter<'_, T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.try_receive().ok()
    }
}

impl<T, L: Levels> Iterator for IntoIter<T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.receive().ok()
    }
}

// A closed queue stays so.
impl<T, L: Levels> FusedIterator for Iter<'_, T, L> {}
impl<T, L: Levels> FusedIterator for IntoIter<T, L> {}

impl<'r, T, L: Levels> IntoIterator for &'r Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = Iter<'r, T, L>;

    fn into_iter(self) -> Iter<'r, T, L> {
        self.iter()
    }
}

impl<T, L: Levels> IntoIterator for Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = IntoIter<T, L>;

    fn into_iter(self) -> IntoIter<T, L> {
        IntoIter { receiver: self }
    }
}

macro_rules! debug {
    ($($name:ident<$($life:lifetime,)? T, L>)*) => {$(
        impl<T, L: Levels> fmt::Debug for $name<$($life,)? T, L> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.receiver).finish()
            }
        }
    )*};
}

debug!(Iter<'_, T, L> TryIter<'_, T, L> IntoIter<T, L>);
