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

mod bag;
mod batch;
mod defer;
mod domain;
mod error;
mod patience;
mod pointer;
mod reclaim;
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod reclaimer;
mod registry;
mod send_guard;
mod stats;

pub use self::bag::RetireHead;
pub use self::batch::Batch;
pub use self::defer::{TryDeferError, defer, try_defer};
pub use self::error::{CompareExchangeError, ReclaimError, SynchronizeError, TryNewError};
pub use self::pointer::{Atomic, Owned, Pinned, Unlinked};
pub use self::reclaim::{poll, retire_raw};
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
pub use self::reclaimer::Reclaimer;
#[cfg(any(offlock_loom, offlock_shuttle))]
#[doc(hidden)]
pub use self::registry::end_thread;
pub use self::registry::{Guard, is_pinned, pin, try_pin};
pub use self::send_guard::{SendGuard, pin_send};
pub use self::stats::{Bounds, Stats, bounds, set_bounds, stats};

use self::domain::started;
use crate::error::AllocError;

/// A `const fn`, where the types of the facade allow it: not in a build for a model checker.
macro_rules! const_fn {
    ($(#[$meta:meta])* $vis:vis const unsafe fn $($rest:tt)*) => {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        $(#[$meta])* $vis const unsafe fn $($rest)*
        #[cfg(any(offlock_loom, offlock_shuttle))]
        $(#[$meta])* $vis unsafe fn $($rest)*
    };
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        $(#[$meta])* $vis const fn $($rest)*
        #[cfg(any(offlock_loom, offlock_shuttle))]
        $(#[$meta])* $vis fn $($rest)*
    };
}
use const_fn;

/// Waits until every reader that was inside is gone, of both kinds.
///
/// What was unlinked before is out of reach when it returns. Blocks: spins, yields, then sleeps for
/// up to a millisecond at a time (readers wake nobody up). Never allocates.
///
/// A [`SendGuard`] that the caller itself holds is waited for like any other: for ever.
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: this thread holds a [`Guard`].
///
/// # Examples
///
/// ```
/// use percpu::rcu::{self, SynchronizeError};
///
/// let guard = rcu::pin();
/// assert_eq!(rcu::synchronize(), Err(SynchronizeError::WouldDeadlock));
/// drop(guard);
/// assert_eq!(rcu::synchronize(), Ok(()));
/// ```
pub fn synchronize() -> Result<(), SynchronizeError> {
    if is_pinned() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    started().wait();
    Ok(())
}

/// Waits until everything that was retired or deferred before, by any thread, is dropped.
///
/// Blocks like [`synchronize`], then runs drops on this thread, then waits for those that other
/// threads have begun. What is retired meanwhile is not waited for. Use it before unloading code, or
/// in a test before counting.
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: this thread holds a [`Guard`], or is in the drop of a retired
/// object.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// static RAN: AtomicBool = AtomicBool::new(false);
/// rcu::defer(0, || RAN.store(true, Ordering::Relaxed));
/// rcu::barrier()?;
/// assert!(RAN.load(Ordering::Relaxed));
/// # Ok::<(), rcu::SynchronizeError>(())
/// ```
pub fn barrier() -> Result<(), SynchronizeError> {
    if is_pinned() || registry::is_freeing() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    reclaim::drain(started());
    Ok(())
}

/// A grace period that began at some moment: a cookie to be asked later. From
/// [`start_grace_period`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "ask it with `poll`"]
pub struct GracePeriod {
    target: u64,
}

/// Remembers this moment: once the cookie's [`poll`](GracePeriod::poll) is true, what was unlinked
/// before this call is out of reach of every reader.
///
/// Wait-free, without a shared write or a system call; nothing happens before somebody polls.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
///
/// let guard = rcu::pin();
/// let period = rcu::start_grace_period();
/// assert!(!period.poll(), "this thread is in the way");
/// drop(guard);
/// while !period.poll() { /* do something else */ }
/// ```
pub fn start_grace_period() -> GracePeriod {
    GracePeriod { target: domain::domain().target() }
}

impl GracePeriod {
    /// Whether the grace period is over; moves it on if it is not.
    ///
    /// Never blocks. Costs up to two [`heavy`](crate::fence::heavy) the first time, none while a
    /// reader is in the way, and a load once it is over. Another thread that is at it makes this
    /// return `false`.
    pub fn poll(self) -> bool {
        domain::domain().advance(self.target)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, UnsafeCell};
    use std::panic::{RefUnwindSafe, UnwindSafe};
    use std::sync::MutexGuard;

    use super::*;

    /// Does not compile for a type that is the thing: two impls make `_` ambiguous then.
    macro_rules! assert_not {
        ($type:ty: $thing:path) => {{
            trait Not<A> {
                fn check() {}
            }
            impl<T: ?Sized> Not<()> for T {}
            struct Is;
            impl<T: ?Sized + $thing> Not<Is> for T {}
            let _ = Is;
            <$type as Not<_>>::check();
        }};
    }

    /// What a public type is, to threads.
    #[test]
    fn send_and_sync_are_as_documented() {
        fn both<T: Send + Sync>() {}
        both::<SendGuard>();
        both::<GracePeriod>();
        both::<Atomic<u64>>();
        both::<Owned<u64>>();
        both::<Unlinked<u64>>();
        both::<Batch>();
        both::<RetireHead>();
        both::<Stats>();
        both::<Bounds>();
        both::<SynchronizeError>();
        both::<ReclaimError<u64>>();
        both::<CompareExchangeError<'_, u64>>();

        assert_not!(Guard: Send);
        assert_not!(Guard: Sync);
        assert_not!(Owned<Cell<u8>>: Sync);
        assert_not!(Owned<MutexGuard<'static, u8>>: Send);
        assert_not!(ReclaimError<u64>: Copy);
    }

    /// After a caught panic all is as it was: guards are counts, the pointers are changed at once.
    #[test]
    fn unwinding_leaves_nothing_half_done() {
        fn safe<T: UnwindSafe + RefUnwindSafe>() {}
        safe::<Guard>();
        safe::<SendGuard>();
        safe::<GracePeriod>();
        safe::<Atomic<u64>>();
        safe::<Owned<u64>>();
        safe::<Unlinked<u64>>();

        // Other than in a mutex, what is inside such a value may be seen half changed.
        type Open = AssertSync<UnsafeCell<u8>>;
        assert_not!(Atomic<Open>: UnwindSafe);
        assert_not!(Atomic<Open>: RefUnwindSafe);
        assert_not!(Unlinked<Open>: UnwindSafe);
        assert_not!(Owned<&'static Open>: UnwindSafe);
        assert_not!(Owned<Open>: RefUnwindSafe);
    }

    struct AssertSync<T>(T);
    // SAFETY: no value of it is ever made.
    unsafe impl<T> Sync for AssertSync<T> {}

    /// An owned value is covariant, like a box.
    #[test]
    fn owned_is_covariant() {
        fn shorter<'a>(long: Owned<&'static str>) -> Owned<&'a str> {
            long
        }
        assert_eq!(*shorter(Owned::new("value")), "value");
    }
}
