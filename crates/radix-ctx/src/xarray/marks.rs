//! Marks: three bits of each entry, and searches for entries with a mark.

use std::ops::RangeBounds;

use percpu::rcu::{self, Pinned};

use super::array::{XArray, bounds};
use super::entry::{Entry, is_none};
use super::iter::Iter;
use crate::tree::Filter;

/// One of three bits that each entry has. The program gives it a meaning.
///
/// A new entry has no marks. An entry that replaces another one keeps its marks. A search for a mark skips
/// 64 entries, or the entries of 64 nodes, at a time.
///
/// ```
/// use radix_ctx::rcu;
/// use radix_ctx::xarray::{Mark, Value, XArray};
///
/// const DIRTY: Mark = Mark::Zero;
/// const WRITEBACK: Mark = Mark::One;
///
/// let blocks = XArray::<Value>::new();
/// blocks.store(42, 0.into())?;
/// blocks.set_mark(42, DIRTY);
///
/// let guard = rcu::pin();
/// for (block, _entry) in blocks.marked(DIRTY, .., &guard) {
///     blocks.set_mark(block, WRITEBACK);
///     blocks.clear_mark(block, DIRTY);
/// }
/// assert!(blocks.is_marked(42, WRITEBACK) && !blocks.any_marked(DIRTY));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mark {
    /// The first mark.
    Zero,
    /// The second mark.
    One,
    /// The third mark.
    Two,
}

impl Mark {
    /// All marks.
    pub const ALL: [Self; 3] = [Self::Zero, Self::One, Self::Two];

    fn number(self) -> usize {
        self as usize
    }
}

impl<P: Entry> XArray<P> {
    /// Sets `mark` on the entry at `index`. Returns false if there is no entry: a reserved index has no
    /// marks.
    ///
    /// Blocks shortly on the lock. Never allocates. A thread that sees the mark also sees what this thread
    /// did before.
    ///
    ///
    /// ```
    /// use radix_ctx::rcu;
    /// use radix_ctx::xarray::{Mark, Value, XArray};
    ///
    /// const DIRTY: Mark = Mark::Zero;
    /// let pages = XArray::<Value>::new();
    /// for index in 0..100 {
    ///     pages.store(index, 0.into())?;
    /// }
    /// assert!(pages.set_mark(42, DIRTY));
    /// assert!(!pages.set_mark(1_000, DIRTY));
    ///
    /// let guard = rcu::pin();
    /// let dirty: Vec<u64> = pages.marked(DIRTY, .., &guard).map(|(index, _)| index).collect();
    /// assert_eq!(dirty, [42]);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn set_mark(&self, index: u64, mark: Mark) -> bool {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return false };
        let is_entry = !is_none(locked.edit.get(slot));
        is_entry && locked.edit.set_mark(slot, mark.number())
    }

    /// Clears `mark` on the entry at `index`. Returns whether the entry had the mark.
    ///
    /// Blocks shortly on the lock. Never allocates.
    pub fn clear_mark(&self, index: u64, mark: Mark) -> bool {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return false };
        let was = !is_none(locked.edit.get(slot)) && locked.edit.mark(slot, mark.number());
        if was {
            locked.edit.clear_mark(slot, mark.number());
        }
        was
    }

    /// Returns whether the entry at `index` has `mark`. Returns false if there is no entry. Wait-free.
    #[inline]
    pub fn is_marked(&self, index: u64, mark: Mark) -> bool {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        unsafe { self.tree.is_marked(index, mark.number()) }
    }

    /// Returns whether any entry has `mark`. Wait-free.
    #[inline]
    pub fn any_marked(&self, mark: Mark) -> bool {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        unsafe { self.tree.any_marked(mark.number()) }
    }

    /// Iterates over the entries of `range` that have `mark`, ascending by index. Skips entries without
    /// the mark 64 at a time, or those of 64 nodes at a time.
    pub fn marked<'g>(
        &'g self,
        mark: Mark,
        range: impl RangeBounds<u64>,
        guard: &'g impl Pinned,
    ) -> Iter<'g, P> {
        Iter::new(&self.tree, bounds(range), Filter::Mark(mark.number()), guard)
    }
}
