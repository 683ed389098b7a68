//! Entries by the caller's own indices.
//!
//! ```
//! use radix_ctx::rcu::{self, Owned};
//! use radix_ctx::XArray;
//!
//! let pages = XArray::<Owned<String>>::new();
//! pages.store(7, Owned::new("seven".to_string()))?;
//! let id = pages.alloc(.., Owned::new("zero".to_string()))?; // the lowest free index
//! assert_eq!(id, 0);
//!
//! let guard = rcu::pin(); // about a nanosecond: no lock, no fence
//! assert_eq!(pages.load(7, &guard).map(String::as_str), Some("seven"));
//! let all: Vec<u64> = pages.iter(&guard).map(|(index, _)| index).collect();
//! assert_eq!(all, [0, 7]);
//! drop(guard);
//!
//! drop(pages.erase(7)); // dropped when no reader can have it
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! | | who waits | allocates |
//! |---|---|---|
//! | load, contains, marks asked, next, previous, iteration | nobody: wait-free | no |
//! | everything that changes the array, and `next_free` | writers for each other: a short lock | nodes, when an index is new; never under [`try_reserve`](XArray::try_reserve) |
//!
//! An index is any `u64`. An [`Entry`] is a word: an [`Owned`](crate::rcu::Owned) box, a [`Value`] in
//! the word itself, or a `&'static T`. No code of the caller's runs under the lock, nor a drop.
//!
//! An index can be *reserved*: it reads as absent, but nobody else gets it, and what is stored there
//! later needs no memory. [`Reservation`] is the guard for that.
//!
//! Each entry has three [`Mark`]s, by which to search: dirty, in use, towards the disk, as the caller
//! likes. An entry stored in the place of another keeps them; an erased one takes them along.
//!
//! # What it is not for
//!
//! - *Sparse random indices* (addresses, hashes): every entry then has up to ten nodes of 576 bytes of
//!   its own. A hash map is twice as fast there, and much smaller. Dense indices, wherever they begin,
//!   take less than 10 bytes per [`Value`].
//! - *Ids whose reuse must be noticed*: an erased index means nothing, and then its next entry.
//!   [`CtxTable`](crate::CtxTable) has generations.
//! - Entries that cover a range of indices, as the kernel's XArray has, are left out.
//!
//! # Iteration
//!
//! Ascending and weakly consistent: what is present throughout is seen once; what comes or goes
//! meanwhile may be seen or not. To pause, remember [`Iter::next_index`], and go on by
//! [`range`](XArray::range) from there, with another guard.
//!
//! # What happens when
//!
//! - *Out of memory*: an error with what was refused; the array is as before.
//! - *The array is dropped*: all entries are, at once; nobody can be reading, since a reader borrows it.
//! - *A signal handler* must not call anything here.
//!
//! # Source
//!
//! Semantics follow the kernel's XArray (`lib/xarray.c` of Linux 6.6, its documentation). Changed:
//! reservations are refused to `insert`, to `alloc` and to `store` alike, and left alone by `erase`;
//! a wrap of the cyclic allocation is reported by the very allocation that wrapped; errors are typed
//! and give back; one lock flavour.

mod alloc;
mod entry;
mod error;
mod iter;
mod marks;
mod reserve;
mod stats;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod write;

pub use self::alloc::{Allocation, Cycle};
pub use self::entry::{Entry, Value};
pub use self::error::{
    AllocateError, CommitError, CompareExchangeError, CompareExchangeErrorKind, InsertError,
    ReserveError, StoreError,
};
pub use self::iter::Iter;
pub use self::marks::Mark;
pub use self::reserve::Reservation;
pub use self::stats::Stats;

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use percpu::rcu::{self, Pinned};
use percpu::sync::WordLock;

use self::entry::{RESERVED, Words, is_none};
use self::stats::Counts;
use crate::tree::Tree;

/// What an [`XArray`] gives its readers: `&T` of an [`Owned<T>`](crate::rcu::Owned), else the entry.
pub type Ref<'g, P> = <P as Words>::Ref<'g>;

/// What comes out of an [`XArray`]: [`Unlinked<T>`](crate::rcu::Unlinked) of an
/// [`Owned<T>`](crate::rcu::Owned), else the entry.
pub type Out<P> = <P as Words>::Unlinked;

/// An array of entries by `u64` indices, most of which are absent. See the [module](self).
pub struct XArray<P: Entry> {
    tree: Tree<false>,
    /// Over all changes; in it what `alloc_cyclic` remembers.
    lock: WordLock<Cycle>,
    counts: Counts,
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
fn bounds(range: impl RangeBounds<u64>) -> Option<(u64, u64)> {
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
