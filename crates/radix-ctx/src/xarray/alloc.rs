//! Indices that the array chooses.

use std::ops::RangeBounds;

use super::array::{XArray, bounds};
use super::cycle::{Allocation, Cycle};
use super::entry::Entry;
use super::error::AllocateError;
use super::write::Locked;

impl Locked<'_> {
    fn fill<P: Entry>(&self, index: u64, entry: P) -> Result<(), AllocateError<P>> {
        let Ok(slot) = self.edit.make_slot(index) else {
            return Err(AllocateError::NoMemory(entry));
        };
        self.put(slot, entry.into_word());
        Ok(())
    }

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
    /// Puts `entry` at the lowest free index of `range`, and returns that.
    ///
    /// Blocks for the lock; allocates if the index is new. A few words per level are looked at, however
    /// many indices are in use.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] gives `entry` back; nothing has changed.
    ///
    /// # Examples
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
    pub fn alloc(&self, range: impl RangeBounds<u64>, entry: P) -> Result<u64, AllocateError<P>> {
        let Some((from, to)) = bounds(range) else { return Err(AllocateError::Exhausted(entry)) };
        let locked = self.lock();
        let Some(index) = locked.edit.first_not_full(from, to) else {
            return Err(AllocateError::Exhausted(entry));
        };
        locked.fill(index, entry)?;
        Ok(index)
    }

    /// Puts `entry` at the next free index of `range` after the last that this function gave, from the
    /// beginning again at its end: so an erased index is not soon used again.
    ///
    /// Costs what [`alloc`](XArray::alloc) costs.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] gives `entry` back; nothing has changed.
    ///
    /// # Examples
    ///
    /// ```
    /// use radix_ctx::xarray::{Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// for expected in [(0, false), (1, false), (0, true)] {
    ///     let given = array.alloc_cyclic(0..2, 7.into())?;
    ///     assert_eq!((given.index, given.wrapped), expected);
    ///     array.erase(given.index);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
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

    /// [`alloc_cyclic`](XArray::alloc_cyclic) after the last index that was given by way of `cycle`.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] gives `entry` back; nothing has changed.
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
