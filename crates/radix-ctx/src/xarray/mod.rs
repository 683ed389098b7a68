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
