//! Allocation of indexes.

use std::ops::RangeBounds;

use super::array::{XArray, bounds};
use super::cycle::{Allocation, Cycle};
use super::entry::Entry;
use super::error::AllocateError;
use super::write::Locked;

impl Locked<'_> {
    /// Puts `entry` at a free index.
    fn fill<P: Entry>(&self, index: u64, entry: P) -> Result<(), AllocateError<P>> {
        let Ok(slot) = self.edit.make_slot(index) else {
            return Err(AllocateError::NoMemory(entry));
        };
        self.put(slot, entry.into_word());
        Ok(())
    }

    /// Puts `entry` at the first free index from the position of `cycle` on, and moves `cycle` behind it.
    fn fill_next<P: Entry>(
        &self,
        bounds: Option<(u64, u64)>,
        cycle: &mut Cycle,
        entry: P,
    ) -> Result<Allocation, AllocateError<P>> {
        let Some((from, to)) = bounds else { return Err(AllocateError::Exhausted(entry)) };
        let start = cycle.next.filter(|&next| next <= to).map(|next| next.max(from));
        let ahead = start.and_then(|start| self.edit.first_not_full(start, to));
        let found = ahead.or_else(|| match start {
            Some(start) if start == from => None,
            Some(start) => self.edit.first_not_full(from, start - 1),
            None => self.edit.first_not_full(from, to),
        });
        let Some(index) = found else { return Err(AllocateError::Exhausted(entry)) };
        self.fill(index, entry)?;
        cycle.next = index.checked_add(1);
        Ok(Allocation { index, wrapped: ahead.is_none() })
    }
}

impl<P: Entry> XArray<P> {
    /// Inserts `entry` at the lowest free index of `range`, and returns the index. An index is free if it
    /// has neither an entry nor a reservation.
    ///
    /// Blocks shortly on the lock. Allocates if the index needs new nodes. The search reads a few words for
    /// each level of nodes, however many indexes are in use.
    ///
    /// ```
    /// use radix_ctx::xarray::{AllocateError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// assert_eq!(array.alloc(1..3, 7.into())?, 1);
    /// assert_eq!(array.alloc(1..3, 8.into())?, 2);
    /// assert_eq!(array.alloc(1..3, 9.into()), Err(AllocateError::Exhausted(9.into())));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocateError`] returns `entry`; the array has not changed.
    pub fn alloc(&self, range: impl RangeBounds<u64>, entry: P) -> Result<u64, AllocateError<P>> {
        let Some((from, to)) = bounds(range) else { return Err(AllocateError::Exhausted(entry)) };
        let locked = self.lock();
        let Some(index) = locked.edit.first_not_full(from, to) else {
            return Err(AllocateError::Exhausted(entry));
        };
        locked.fill(index, entry)?;
        Ok(index)
    }

    /// Inserts `entry` at the first free index of `range` above the index of the last cyclic allocation. At
    /// the end of the range the search continues at its beginning. So an erased index is used again as
    /// late as possible.
    ///
    /// Blocks shortly on the lock, and costs as much as [`alloc`](XArray::alloc).
    ///
    /// ```
    /// use radix_ctx::xarray::{Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// for expected in [(0, false), (1, false), (0, true)] {
    ///     let allocation = array.alloc_cyclic(0..2, 7.into())?;
    ///     assert_eq!((allocation.index, allocation.wrapped), expected);
    ///     array.erase(allocation.index);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocateError`] returns `entry`; the array has not changed.
    pub fn alloc_cyclic(
        &self,
        range: impl RangeBounds<u64>,
        entry: P,
    ) -> Result<Allocation, AllocateError<P>> {
        let bounds = bounds(range);
        let mut locked = self.lock();
        let mut cycle = *locked.cycle;
        let given = locked.fill_next(bounds, &mut cycle, entry)?;
        *locked.cycle = cycle;
        Ok(given)
    }

    /// Inserts `entry` like [`alloc_cyclic`](XArray::alloc_cyclic), but from the position of `cycle` on. An
    /// array can have several cycles, each for another range.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] returns `entry`; neither the array nor `cycle` has changed.
    pub fn alloc_cyclic_by(
        &self,
        range: impl RangeBounds<u64>,
        cycle: &mut Cycle,
        entry: P,
    ) -> Result<Allocation, AllocateError<P>> {
        let bounds = bounds(range);
        let locked = self.lock();
        locked.fill_next(bounds, cycle, entry)
    }
}
