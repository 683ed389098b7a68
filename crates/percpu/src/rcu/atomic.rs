//! Pointers that readers follow without a lock, and the three states of what they lead to.
//!
//! ```text
//!            Atomic::swap                       retire, or drop
//!   Owned -----------------> shared -> Unlinked -----------------> freed after a grace period
//!     ^                                   |
//!     +------------ reclaim --------------+     waits for the grace period itself
//! ```
//!
//! Safe throughout, because an [`Owned`] is unique: it can be in one [`Atomic`] only, and whoever
//! swaps it out is the only one who can retire it. The node carries the two words that retiring
//! needs, so that retiring never allocates and cannot fail:
//!
//! ```text
//!   Owned, Atomic, Unlinked -> | next, free: 16 bytes | T |
//! ```
//!
//! # Invariants
//!
//! 1. A node is owned by one `Owned`, one `Unlinked`, or is in one `Atomic`.
//! 2. A node that was in an `Atomic` is freed (or changed) only after a grace period, or by who has
//!    the `Atomic` exclusively: no `&T` from `load` outlives the borrow of either.

use std::error::Error;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use super::error::TryNewError;
use super::guard::{Guard, pin};
use super::owned::{Node, Owned};
use super::send_guard::SendGuard;
use super::unlinked::Unlinked;
use crate::sync::atomic::{AtomicPtr, Ordering};
use crate::sync::mutant;
use crate::sync::quarantine::Watched;

/// A proof that the calling code reads: [`Guard`] or [`SendGuard`]. Sealed.
pub trait Pinned: sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Guard {}
impl Pinned for Guard {}
impl sealed::Sealed for SendGuard {}
impl Pinned for SendGuard {}

/// A pointer to a `T` that readers follow without a lock.
///
/// It always points to a value: where there may be none, `T` is an `Option`. There may be many
/// writers: [`update`](Atomic::update) loses no change of another writer, [`store`](Atomic::store)
/// overwrites it. Dropping the `Atomic` frees the value at once: no reference to it is left, as
/// [`load`](Atomic::load) borrows the `Atomic`.
///
/// # Examples
///
/// ```
/// use percpu::rcu::{self, Atomic, Owned};
///
/// let config = Atomic::new("old");
/// std::thread::scope(|s| {
///     s.spawn(|| {
///         let guard = rcu::pin();
///         let seen = config.load(&guard);
///         assert!(*seen == "old" || *seen == "new"); // and stays what it is
///     });
///     config.store(Owned::new("new")); // "old" is dropped once no reader has it
/// });
/// ```
///
/// A reference does not outlive the guard, nor the `Atomic`:
///
/// ```compile_fail
/// # use percpu::rcu::{self, Atomic};
/// let shared = Atomic::new(7);
/// let seen = { let guard = rcu::pin(); shared.load(&guard) };
/// println!("{seen:?}");
/// ```
///
/// ```compile_fail
/// # use percpu::rcu::{self, Atomic};
/// let guard = rcu::pin();
/// let shared = Atomic::new(7);
/// let seen = shared.load(&guard);
/// drop(shared);
/// println!("{seen:?}");
/// ```
pub struct Atomic<T: Send + Sync + 'static> {
    /// From [`Owned::into_node_ptr`], so never null.
    node: AtomicPtr<Watched<Node<T>>>,
    _owns: PhantomData<Owned<T>>,
}

// As `Arc<T>`: gives `&T` to many. What it does itself does not panic half-way.
impl<T: Send + Sync + RefUnwindSafe + 'static> UnwindSafe for Atomic<T> {}
impl<T: Send + Sync + RefUnwindSafe + 'static> RefUnwindSafe for Atomic<T> {}

