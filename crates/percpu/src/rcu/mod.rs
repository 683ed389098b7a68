//! Read-copy-update: readers that never wait, memory that waits for them.
//!
//! A reader [`pin`]s, follows an [`Atomic`] pointer and uses what it finds for as long as its guard
//! lives; it writes nothing that another thread reads often. A writer puts a new version in the
//! place of the old one and retires that: it is dropped once every reader that may have seen it is
//! gone.
//!
//! ```
//! use percpu::rcu::{self, Atomic, Owned};
//!
//! let route = Atomic::new("via 10.0.0.1".to_string());
//!
//! let guard = rcu::pin(); // about a nanosecond: no lock, no fence
//! let seen = route.load(&guard);
//! route.store(Owned::new("via 10.0.0.2".to_string())); // retires the first
//! assert_eq!(seen, "via 10.0.0.1"); // which stays, as long as the guard
//! drop(guard);
//!
//! rcu::barrier().unwrap(); // what was retired before is dropped now
//! ```
//!
//! | | guard | cost | may change threads |
//! |---|---|---|---|
//! | [`pin`] | [`Guard`] | two stores to this thread's own line | no |
//! | [`pin_send`] | [`SendGuard`] | two per-CPU additions | yes: lives across `.await` |
//!
//! Writers have four ways to wait, from the cheapest:
//!
//! | | blocks | allocates |
//! |---|---|---|
//! | [`Unlinked::retire`], or just dropping it | never | never |
//! | [`defer`] a closure | never | a node |
//! | [`start_grace_period`] and [`GracePeriod::poll`] | never | never |
//! | [`synchronize`], [`Unlinked::reclaim`], [`barrier`] | until readers are gone | never |
//!
//! There is one domain per process: a reader holds up everything that is retired after it came, of
//! whatever structure. It never holds up the *thread* that retires, only the memory: [`stats`] shows
//! how much, and since when. Retired objects are dropped in batches, on whichever thread happens to
//! fill one or calls [`poll`]; [`set_bounds`] says how many bytes, and how long, may wait for
//! company, and a [`Reclaimer`] thread keeps the time even if nobody retires or polls. In which order
//! retired objects are dropped, and deferred closures run, is not specified.
//!
//! # What happens when
//!
//! - *A drop of a retired object panics*: the panic hook runs, the panic stops there, it is counted in
//!   [`Stats::panics`], and the rest of the batch goes on. Such a drop holds no lock of this module
//!   and may pin, retire, and poll (which drops nothing then: no recursion).
//! - *The process ends* (`main` returns, or `exit`): what waits is not dropped, as with any `static`;
//!   a [`barrier`] at the end of `main` sees to it.
//! - *A thread ends inside a guard* (one in a thread-local variable): the guard holds until it drops.
//! - *A guard is forgotten* (`mem::forget`): the reader never leaves; memory grows; nothing else.
//! - *A signal handler* must not call anything here.
//!
//! # Source
//!
//! The thread guard follows the asymmetric-fence variant of epoch-based reclamation (Desnoyers,
//! McKenney, Stern, Dagenais, Walpole: "User-Level Implementations of Read-Copy Update", IEEE TPDS
//! 2012, the memory-barrier flavour with the barrier moved to the writer); the `Send` guard is
//! sleepable RCU with its two pairs of counters (McKenney, "Sleepable Read-Copy Update", 2006, as
//! reworked in Linux 4.12), here with rseq sections for the counts; segments of what waits, each
//! with the grace period it waits for, are those of the kernel's callback lists. Changed: targets are
//! taken without a shared write, and both kinds of readers answer to one number.

mod atomic;
mod backoff;
mod bag;
mod bags;
mod batch;
mod bounds;
mod const_fn;
mod defer;
mod domain;
mod error;
mod grace_period;
mod guard;
mod in_flight;
mod owned;
mod reclaim;
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod reclaimer;
mod registry;
mod send_guard;
mod send_readers;
mod spin_lock;
mod stats;
mod unlinked;

pub use self::atomic::{Atomic, CompareExchangeError, Pinned};
pub use self::bag::RetireHead;
pub use self::batch::Batch;
pub use self::bounds::Bounds;
pub use self::defer::{TryDeferError, defer, try_defer};
pub use self::error::{SynchronizeError, TryNewError};
pub use self::grace_period::{GracePeriod, barrier, start_grace_period, synchronize};
#[cfg(any(offlock_loom, offlock_shuttle))]
#[doc(hidden)]
pub use self::guard::end_thread;
pub use self::guard::{Guard, is_pinned, pin, try_pin};
pub use self::owned::Owned;
pub use self::reclaim::{poll, retire_raw};
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
pub use self::reclaimer::Reclaimer;
pub use self::send_guard::{SendGuard, pin_send};
pub use self::stats::{Stats, bounds, set_bounds, stats};
pub use self::unlinked::{ReclaimError, Unlinked};

#[cfg(test)]
mod tests;
