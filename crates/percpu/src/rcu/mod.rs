//! Read-copy-update (RCU): wait-free readers, and memory that is freed after they leave.
//!
//! A reader calls [`pin`], follows an [`Atomic`] pointer and uses the value for as long as its
//! guard lives. A reader writes only to a cache line of its thread. A writer
//! replaces the value and retires the old version. The old version is dropped once every reader
//! that may hold a reference to it has dropped its guard.
//!
//! ```
//! use offlock_percpu::rcu::{self, Atomic, Owned};
//!
//! let route = Atomic::new("via 10.0.0.1".to_string());
//!
//! let guard = rcu::pin(); // about a nanosecond: no lock, no fence
//! let seen = route.load(&guard);
//! route.store(Owned::new("via 10.0.0.2".to_string())); // retires the first value
//! assert_eq!(seen, "via 10.0.0.1"); // stays valid until the guard drops
//! drop(guard);
//!
//! rcu::poll(); // drops the values retired so far, as no reader is left
//! ```
//!
//! A writer waits for readers in one of three ways, from the cheapest to the most expensive:
//!
//! | | blocks | allocates |
//! |---|---|---|
//! | [`Unlinked::retire`], or dropping the [`Unlinked`]; [`poll`] | never | once in the process |
//! | [`start_grace_period`] and [`GracePeriod::poll`] | never | never |
//! | [`synchronize`] | until the readers have left | never |
//!
//! A process has one RCU domain. So a reader delays the drop of every object that is retired after
//! the reader pinned, in any data structure. It never delays the thread that retires. [`stats`]
//! shows how many bytes wait to be freed. Retired objects are dropped in batches, on the thread
//! that fills a batch or calls [`poll`]: up to 1,024 objects, or 2 MiB, wait on each CPU for their
//! batch to fill. Only [`retire_raw`] is told what an object owns beside its own bytes: 1,023 vectors
//! of a megabyte may wait. A program that retires rarely, or large values, calls [`poll`] itself. The
//! order in which retired objects are dropped is not specified.
//!
//! # Special cases
//!
//! - *The drop of a retired object panics*: the panic hook runs, the panic goes no
//!   further, and the rest of the batch is dropped. Such a drop runs without any lock of
//!   this module. It may pin, retire and poll; a poll inside a drop drops nothing, so drops do not
//!   recurse.
//! - *The process ends* (`main` returns, or `exit`): retired objects that are not dropped yet stay
//!   so, like any `static`. A [`poll`] at the end of `main` drops those that no reader can reach.
//!
//! # Source
//!
//! The thread guard follows the asymmetric-fence variant of epoch-based reclamation (Desnoyers,
//! McKenney, Stern, Dagenais, Walpole: "User-Level Implementations of Read-Copy Update", IEEE TPDS
//! 2012, the memory-barrier flavour with the barrier moved to the writer). The segmented
//! lists of retired objects are the kernel's segmented callback lists, in which each segment waits
//! for one grace period. One thing differs: a target is computed without a shared write.

mod atomic;
mod bags;
mod domain;
mod retire;

pub use self::atomic::{Atomic, Owned, Unlinked};
pub use self::bags::RetireHead;
#[cfg(offlock_model)]
#[doc(hidden)]
pub use self::domain::end_thread;
pub use self::domain::{GracePeriod, SynchronizeError, start_grace_period, synchronize};
pub use self::domain::{Guard, is_pinned, pin};
pub use self::retire::{Batch, Stats, poll, retire_raw, stats};