impl<T: Send + Sync + 'static> fmt::Debug for Atomic<T> {
    /// Without the value: to show it needs a guard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Atomic").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Atomic<T> {
    /// Points to a new node with `value`. Aborts if there is no memory for it.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from(Owned::new(value))
    }

    /// [`Atomic::new`], where lack of memory is an error.
    ///
    /// # Errors
    ///
    /// [`TryNewError`] gives the value back.
    pub fn try_new(value: T) -> Result<Self, TryNewError<T>> {
        Owned::try_new(value).map(Self::from)
    }

    /// Returns the value. Wait-free: one load.
    ///
    /// The reference lives as long as both the guard and the `Atomic` are borrowed.
    #[inline]
    pub fn load<'g>(&'g self, guard: &'g impl Pinned) -> &'g T {
        let _ = guard;
        // Ordering: Acquire pairs with the AcqRel of `swap` and `compare_exchange`; it carries
        // the node.
        let node = self.node.load(Ordering::Acquire);
        // SAFETY: never null, and in this `Atomic` after the guard began; it is freed only a grace
        // period after it is unlinked, and the guard holds that up (invariant 2).
        let node = unsafe { &*node };
        &node.value
    }

    /// Puts `new` in the place of the value, and returns the old one.
    ///
    /// Wait-free: one exchange.
    #[inline]
    pub fn swap(&self, new: Owned<T>) -> Unlinked<T> {
        let order =
            if mutant("rcu-publish-relaxed") { Ordering::Acquire } else { Ordering::AcqRel };
        // Ordering: Release pairs with the Acquire in `load`; it carries the new node. Acquire
        // pairs with the Release of the exchange that put the old one in; it carries that.
        let old = self.node.swap(new.into_node_ptr().as_ptr(), order);
        // SAFETY: it was in this `Atomic`, and this exchange took it out.
        unsafe { Unlinked::new(old) }
    }

    /// Puts `new` in the place of the value, and retires the old one.
    ///
    /// Lock-free. May run the drops of objects retired before: see [`Unlinked::retire`].
    #[inline]
    pub fn store(&self, new: Owned<T>) {
        drop(self.swap(new));
    }

    /// Replaces the value by what `f` makes of it, and retires the old one.
    ///
    /// If another writer comes first, `f` is called again, with its value: no update is lost.
    /// Lock-free. `f` runs as a reader, on a [`pin`]ned thread: it must not wait for a grace period. If
    /// it panics the value stays as it is. Aborts if there is no memory for the new node, as
    /// `Box::new`.
    ///
    /// # Examples
    ///
    /// ```
    /// use percpu::rcu::{self, Atomic};
    ///
    /// let routes = Atomic::new(vec!["10.0.0.1"]);
    /// std::thread::scope(|s| {
    ///     for route in ["10.0.0.2", "10.0.0.3"] {
    ///         let routes = &routes;
    ///         s.spawn(move || routes.update(|old| [old.as_slice(), &[route]].concat()));
    ///     }
    /// });
    /// assert_eq!(routes.load(&rcu::pin()).len(), 3);
    /// ```
    pub fn update(&self, mut f: impl FnMut(&T) -> T) {
        let guard = pin();
        let mut current = self.load(&guard);
        let mut new = Owned::new(f(current));
        if mutant("rcu-update-ignores-other-writers") {
            return self.store(new);
        }
        while let Err(error) = self.compare_exchange(current, new, &guard) {
            current = error.current;
            new = error.new;
            *new = f(current);
        }
    }

    /// Puts `new` in if the pointer still leads to `current`, and returns the old value.
    ///
    /// `current` is told by its address, not its value. A reference from [`load`](Atomic::load)
    /// cannot be the address of another object by then, as it keeps its own alive. Lock-free.
    ///
    /// # Errors
    ///
    /// [`CompareExchangeError`] has what the pointer leads to instead, and gives `new` back.
    #[inline]
    pub fn compare_exchange<'g>(
        &'g self,
        current: &T,
        new: Owned<T>,
        guard: &'g impl Pinned,
    ) -> Result<Unlinked<T>, CompareExchangeError<'g, T>> {
        let _ = guard;
        // Ordering: Acquire pairs with the AcqRel of `swap` and of the exchange below; it carries
        // the node, of which the error lends the value.
        let mut found = self.node.load(Ordering::Acquire);
        let new = new.into_node_ptr();
        loop {
            // SAFETY: as in `load`: never null, and held up by the guard.
            let node = unsafe { &*found };
            let value = &node.value;
            if !ptr::eq(value, current) {
                // `new` was published to no thread.
                let new = Owned::from_node_ptr(new);
                return Err(CompareExchangeError { current: value, new });
            }
            // Ordering: AcqRel as in `swap`. Acquire on failure, as the load above.
            let exchanged = self.node.compare_exchange(
                found,
                new.as_ptr(),
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match exchanged {
                // SAFETY: it was in this `Atomic`, and this exchange took it out.
                Ok(old) => return Ok(unsafe { Unlinked::new(old) }),
                Err(other) => found = other,
            }
        }
    }

    /// Returns the value, which no reader can reach meanwhile.
    pub fn get_mut(&mut self) -> &mut T {
        // Ordering: Relaxed; `&mut self` orders it.
        let node = self.node.load(Ordering::Relaxed);
        // SAFETY: never null, and in this `Atomic`, which is ours: no `&T` outlives a borrow of it
        // (invariant 2).
        let node = unsafe { &mut *node };
        &mut node.value
    }

    /// Returns the value as an owned node: no reader can reach it.
    #[must_use]
    pub fn into_inner(self) -> Owned<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, nor used again.
        unsafe { this.take() }
    }

    /// # Safety
    ///
    /// The caller does not use the `Atomic` again, nor drops it.
    unsafe fn take(&mut self) -> Owned<T> {
        // Ordering: Relaxed; the caller owns the `Atomic`.
        let node = self.node.load(Ordering::Relaxed);
        // SAFETY: from `into_node_ptr`, which is never null.
        Owned::from_node_ptr(unsafe { NonNull::new_unchecked(node) })
    }
}

impl<T: Default + Send + Sync + 'static> Default for Atomic<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Send + Sync + 'static> From<Owned<T>> for Atomic<T> {
    fn from(owned: Owned<T>) -> Self {
        Self { node: AtomicPtr::new(owned.into_node_ptr().as_ptr()), _owns: PhantomData }
    }
}

impl<T: Send + Sync + 'static> From<T> for Atomic<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: Send + Sync + 'static> Drop for Atomic<T> {
    fn drop(&mut self) {
        // SAFETY: the `Atomic` ends here.
        drop(unsafe { self.take() });
    }
}

/// What [`Atomic::compare_exchange`](super::Atomic::compare_exchange) found, and what it was given.
#[non_exhaustive]
pub struct CompareExchangeError<'g, T> {
    /// What the pointer leads to.
    pub current: &'g T,
    /// The refused node.
    pub new: Owned<T>,
}

impl<T> CompareExchangeError<'_, T> {
    /// The error as C knows it: `EAGAIN`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EAGAIN
    }
}

impl<T> fmt::Debug for CompareExchangeError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompareExchangeError").finish_non_exhaustive()
    }
}

impl<T> fmt::Display for CompareExchangeError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pointer leads to something else")
    }
}

impl<T> Error for CompareExchangeError<'_, T> {}

impl<T> From<CompareExchangeError<'_, T>> for io::Error {
    fn from(error: CompareExchangeError<'_, T>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
