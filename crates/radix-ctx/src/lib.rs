//! From an id to a live context, without a lock on the way: a radix tree of slabs, with two faces.
//!
//! ```
//! use radix_ctx::rcu::{self, Owned};
//! use radix_ctx::{CtxTable, Id, LookupError, XArray};
//!
//! // The table hands out ids, which are never mistaken for another context's.
//! let sessions = CtxTable::new();
//! let id = sessions.insert("alice".to_string())?;
//! let bits = id.to_bits(); // a u64, for a client or a kernel to bring back
//! assert_eq!(sessions.with(id, String::len), Ok(5));
//! sessions.remove(id)?;
//! let bob = sessions.insert("bob".to_string())?;
//! let stale = Id::from_bits(bits).unwrap();
//! assert_eq!(sessions.with(stale, String::len), Err(LookupError::Stale));
//!
//! // The array takes the caller's numbers.
//! let pages = XArray::<Owned<[u8; 512]>>::new();
//! pages.store(7, Owned::new([0; 512]))?;
//! let guard = rcu::pin(); // about a nanosecond; several lookups may share it
//! assert!(pages.load(7, &guard).is_some() && sessions.get(bob, &guard).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to | in a [`CtxTable`] | in an [`XArray`] |
//! |---|---|---|
//! | make one, with limits | [`new`](CtxTable::new), [`builder`](CtxTable::builder) | [`new`](XArray::new) |
//! | put in | [`insert`](CtxTable::insert), [`insert_with`](CtxTable::insert_with), [`insert_in`](CtxTable::insert_in), [`insert_cyclic`](CtxTable::insert_cyclic), [`insert_wait`](CtxTable::insert_wait), [`insert_ref`](CtxTable::insert_ref), or with options [`inserter`](CtxTable::inserter) | [`store`](XArray::store), [`insert`](XArray::insert), [`alloc`](XArray::alloc), [`alloc_cyclic`](XArray::alloc_cyclic), [`compare_exchange`](XArray::compare_exchange) |
//! | keep a place | [`reserve`](CtxTable::reserve) | [`reserve`](XArray::reserve), [`reserve_lowest`](XArray::reserve_lowest) |
//! | read | [`get`](CtxTable::get), [`with`](CtxTable::with), [`contains`](CtxTable::contains) | [`load`](XArray::load), [`with`](XArray::with), [`contains`](XArray::contains) |
//! | hold on to it | [`get_ref`](CtxTable::get_ref): a [`CtxRef`] | |
//! | walk | [`iter`](CtxTable::iter), [`range`](CtxTable::range), [`at_or_after`](CtxTable::at_or_after), [`at_or_before`](CtxTable::at_or_before) | [`iter`](XArray::iter), [`range`](XArray::range), [`next`](XArray::next), [`prev`](XArray::prev) |
//! | search by a bit | | [`set_mark`](XArray::set_mark), [`marked`](XArray::marked) |
//! | take out | [`remove`](CtxTable::remove): a [`Removal`], to wait for or not; [`take`](CtxTable::take): a [`CtxRef`] | [`erase`](XArray::erase), [`erase_range`](XArray::erase_range) |
//! | take all out | [`remove_all`](CtxTable::remove_all), [`begin_remove_all`](CtxTable::begin_remove_all) | [`clear`](XArray::clear) |
//! | have memory, or give it back | [`try_reserve`](CtxTable::try_reserve), [`flush`](CtxTable::flush), [`poll`](CtxTable::poll), [`shrink_to_fit`](CtxTable::shrink_to_fit) | [`try_reserve`](XArray::try_reserve), [`shrink_to_fit`](XArray::shrink_to_fit) |
//! | count | [`len`](CtxTable::len), [`usage`](CtxTable::usage), [`stats`](CtxTable::stats) | [`is_empty`](XArray::is_empty), [`stats`](XArray::stats) |
//!
//! Take a [`CtxTable`] where contexts come and go and others name them: its ids are dense, small, and
//! checked. Take an [`XArray`] where the numbers mean something already. For sparse random numbers
//! (addresses, hashes) take a hash map: about twice as fast there, and much smaller.
//!
//! # Progress
//!
//! | | who waits |
//! |---|---|
//! | reads, and each step of a walk | nobody: wait-free. A load for each six bits of the largest index; no fence, and no store but the guard's, to the thread's own line |
//! | a [`CtxRef`]: taken, cloned, dropped | nobody: wait-free on this CPU's words. The first to a context or its 63 neighbours takes the lock and allocates their counts; the last of a removed context drops it |
//! | [`CtxTable::remove`] | lock-free. Every thousandth or so reclaims what others removed, and one after a pause takes the lock. With a quota, all inserts and removals write one cache line |
//! | whatever else changes a table or an array | writers for each other: a short lock, under which no code of the caller's runs, nor a drop |
//! | what is said to wait (`wait`, `flush`, `remove_all`) | for readers: a grace period; and until references are gone |
//!
//! # Memory
//!
//! A table's contexts lie in slabs of 64, each with a word of its own; an array's entries are a word
//! each, in nodes of 64 (576 bytes). Above them are nodes of 64 again. A slab or node that nothing is
//! in is freed a grace period later; a table keeps one slab, and what `try_reserve` made.
//!
//! A context that was removed is dropped, and its index used again, when no reader is left that may
//! have found it, and no [`CtxRef`]. Many go together, on whichever thread comes to it: one that
//! removes or inserts, polls or flushes, or works for [`rcu`]. Hence `T: Send + Sync +
//! 'static`. In a program that comes to rest they stay until somebody calls [`CtxTable::flush`], or a
//! [`Reclaimer`](crate::rcu::Reclaimer) runs.
//!
//! # Errors
//!
//! A value that is refused comes back in the error, and nothing has changed. Each has `errno()`, and
//! becomes an [`io::Error`](std::io::Error).
//!
//! | errno | [`CtxTable`] | [`XArray`] |
//! |---|---|---|
//! | `EINVAL` | an id that is stale, dead or forged ([`LookupError`]); heavier than all may be; an empty range; removed while waited for | |
//! | `EAGAIN` | the quota ([`InsertRefused::Quota`]) | |
//! | `ENOSPC` | no index left; [`Exhausted`](InsertRefused::Exhausted) says how many come free by themselves | no index left in the range |
//! | `EEXIST` | | present, or reserved |
//! | `ESTALE` | | the reservation is gone |
//! | `ENOMEM` | [`AllocError`] | no memory for a node |
//! | `EDEADLK` | a wait with a guard held, or in a context's drop | |
//! | `ETIMEDOUT` | the time is over | |
//!
//! # What happens when
//!
//! - *A guard is forgotten* (`mem::forget`), or held for long: nothing that is removed from then on is
//!   dropped, in any table or array of the process. Hold guards briefly; a walk can be continued
//!   ([`Iter::next_index`], [`xarray::Iter::next_index`]).
//! - *A [`CtxRef`] is forgotten*: its context stays, and who waits for it waits for ever. A forgotten
//!   [`Reservation`] keeps its index and its place in the quota. A forgotten [`Removal`] is nothing.
//! - *The drop of a context panics*: reclaim goes on, and counts it ([`TableStats::panics`]); the drop
//!   of the last [`CtxRef`] passes it on. That of an array's entry is [`rcu`]'s matter;
//!   the array's own drop passes it on, and leaks what is left.
//! - *The drop of a context uses its table*: it may, no lock is held; it may even drop the table. A
//!   wait for contexts of that table would be for itself, and is refused: [`WaitError::InDrop`].
//! - *The table is dropped* before its [`CtxRef`]s: every context is removed then, and those with
//!   references live until the last one.
//! - *The process forks*: the child may only exec or exit.
//! - *A signal handler* must not call anything here.
//!
//! # Traps
//!
//! - [`remove`](CtxTable::remove) only unpublishes: lookups fail at once, but who found the context
//!   before goes on using it, and its drop comes later. To know when, ask the [`Removal`].
//! - The quota is given back by the removal, not by the drop: a program that holds references to
//!   removed contexts has more in memory than the quota says ([`TableStats::pending`]).
//! - The id of a reservation names nothing until it is committed, and nothing ever if it is dropped;
//!   the next one at that index has another generation.
//! - The same goes for readers: under a guard that stays, each removal and insert takes new memory, and
//!   only [`max_index`](Builder::max_index) bounds that.
//! - A [`CtxRef`] that outlives its table keeps the table's slabs, all of them.
//! - An id means nothing in another table than its own, and there it may name something.
//! - The lowest vacant index is that of contexts which are dropped: after a removal the next insert
//!   takes another one, until readers allowed the first to be reclaimed.
//! - An [`XArray`] has no generations: an index means whatever is there now.
//!
//! # Source
//!
//! The idea is that of a patch for the kernel's asynchronous I/O, "aio: convert the ioctx list to
//! radix tree"; what the kernel took instead, a dense id into an array under RCU, is why a
//! [`CtxTable`] hands out its ids. Generations in handles are older than both. [`xarray`] names its own.

mod table;
mod tree;
pub mod xarray;

pub use percpu::{AllocError, rcu};

pub use self::xarray::XArray;

pub use self::table::{
    Builder, CtxRef, CtxTable, GetRefError, Id, InsertError, InsertRefused, Inserter, Iter,
    LookupError, ParseIdError, Removal, RemovalFuture, RemoveAll, RemoveAllFuture, RemoveError,
    RemovedFuture, Reservation, TableStats, Usage, WaitError,
};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
