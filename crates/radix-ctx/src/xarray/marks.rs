//! Marks: three bits beside each entry, and how to find by them.

use std::ops::RangeBounds;

use percpu::rcu::{self, Pinned};

use super::array::{XArray, bounds};
use super::entry::{Entry, is_none};
use super::iter::Iter;
use crate::tree::Which;

/// One of the three bits that an entry can be searched by. What it means is up to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mark {
    /// The first.
    Zero,
    /// The second.
    One,
    /// The third.
    Two,
}

impl Mark {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Zero, Self::One, Self::Two];

    fn number(self) -> usize {
        self as usize
    }
}

impl<P: Entry> XArray<P> {
    /// Sets `mark` on the entry at `index`. Returns false, and does nothing, if there is none: a reserved
    /// index has no marks either.
    ///
    /// Blocks for the lock. Never allocates. Who sees the mark sees what was done before.
    ///
    /// # Examples
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

    /// Takes `mark` from the entry at `index`. Returns whether it had it.
    ///
    /// Blocks for the lock. Never allocates.
    pub fn clear_mark(&self, index: u64, mark: Mark) -> bool {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return false };
        let was = !is_none(locked.edit.get(slot)) && locked.edit.mark(slot, mark.number());
        if was {
            locked.edit.clear_mark(slot, mark.number());
        }
        was
    }

    /// Whether there is an entry at `index`, and it has `mark`. Wait-free.
    #[inline]
    pub fn is_marked(&self, index: u64, mark: Mark) -> bool {
        let _guard = rcu::pin();
        // SAFETY: the guard is an RCU section.
        unsafe { self.tree.is_marked(index, mark.number()) }
    }

    /// Whether any entry has `mark`. Wait-free.
    #[inline]
    pub fn any_marked(&self, mark: Mark) -> bool {
        let _guard = rcu::pin();
        // SAFETY: the guard is an RCU section.
        unsafe { self.tree.any_marked(mark.number()) }
    }

    /// The entries of `range` that have `mark`, ascending. Passes over what is not marked 64 entries, or
    /// 64 nodes, at a time.
    pub fn marked<'g>(
        &'g self,
        mark: Mark,
        range: impl RangeBounds<u64>,
        guard: &'g impl Pinned,
    ) -> Iter<'g, P> {
        Iter::new(&self.tree, bounds(range), Which::Mark(mark.number()), guard)
    }
}
