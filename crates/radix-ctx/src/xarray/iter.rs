//! Going through entries, one by one or by name.

use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ops::RangeBounds;

use percpu::rcu::Pinned;

use super::array::{Ref, XArray, bounds};
use super::entry::{Entry, is_none};
use crate::tree::{Cursor, Tree, Which};

/// Entries with their indices, ascending: a moving target, see the [module](super). From
/// [`XArray::iter`], [`range`](XArray::range) and [`marked`](XArray::marked).
pub struct Iter<'g, P: Entry> {
    /// `None`: an empty range.
    cursor: Option<Cursor<'g, false>>,
    _entries: PhantomData<&'g P>,
}

impl<'g, P: Entry> Iter<'g, P> {
    pub(super) fn new(
        tree: &'g Tree<false>,
        bounds: Option<(u64, u64)>,
        which: Which,
        guard: &'g impl Pinned,
    ) -> Self {
        let _ = guard;
        // SAFETY: the guard, which is borrowed as long, is an RCU section.
        let cursor = bounds.map(|(from, to)| unsafe { tree.cursor(from, to, which) });
        Self { cursor, _entries: PhantomData }
    }

    /// The lowest index that is yet to be looked at; `None` when all of the range was.
    ///
    /// To go on from there later, with another guard: [`array.range(position..)`](XArray::range).
    ///
    /// # Examples
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
    ///     let guard = rcu::pin(); // one for each entry, so that nobody waits for all of them
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
                // SAFETY: an entry's word, in the array after the guard began, which lives for `'g`.
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
    /// All entries, ascending.
    pub fn iter<'g>(&'g self, guard: &'g impl Pinned) -> Iter<'g, P> {
        self.range(.., guard)
    }

    /// The entries of `range`, ascending.
    pub fn range<'g>(
        &'g self,
        range: impl RangeBounds<u64>,
        guard: &'g impl Pinned,
    ) -> Iter<'g, P> {
        Iter::new(&self.tree, bounds(range), Which::Present, guard)
    }

    /// The entry with the lowest index at or above `index`. Wait-free.
    pub fn at_or_after<'g>(
        &'g self,
        index: u64,
        guard: &'g impl Pinned,
    ) -> Option<(u64, Ref<'g, P>)> {
        self.range(index.., guard).next()
    }

    /// The entry with the lowest index above `index`. Wait-free.
    pub fn next<'g>(&'g self, index: u64, guard: &'g impl Pinned) -> Option<(u64, Ref<'g, P>)> {
        self.at_or_after(index.checked_add(1)?, guard)
    }

    /// The entry with the highest index at or below `index`. Wait-free.
    pub fn at_or_before<'g>(
        &'g self,
        index: u64,
        guard: &'g impl Pinned,
    ) -> Option<(u64, Ref<'g, P>)> {
        let _ = guard;
        let mut from = index;
        loop {
            // SAFETY: the guard is an RCU section.
            let (index, word) = unsafe { self.tree.prev(from) }?;
            if !is_none(word) {
                // SAFETY: an entry's word, in the array after the guard began.
                return Some((index, unsafe { P::borrow(word) }));
            }
            from = index.checked_sub(1)?; // it is reserved
        }
    }

    /// The entry with the highest index below `index`. Wait-free.
    pub fn prev<'g>(&'g self, index: u64, guard: &'g impl Pinned) -> Option<(u64, Ref<'g, P>)> {
        self.at_or_before(index.checked_sub(1)?, guard)
    }

    /// The lowest index of `range` that is neither in use nor reserved; [`alloc`](XArray::alloc) would
    /// take it. Blocks for the lock. Never allocates.
    pub fn next_free(&self, range: impl RangeBounds<u64>) -> Option<u64> {
        let (from, to) = bounds(range)?;
        self.lock().edit.first_not_full(from, to)
    }
}
