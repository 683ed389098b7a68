//! Iteration over entries, ascending by index, and searches for neighbours.

use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ops::RangeBounds;

use percpu::rcu::Pinned;

use super::array::{Ref, XArray, bounds};
use super::entry::{Entry, is_none};
use crate::tree::{Cursor, Filter, Tree};

/// An iterator over the entries of an [`XArray`] and their indexes, ascending by index.
///
/// Returned by [`XArray::iter`], [`XArray::range`] and [`XArray::marked`]. Weakly consistent: an entry that
/// is present throughout is returned once. An entry that is stored or erased meanwhile may be returned or
/// not. Each step is wait-free. Writers do not wait for an iterator.
///
/// ```
/// use radix_ctx::rcu;
/// use radix_ctx::xarray::{Value, XArray};
///
/// let array = XArray::<Value>::new();
/// for index in [5, 1, 9] {
///     array.store(index, 0.into())?;
/// }
/// let guard = rcu::pin();
/// let indexes: Vec<u64> = array.range(..9, &guard).map(|(index, _entry)| index).collect();
/// assert_eq!(indexes, [1, 5]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Iter<'g, P: Entry> {
    /// `None` for an empty range.
    cursor: Option<Cursor<'g, false>>,
    _entries: PhantomData<&'g P>,
}

impl<'g, P: Entry> Iter<'g, P> {
    pub(super) fn new(
        tree: &'g Tree<false>,
        bounds: Option<(u64, u64)>,
        filter: Filter,
        guard: &'g impl Pinned,
    ) -> Self {
        let _ = guard;
        // SAFETY: `guard` is an RCU guard, borrowed for `'g`.
        let cursor = bounds.map(|(from, to)| unsafe { tree.cursor(from, to, filter) });
        Self { cursor, _entries: PhantomData }
    }

    /// Returns the index at which the iteration continues, or `None` at the end of the range.
    ///
    /// [`array.range(next_index..)`](XArray::range) continues there, under another guard.
    ///
    /// ```
    /// use radix_ctx::rcu;
    /// use radix_ctx::xarray::{Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// for index in [1, 5, u64::MAX] {
    ///     array.store(index, 0.into())?;
    /// }
    /// let mut from = Some(0);
    /// let mut seen = Vec::new();
    /// while let Some(position) = from {
    ///     let guard = rcu::pin(); // a guard for each entry, so that no grace period waits for the loop
    ///     let mut rest = array.range(position.., &guard);
    ///     seen.extend(rest.next().map(|(index, _)| index));
    ///     from = rest.next_index();
    /// }
    /// assert_eq!(seen, [1, 5, u64::MAX]);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn next_index(&self) -> Option<u64> {
        self.cursor.as_ref()?.position()
    }
}

impl<'g, P: Entry> Iterator for Iter<'g, P> {
    type Item = (u64, Ref<'g, P>);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let cursor = self.cursor.as_mut()?;
        loop {
            let (index, word) = cursor.next()?;
            if !is_none(word) {
                // SAFETY: the word is an entry that was in the array under the guard of `new`, held for `'g`.
                return Some((index, unsafe { P::borrow(word) }));
            }
        }
    }
}

impl<P: Entry> FusedIterator for Iter<'_, P> {}

impl<P: Entry> Clone for Iter<'_, P> {
    fn clone(&self) -> Self {
        Self { cursor: self.cursor.clone(), _entries: PhantomData }
    }
}

impl<P: Entry> fmt::Debug for Iter<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("position", &self.next_index()).finish_non_exhaustive()
    }
}

impl<P: Entry> XArray<P> {
    /// Iterates over all entries, ascending by index.
    pub fn iter<'g>(&'g self, guard: &'g impl Pinned) -> Iter<'g, P> {
        self.range(.., guard)
    }

    /// Iterates over the entries of `range`, ascending by index.
    pub fn range<'g>(
        &'g self,
        range: impl RangeBounds<u64>,
        guard: &'g impl Pinned,
    ) -> Iter<'g, P> {
        Iter::new(&self.tree, bounds(range), Filter::Present, guard)
    }

    /// Returns the first entry at `index` or above. Wait-free.
    pub fn at_or_after<'g>(
        &'g self,
        index: u64,
        guard: &'g impl Pinned,
    ) -> Option<(u64, Ref<'g, P>)> {
        self.range(index.., guard).next()
    }

    /// Returns the first entry above `index`. Wait-free.
    pub fn next<'g>(&'g self, index: u64, guard: &'g impl Pinned) -> Option<(u64, Ref<'g, P>)> {
        self.at_or_after(index.checked_add(1)?, guard)
    }

    /// Returns the last entry at `index` or below. Wait-free.
    pub fn at_or_before<'g>(
        &'g self,
        index: u64,
        guard: &'g impl Pinned,
    ) -> Option<(u64, Ref<'g, P>)> {
        let _ = guard;
        let mut from = index;
        loop {
            // SAFETY: `guard` is an RCU guard.
            let (index, word) = unsafe { self.tree.prev(from) }?;
            if !is_none(word) {
                // SAFETY: the word is an entry that was in the array under `guard`, borrowed for `'g`.
                return Some((index, unsafe { P::borrow(word) }));
            }
            from = index.checked_sub(1)?; // the index is reserved
        }
    }

    /// Returns the last entry below `index`. Wait-free.
    pub fn prev<'g>(&'g self, index: u64, guard: &'g impl Pinned) -> Option<(u64, Ref<'g, P>)> {
        self.at_or_before(index.checked_sub(1)?, guard)
    }

    /// Returns the lowest index of `range` that has neither an entry nor a reservation. The next
    /// [`alloc`](XArray::alloc) in the range would use it if no other thread changes the array. Blocks
    /// shortly on the lock. Never allocates.
    pub fn next_free(&self, range: impl RangeBounds<u64>) -> Option<u64> {
        let (from, to) = bounds(range)?;
        self.lock().edit.first_not_full(from, to)
    }
}
