//! The array and its readers.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use percpu::rcu::{self, Pinned};
use percpu::sync::WordLock;

use super::counts::Counts;
use super::cycle::Cycle;
use super::entry::{Entry, RESERVED, Words, is_none};
use crate::tree::Tree;

/// What an [`XArray`] gives its readers: `&T` of an [`Owned<T>`](crate::rcu::Owned), else the entry.
pub type Ref<'g, P> = <P as Words>::Ref<'g>;

/// What comes out of an [`XArray`]: [`Unlinked<T>`](crate::rcu::Unlinked) of an
/// [`Owned<T>`](crate::rcu::Owned), else the entry.
pub type Out<P> = <P as Words>::Unlinked;

/// An array of entries by `u64` indices, most of which are absent. See the [module](super).
pub struct XArray<P: Entry> {
    pub(super) tree: Tree<false>,
    /// Over all changes; in it what `alloc_cyclic` remembers.
    pub(super) lock: WordLock<Cycle>,
    pub(super) counts: Counts,
    /// Invariant in `P`, as entries come in by `&self`: else one could be stored as less than it is
    /// read as.
    ///
    /// ```compile_fail,E0308
    /// use radix_ctx::rcu::Owned;
    /// use radix_ctx::XArray;
    ///
    /// fn narrow(of_any: &XArray<Owned<fn(&str)>>) -> &XArray<Owned<fn(&'static str)>> {
    ///     of_any
    /// }
    /// ```
    _owns: PhantomData<fn(P) -> P>,
}

impl<P: Entry> XArray<P> {
    /// An empty array. Does not allocate.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tree: Tree::new(),
            lock: WordLock::new(Cycle::new()),
            counts: Counts::new(),
            _owns: PhantomData,
        }
    }

    /// The entry at `index`. Wait-free: a load for each level of nodes, of which dense indices below
    /// 64^n need n.
    ///
    /// # Examples
    ///
    /// ```
    /// use radix_ctx::rcu::{self, Owned};
    /// use radix_ctx::XArray;
    ///
    /// let array = XArray::<Owned<&str>>::new();
    /// array.store(1 << 40, Owned::new("far"))?;
    /// let guard = rcu::pin();
    /// assert_eq!(array.load(1 << 40, &guard), Some(&"far"));
    /// assert_eq!(array.load(0, &guard), None);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// A reference does not outlive the guard:
    ///
    /// ```compile_fail
    /// # use radix_ctx::rcu::{self, Owned};
    /// # use radix_ctx::XArray;
    /// let array = XArray::<Owned<&str>>::new();
    /// let seen = { let guard = rcu::pin(); array.load(0, &guard) };
    /// println!("{seen:?}");
    /// ```
    #[inline(always)]
    pub fn load<'g>(&'g self, index: u64, guard: &'g impl Pinned) -> Option<Ref<'g, P>> {
        let _ = guard;
        // SAFETY: the guard is an RCU section.
        let word = unsafe { self.tree.load(index) };
        if is_none(word) {
            return None;
        }
        // SAFETY: an entry's word; it was in the array after the guard began, and what is taken out is
        // dropped a grace period later.
        Some(unsafe { P::borrow(word) })
    }

    /// Calls `f` with the entry at `index`, if there is one. As [`load`](XArray::load), in a section of
    /// its own.
    #[inline]
    pub fn with<R>(&self, index: u64, f: impl FnOnce(Ref<'_, P>) -> R) -> Option<R> {
        let guard = rcu::pin();
        self.load(index, &guard).map(f)
    }

    /// Whether there is an entry at `index`. Wait-free.
    #[inline]
    pub fn contains(&self, index: u64) -> bool {
        let _guard = rcu::pin();
        // SAFETY: the guard is an RCU section.
        !is_none(unsafe { self.tree.load(index) })
    }

    /// True if there is neither an entry nor a reservation. Wait-free.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// Checks the invariants of the array's tree. For tests.
    ///
    /// # Panics
    ///
    /// Panics with what does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        let locked = self.lock();
        if let Err(what) = locked.edit.validate() {
            panic!("{what}");
        }
        locked.validate_counts(&self.counts);
    }
}

impl<P: Entry> Default for XArray<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Entry> fmt::Debug for XArray<P> {
    /// How many entries there are: to show them needs a guard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XArray").field("entries", &self.counts.entries()).finish_non_exhaustive()
    }
}

impl<P: Entry> Drop for XArray<P> {
    /// Drops all entries, in ascending order. If one of them panics the rest leaks.
    fn drop(&mut self) {
        self.tree.destroy(|_, word| {
            if word != RESERVED {
                // SAFETY: an entry's word, that was just taken out; readers borrow the array.
                drop(unsafe { P::from_word(word) });
            }
        });
    }
}

/// The first and the last index of a range; `None` if there is none in it.
pub(super) fn bounds(range: impl RangeBounds<u64>) -> Option<(u64, u64)> {
    let from = match range.start_bound() {
        Bound::Included(&from) => from,
        Bound::Excluded(&before) => before.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(&to) => to,
        Bound::Excluded(&behind) => behind.checked_sub(1)?,
        Bound::Unbounded => u64::MAX,
    };
    (from <= to).then_some((from, to))
}
