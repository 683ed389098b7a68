//! Arrays of entries by `u64` indexes that the program chooses: [`XArray`] and its types.
//!
//! ```
//! use radix_ctx::rcu::{self, Owned};
//! use radix_ctx::XArray;
//!
//! let pages = XArray::<Owned<String>>::new();
//! pages.store(7, Owned::new("seven".to_string()))?;
//! let lowest = pages.alloc(.., Owned::new("zero".to_string()))?; // the lowest free index
//! assert_eq!(lowest, 0);
//!
//! let guard = rcu::pin(); // about a nanosecond: no lock and no fence
//! assert_eq!(pages.load(7, &guard).map(String::as_str), Some("seven"));
//! let all: Vec<u64> = pages.iter(&guard).map(|(index, _)| index).collect();
//! assert_eq!(all, [0, 7]);
//! drop(guard);
//!
//! drop(pages.erase(7)); // the string is dropped after its last reader has left
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! | operations | progress | allocates |
//! |---|---|---|
//! | `load`, `with`, `contains`, `is_empty`, `is_marked`, `any_marked`, neighbours, each step of an iteration | wait-free | no |
//! | all others | writers take turns under a short lock | nodes, if an index needs new ones and [`try_reserve`](XArray::try_reserve) has not made them |
//!
//! An [`Entry`] is one word: an [`Owned`](crate::rcu::Owned) box, a [`Value`] in the word itself, or a
//! `&'static T`. No code of the program, and no drop of an entry, runs under the lock.
//!
//! An index can be *reserved*. A reserved index reads as absent, but no other insert gets it, and a later
//! entry there needs no memory. [`Reservation`] is the guard of such an index.
//!
//! Each entry has three [`Mark`]s, and searches can select the entries with a mark. The program gives the
//! marks their meaning: dirty, in use, in writeback. An entry that replaces another one keeps its marks.
//! The removal of an entry clears them.
//!
//! # What it is not for
//!
//! - *Sparse random indexes* (addresses, hashes): each entry then needs up to ten nodes of 576 bytes. A
//!   hash map is twice as fast for them, and much smaller. Dense indexes, at any offset, take less than 10
//!   bytes per [`Value`].
//! - *Ids whose reuse must be noticed*: after an erase, the same index can name the next entry. The ids of
//!   a [`CtxTable`](crate::CtxTable) have generations.
//! - *Entries that cover a range of indexes*, which the kernel's XArray has, do not exist here.
//!
//! # Iteration
//!
//! An iteration is ascending and weakly consistent. An entry that is present throughout is returned once.
//! An entry that is stored or erased meanwhile may be returned or not. To pause, remember
//! [`Iter::next_index`] and drop the guard. A [`range`](XArray::range) from that index continues the
//! iteration under another guard.
//!
//! # What happens when
//!
//! - *There is no memory for a node*: the error returns the entry, and the array has not changed.
//! - *The array is dropped*: its entries are dropped in the same call. No reader is left, because a reader
//!   borrows the array.
//! - *A signal handler* must not call anything here.
//!
//! # Source
//!
//! The semantics are those of the kernel's XArray (`lib/xarray.c` of Linux 6.6 and its documentation),
//! except: `insert`, `alloc` and `store` all refuse a reserved index, and `erase` ignores it; the cyclic
//! allocation that wraps is the one that reports the wrap; errors are typed and return the entry; there
//! is one kind of lock.

mod alloc;
mod array;
mod counts;
mod cycle;
mod entry;
mod error;
mod iter;
mod marks;
mod reserve;
mod stats;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod write;

pub use self::array::{Out, Ref, XArray};
pub use self::cycle::{Allocation, Cycle};
pub use self::entry::{Entry, Value};
pub use self::error::{
    AllocateError, CommitError, CompareExchangeError, CompareExchangeReason, InsertError,
    ReserveError, StoreError,
};
pub use self::iter::Iter;
pub use self::marks::Mark;
pub use self::reserve::Reservation;
pub use self::stats::Stats;
