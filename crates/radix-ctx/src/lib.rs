//! Maps from ids to objects that are read without a lock: [`CtxTable`], which assigns ids and detects
//! stale ones, and [`XArray`], for numbers that the program chooses.
//!
//! ```
//! use radix_ctx::rcu::{self, Owned};
//! use radix_ctx::{CtxTable, Id, LookupError, XArray};
//!
//! // A table assigns ids. An id never names two contexts.
//! let sessions = CtxTable::new();
//! let id = sessions.insert("alice".to_string())?;
//! let bits = id.to_bits(); // a u64, for a client or the kernel to bring back
//! assert_eq!(sessions.with(id, String::len), Ok(5));
//! sessions.remove(id)?;
//! let bob = sessions.insert("bob".to_string())?;
//! let stale = Id::from_bits(bits).unwrap();
//! assert_eq!(sessions.with(stale, String::len), Err(LookupError::Stale));
//!
//! // An array takes the program's numbers.
//! let pages = XArray::<Owned<[u8; 512]>>::new();
//! pages.store(7, Owned::new([0; 512]))?;
//! let guard = rcu::pin(); // about a nanosecond; several lookups may share it
//! assert!(pages.load(7, &guard).is_some() && sessions.get(bob, &guard).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The [`guide`] explains generations and lookups without a lock with a picture.
//!
//! # Choosing
//!
//! | job | type |
//! |---|---|
//! | objects come and go, and clients, requests or the kernel name them: sessions, connections, I/O in flight | [`CtxTable`]: dense ids with a generation, and values of any size in slabs |
//! | objects have numbers already: blocks of a file, pages, slots, ids of another system | [`XArray`] of [`Owned<T>`](rcu::Owned) |
//! | small numbers or references to static objects by number | [`XArray`] of [`Value`](xarray::Value) or `&'static T` |
//! | find the numbers with a property: dirty, in use, in writeback | [`XArray`] with [`Mark`](xarray::Mark)s |
//! | keep an object across `.await`, or pass it to another thread | [`CtxRef`], from [`CtxTable::get_ref`] |
//! | know when the last user of a removed object has left | [`Removal`], from [`CtxTable::remove`] |
//! | fill a place later, when the object is ready | [`Reservation`], [`xarray::Reservation`] |
//! | replace one object that all threads read | [`rcu::Atomic`], without an index |
//! | sparse random numbers: addresses, hashes | a hash map, which is about twice as fast for them and much smaller |
//! | objects that one thread uses | a `Vec` or a slab, which need no guard |
//!
//! # Operations
//!
//! | purpose | [`CtxTable`] | [`XArray`] |
//! |---|---|---|
//! | create | [`new`](CtxTable::new), [`builder`](CtxTable::builder) for limits | [`new`](XArray::new) |
//! | insert | [`insert`](CtxTable::insert), [`insert_with`](CtxTable::insert_with), [`insert_in`](CtxTable::insert_in), [`insert_cyclic`](CtxTable::insert_cyclic), [`insert_wait`](CtxTable::insert_wait), [`insert_ref`](CtxTable::insert_ref), or with options [`inserter`](CtxTable::inserter) | [`store`](XArray::store), [`insert`](XArray::insert), [`alloc`](XArray::alloc), [`alloc_cyclic`](XArray::alloc_cyclic), [`compare_exchange`](XArray::compare_exchange) |
//! | reserve | [`reserve`](CtxTable::reserve) | [`reserve`](XArray::reserve), [`reserve_lowest`](XArray::reserve_lowest) |
//! | read | [`get`](CtxTable::get), [`with`](CtxTable::with), [`contains`](CtxTable::contains) | [`load`](XArray::load), [`with`](XArray::with), [`contains`](XArray::contains) |
//! | take a counted reference | [`get_ref`](CtxTable::get_ref) | |
//! | iterate | [`iter`](CtxTable::iter), [`range`](CtxTable::range), [`at_or_after`](CtxTable::at_or_after), [`at_or_before`](CtxTable::at_or_before) | [`iter`](XArray::iter), [`range`](XArray::range), [`next`](XArray::next), [`prev`](XArray::prev) |
//! | mark and search | | [`set_mark`](XArray::set_mark), [`marked`](XArray::marked) |
//! | remove | [`remove`](CtxTable::remove), [`take`](CtxTable::take) | [`erase`](XArray::erase), [`erase_range`](XArray::erase_range) |
//! | get a removed context by value | [`CtxRef::try_unwrap`], after [`flush`](CtxTable::flush) or [`poll`](CtxTable::poll) | |
//! | remove all | [`remove_all`](CtxTable::remove_all), [`begin_remove_all`](CtxTable::begin_remove_all); [`close`](CtxTable::close) before it to refuse inserts | [`clear`](XArray::clear) |
//! | allocate in advance, free memory | [`try_reserve`](CtxTable::try_reserve), [`flush`](CtxTable::flush), [`poll`](CtxTable::poll), [`shrink_to_fit`](CtxTable::shrink_to_fit) | [`try_reserve`](XArray::try_reserve), [`shrink_to_fit`](XArray::shrink_to_fit) |
//! | count | [`len`](CtxTable::len), [`usage`](CtxTable::usage), [`stats`](CtxTable::stats) | [`is_empty`](XArray::is_empty), [`stats`](XArray::stats) |
//!
//! # Progress
//!
//! | operation | progress |
//! |---|---|
//! | a read, a step of an iteration | wait-free: one load for each six bits of the largest index. No fence. The only store is that of the guard, to a cache line of the thread |
//! | take, clone or drop a [`CtxRef`] | wait-free on memory of this CPU. The first reference to one of 64 neighbouring contexts takes the lock and allocates their counts. The last reference to a removed context drops it |
//! | [`CtxTable::remove`] | lock-free, except that about one call in a thousand, and the first call after a pause, takes the lock and reclaims removed contexts. In a table with limits, all inserts and removals write one cache line |
//! | any other change of a table or an array | writers take turns under a short lock. No code of the program and no drop runs under it |
//! | `wait`, `flush`, `remove_all` | blocks for a grace period, and until references are dropped. `.await` of a [`Removal`] or a [`RemoveAll`] does not block |
//!
//! # Memory
//!
//! The contexts of a table lie in slabs of 64, beside a word for each. The entries of an array are words
//! in nodes of 64 (576 bytes). Nodes of the same size are above the slabs and above the nodes. An empty
//! slab or node is freed a grace period later. A table keeps one empty slab, and those that `try_reserve`
//! made.
//!
//! A removed context is dropped, and its index becomes vacant, when no reader that could have found it and
//! no [`CtxRef`] is left. Reclaim drops many contexts together, on any thread that removes, inserts,
//! polls, flushes or works for [`rcu`]. While a task awaits a drop, a thread
//! `radix-ctx-timer` wakes it for each poll. Therefore `T` is `Send + Sync + 'static`. In a program that comes
//! to rest, removed contexts stay until a call of [`CtxTable::flush`], or until
//! [`rcu::poll`] is called repeatedly.
//!
//! # Errors
//!
//! An error returns the value that was refused, and the call has changed nothing. Each error has an
//! `errno()` and converts into an [`io::Error`](std::io::Error).
//!
//! | errno | [`CtxTable`] | [`XArray`] |
//! |---|---|---|
//! | `EINVAL` | an id that is stale or not of this table ([`LookupError`]); a weight above the limit of the sum ([`InsertRefused::TooHeavy`]); an empty range; a context that is removed during a wait | |
//! | `EAGAIN` | the limits are reached ([`InsertRefused::Quota`]) | `compare_exchange` found another entry |
//! | `ENOSPC` | no index is vacant ([`InsertRefused::Exhausted`], with the number of indexes that become vacant later) | no index of the range is free |
//! | `EEXIST` | | the index has an entry or is reserved |
//! | `ESTALE` | | the index is not reserved any more |
//! | `ENOMEM` | no memory ([`AllocError`]) | no memory for a node |
//! | `ESHUTDOWN` | the table is closed ([`InsertRefused::Closed`]) | |
//! | `EDEADLK` | a wait with a guard held, or in the drop of a context | |
//! | `ETIMEDOUT` | the timeout of a wait has passed | |
//!
//! # What happens when
//!
//! - *A guard is forgotten* (`mem::forget`), or held for long: no object that is removed from then on is
//!   dropped, in any table or array of the process. Hold guards briefly. A long iteration can continue
//!   under a new guard ([`Iter::next_index`], [`xarray::Iter::next_index`]).
//! - *A [`CtxRef`] is forgotten*: its context stays, and waits for its drop never end. A forgotten
//!   [`Reservation`] keeps its index and its place in the limits. A [`Removal`] may be forgotten.
//! - *The drop of a context panics*: reclaim catches the panic, counts it ([`TableStats::panics`]) and goes
//!   on. The drop of the last [`CtxRef`] passes the panic on.
//! - *The drop of an array's entry panics*: [`rcu`] says what happens. The drop of the array passes the
//!   panic on, and the remaining entries leak.
//! - *The drop of a context uses its table*: it may call any operation, because no lock is held, and may
//!   even drop the table. A wait for contexts of that table would wait for itself, and is refused
//!   ([`WaitError::InDrop`]).
//! - *The table is dropped before its [`CtxRef`]s*: every context is removed. A context with references
//!   is dropped by the last one.
//! - *A task awaits a drop, or an insert waits, while the program itself holds a [`CtxRef`]* of the context:
//!   the wait does not end. The future may be dropped at any time.
//! - *The process forks*: the child may only exec or exit.
//! - *A signal handler* must not call anything here.
//!
//! # Traps
//!
//! - [`remove`](CtxTable::remove) makes lookups fail at once, but threads that found the context before
//!   go on using it, and its drop comes later. The [`Removal`] knows when.
//! - A removal reduces the use of the limits at once, before the drop. A program that holds references to
//!   removed contexts has more contexts in memory than the limit ([`TableStats::pending`]).
//! - While a guard is held, each removal and insert takes more memory. Only
//!   [`max_index`](Builder::max_index) limits that.
//! - The id of a dropped reservation never names a context. The next id at its index has another
//!   generation.
//! - A [`CtxRef`] that outlives its table keeps all slabs of the table.
//! - An id of one table may name a context of another table.
//! - The lowest vacant index is not always that of the last removal. An index becomes vacant when its
//!   context is dropped.
//! - An [`XArray`] has no generations: an index names the entry that it has now.
//!
//! # Source
//!
//! The idea is that of a patch for the kernel's asynchronous I/O, "aio: convert the ioctx list to radix
//! tree". The kernel took another solution, a dense id into an array under RCU. For the same reason a
//! [`CtxTable`] assigns its ids. Generations in handles are older than both. The page of [`xarray`] names
//! its own source.

#[cfg(doc)]
pub mod guide;
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
