//! A list that grows while others read it, up to a length that is said at the start.
//!
//! A value stays where it is until the list is dropped, so the holder of an index needs no lock and no
//! reference: requests carry indexes of exports and files.

use std::ops::Index;
use std::sync::OnceLock;

/// At most so many values, from the first index on without a gap.
#[derive(Debug)]
pub(crate) struct Slots<T>(Box<[OnceLock<T>]>);

impl<T> Slots<T> {
    pub(crate) fn new(most: usize) -> Self {
        Self((0..most).map(|_| OnceLock::new()).collect())
    }

    /// Adds a value; returns its index, or the value if the list is full. Threads that add at the same
    /// time take turns.
    pub(crate) fn push(&self, mut value: T) -> Result<usize, T> {
        for (index, slot) in self.0.iter().enumerate().skip(self.len()) {
            match slot.set(value) {
                Ok(()) => return Ok(index),
                Err(refused) => value = refused, // another was first
            }
        }
        Err(value)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index)?.get()
    }

    /// How many there are. Takes time by their number's logarithm.
    pub(crate) fn len(&self) -> usize {
        self.0.partition_point(|slot| slot.get().is_some())
    }

    /// How many there may be.
    pub(crate) fn capacity(&self) -> usize {
        self.0.len()
    }

    /// Those that there are, from the first on.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + ExactSizeIterator {
        self.0[..self.len()].iter().map(|slot| slot.get().expect("all before the length are set"))
    }
}

impl<T> Index<usize> for Slots<T> {
    type Output = T;

    /// # Panics
    ///
    /// Panics if there is none.
    fn index(&self, index: usize) -> &T {
        self.get(index).expect("an index comes from `push`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fills_up_and_says_so() {
        let slots = Slots::new(3);
        assert_eq!((slots.len(), slots.capacity(), slots.get(0)), (0, 3, None));
        for nr in 0..3 {
            assert_eq!(slots.push(nr * 10), Ok(nr));
        }
        assert_eq!(slots.push(99), Err(99));
        assert_eq!(slots.iter().copied().collect::<Vec<_>>(), [0, 10, 20]);
        assert_eq!((slots[2], slots.get(3)), (20, None));
        assert_eq!(Slots::<()>::new(0).push(()), Err(()));
    }

    #[test]
    fn those_who_add_at_once_get_different_indexes() {
        let slots = Slots::new(400);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let slots = &slots;
                scope.spawn(move || {
                    for nr in 0..100 {
                        let value = thread * 100 + nr;
                        let index = slots.push(value).unwrap();
                        assert_eq!(slots[index], value);
                        assert!(slots.len() > index);
                    }
                });
            }
        });
        let mut all: Vec<_> = slots.iter().copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..400).collect::<Vec<_>>());
    }
}
