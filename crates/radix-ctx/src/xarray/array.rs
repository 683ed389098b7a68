//! The array, and lookups in it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use percpu::rcu::{self, Pinned};
use percpu::sync::WordLock;

use super::counts::Counts;
use super::cycle::Cycle;
use super::entry::{Entry, RESERVED, Words, is_none};
use crate::tree::Tree;

/// The form in which an [`XArray`] returns an entry to a reader: `&T` for an
/// [`Owned<T>`](crate::rcu::Owned), the entry itself for the other types.
///
/// ```
/// use radix_ctx::rcu::{self, Owned};
/// use radix_ctx::xarray::{Ref, XArray};
///
/// let names = XArray::<Owned<String>>::new();
/// let guard = rcu::pin();
/// let name: Option<Ref<'_, Owned<String>>> = names.load(0, &guard);
/// let same_type: Option<&String> = name;
/// assert_eq!(same_type, None);
/// ```
pub type Ref<'g, P> = <P as Words>::Ref<'g>;

/// The form in which a removal from an [`XArray`] returns an entry:
/// [`Unlinked<T>`](crate::rcu::Unlinked) for an [`Owned<T>`](crate::rcu::Owned), the entry itself for the
/// other types.
///
/// ```
/// use radix_ctx::rcu::{Owned, Unlinked};
/// use radix_ctx::xarray::{Out, XArray};
///
/// let names = XArray::<Owned<String>>::new();
/// let removed: Option<Out<Owned<String>>> = names.erase(0);
/// let same_type: Option<Unlinked<String>> = removed;
/// assert!(same_type.is_none());
/// ```
pub type Out<P> = <P as Words>::Unlinked;

/// An array of entries by `u64` indexes, most of which are absent.
///
/// Reads are wait-free. Writers take turns under a short lock. The [module](super) page has the rules of
/// reservations, marks and iterations.
///
/// ```
/// use radix_ctx::rcu::{self, Owned};
/// use radix_ctx::XArray;
///
/// let blocks = XArray::<Owned<Vec<u8>>>::new();
/// blocks.store(7, Owned::new(vec![1, 2, 3]))?;
///
/// let guard = rcu::pin();
/// let block = blocks.load(7, &guard).unwrap();
/// drop(blocks.erase(7));
/// assert_eq!(block, &[1, 2, 3]); // valid until the guard ends
/// assert!(blocks.load(7, &guard).is_none());
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct XArray<P: Entry> {
    pub(super) tree: Tree<false>,
    /// The lock of all changes. It holds the position of [`alloc_cyclic`](XArray::alloc_cyclic).
    pub(super) lock: WordLock<Cycle>,
    pub(super) counts: Counts,
    /// Makes the array invariant in `P`, because `&self` is enough to store an entry. A covariant array
    /// would lend an entry as a type that it was not stored as.
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
    /// Makes an empty array. Does not allocate.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tree: Tree::new(),
            lock: WordLock::new(Cycle::new()),
            counts: Counts::new(),
            _owns: PhantomData,
        }
    }

    /// Returns the entry at `index`.
    ///
    /// Wait-free: one load for the root and one for each level of nodes. Indexes below 64^n need n levels.
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
        // SAFETY: `guard` is an RCU guard.
        let word = unsafe { self.tree.load(index) };
        if is_none(word) {
            return None;
        }
        // SAFETY: the word is an entry. It was in the array after the guard began, and a removed entry is
        // dropped a grace period after its removal.
        Some(unsafe { P::borrow(word) })
    }

    /// Calls `f` with the entry at `index`, under an RCU guard of this call. Returns `None` without a call
    /// if there is no entry. Wait-free, except for `f`.
    #[inline]
    pub fn with<R>(&self, index: u64, f: impl FnOnce(Ref<'_, P>) -> R) -> Option<R> {
        let guard = rcu::pin();
        self.load(index, &guard).map(f)
    }

    /// Returns whether there is an entry at `index`. Wait-free.
    #[inline]
    pub fn contains(&self, index: u64) -> bool {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        !is_none(unsafe { self.tree.load(index) })
    }

    /// Returns whether the array has neither an entry nor a reservation. Wait-free.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// Checks the invariants of the array. For tests.
    ///
    /// # Panics
    ///
    /// Panics with the first violation.
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
    /// Shows the number of entries. The entries themselves would need a guard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XArray").field("entries", &self.counts.entries()).finish_non_exhaustive()
    }
}

impl<P: Entry> Drop for XArray<P> {
    /// Drops all entries, in ascending order. If one of the drops panics, the remaining entries leak.
    fn drop(&mut self) {
        self.tree.destroy(|_, word| {
            if word != RESERVED {
                // SAFETY: the word is an entry that `destroy` took out once, and readers borrow the array.
                drop(unsafe { P::from_word(word) });
            }
        });
    }
}

/// Returns the first and the last index of a range, or `None` if it is empty.
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
