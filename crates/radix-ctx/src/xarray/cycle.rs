//! The position and the result of a cyclic allocation.

/// The position of a cyclic allocation: the index at which the next search begins.
///
/// [`alloc_cyclic`](super::XArray::alloc_cyclic) uses a position in the array.
/// [`alloc_cyclic_by`](super::XArray::alloc_cyclic_by) takes one, so that an array can have several.
///
/// ```
/// use radix_ctx::xarray::{Cycle, Value, XArray};
///
/// let array = XArray::<Value>::new();
/// let (mut low, mut high) = (Cycle::new(), Cycle::new());
/// assert_eq!(array.alloc_cyclic_by(0..100, &mut low, 7.into())?.index, 0);
/// assert_eq!(array.alloc_cyclic_by(100..200, &mut high, 7.into())?.index, 100);
/// assert_eq!((low.next_index(), high.next_index()), (Some(1), Some(101)));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// `None` after `u64::MAX`.
    pub(super) next: Option<u64>,
}

impl Cycle {
    /// Makes a position before every index: the search begins with the first index of the range.
    #[must_use]
    pub const fn new() -> Self {
        Self { next: Some(0) }
    }

    /// Makes a position at `index`. If the index is not in the range of an allocation, the search begins
    /// with the next index that is, or with the first of the range.
    #[must_use]
    pub const fn starting_at(index: u64) -> Self {
        Self { next: Some(index) }
    }

    /// Returns the index after the one that was allocated last, or `None` if that was `u64::MAX`.
    #[must_use]
    pub const fn next_index(&self) -> Option<u64> {
        self.next
    }
}

impl Default for Cycle {
    fn default() -> Self {
        Self::new()
    }
}

/// The result of a cyclic allocation.
///
/// ```
/// use radix_ctx::xarray::{Value, XArray};
///
/// let array = XArray::<Value>::new();
/// let allocation = array.alloc_cyclic(10.., 7.into())?;
/// assert_eq!((allocation.index, allocation.wrapped), (10, false));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The allocated index.
    pub index: u64,
    /// Whether the search reached the end of the range and continued at its beginning.
    pub wrapped: bool,
}
