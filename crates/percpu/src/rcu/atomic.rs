//! The pointer that readers follow without a lock, and the states of its value.
//!
//! ```text
//!            Atomic::swap                       retire, or drop
//!   Owned -----------------> shared -> Unlinked -----------------> freed after a grace period
//!     ^                                   |
//!     +------------ reclaim --------------+     waits for the grace period itself
//! ```
//!
//! The interface is safe because an [`Owned`] is unique: it can be in one [`Atomic`] only, and only
//! the thread that swaps it out gets the [`Unlinked`] that retires it. The invariants are those of
//! [`owned`](super::owned).

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use offlock_sync::atomic::{AtomicPtr, Ordering};
use offlock_sync::quarantine::Watched;
use offlock_sync::{order, step};

use super::guard::{Guard, pin};
use super::owned::{Node, Owned};
use super::unlinked::Unlinked;
use crate::error::impl_error;

/// A guard that protects loaded values: a [`Guard`]. Sealed.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Pinned};
///
/// fn sum(numbers: &Atomic<Vec<u32>>, guard: &impl Pinned) -> u32 {
///     numbers.load(guard).iter().sum()
/// }
/// let numbers = Atomic::new(vec![1, 2]);
/// assert_eq!(sum(&numbers, &rcu::pin()), 3);
/// ```
pub trait Pinned: sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Guard {}
impl Pinned for Guard {}

/// A pointer to a `T` that readers follow without a lock.
///
/// It always points to a value; use an `Option` as `T` if there may be none. Several writers may
/// write: [`update`](Atomic::update) keeps the change of another writer, [`store`](Atomic::store)
/// overwrites it. Dropping the `Atomic` frees the value at once. No reference to the value is left
/// then, because [`load`](Atomic::load) borrows the `Atomic`.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned};
///
/// let config = Atomic::new("old");
/// std::thread::scope(|s| {
///     s.spawn(|| {
///         let guard = rcu::pin();
///         let seen = config.load(&guard);
///         assert!(*seen == "old" || *seen == "new"); // and does not change
///     });
///     config.store(Owned::new("new")); // "old" is dropped once no reader uses it
/// });
/// ```
///
/// A reference does not outlive the guard, nor the `Atomic`:
///
/// ```compile_fail,E0597
/// # use offlock_percpu::rcu::{self, Atomic};
/// let shared = Atomic::new(7);
/// let seen = { let guard = rcu::pin(); shared.load(&guard) };
/// println!("{seen:?}");
/// ```
///
/// ```compile_fail,E0505
/// # use offlock_percpu::rcu::{self, Atomic};
/// let (guard, shared) = (rcu::pin(), Atomic::new(7));
/// let seen = shared.load(&guard);
/// drop(shared);
/// println!("{seen:?}");
/// ```
pub struct Atomic<T: Send + Sync + 'static> {
    /// Never null, because it is from [`Owned::into_node_ptr`].
    node: AtomicPtr<Watched<Node<T>>>,
}

// The same bounds as `Arc<T>`: several threads may have a `&T`. No operation panics half-way.
impl<T: Send + Sync + RefUnwindSafe + 'static> UnwindSafe for Atomic<T> {}
impl<T: Send + Sync + RefUnwindSafe + 'static> RefUnwindSafe for Atomic<T> {}

impl<T: Send + Sync + 'static> fmt::Debug for Atomic<T> {
    /// Omits the value, because a load needs a guard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Atomic").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Atomic<T> {
    /// Returns a pointer to a new node with `value`. Aborts if there is no memory for the node.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from(Owned::new(value))
    }

    /// Returns the value. Wait-free: one load.
    ///
    /// The reference is valid while both the guard and the `Atomic` are borrowed.
    #[inline]
    pub fn load<'g>(&'g self, guard: &'g impl Pinned) -> &'g T {
        let _ = guard;
        // Ordering: Acquire pairs with the Release of `swap` and `compare_exchange`; it carries
        // the node.
        let node = self.node.load(Ordering::Acquire);
        // SAFETY: never null. The node was in this `Atomic` after the guard began, so the grace
        // period before its end waits for the guard (invariant 2).
        let node = unsafe { &*node };
        &node.value
    }

    /// Replaces the value by `new`, and returns the old value.
    ///
    /// Wait-free: one exchange.
    #[inline]
    pub fn swap(&self, new: Owned<T>) -> Unlinked<T> {
        let order = order!(AcqRel, "publish: the node is built");
        // Ordering: Release pairs with the Acquire in `load`; it carries the new node. Acquire
        // pairs with the Release of the exchange that put the old node in; it carries the old node.
        let old = self.node.swap(new.into_node_ptr().as_ptr(), order);
        // SAFETY: `old` was in this `Atomic`, and only this exchange took it out.
        unsafe { Unlinked::new(old) }
    }

    /// Replaces the value by `new`, and retires the old value.
    ///
    /// May run the drops of objects retired before: see [`Unlinked::retire`].
    #[inline]
    pub fn store(&self, new: Owned<T>) {
        drop(self.swap(new));
    }

    /// Replaces the value by the result of `f`, and retires the old value.
    ///
    /// If another writer changes the value first, `f` is called again with the new value, so no
    /// update is lost. Lock-free. `f` runs while the thread is [`pin`]ned, so it must not wait for
    /// a grace period. `f` must not change this `Atomic`, or `update` never ends. If `f` panics, the
    /// value does not change. Aborts if there is no memory for the new node, like `Box::new`.
    ///
    /// ```
    /// use offlock_percpu::rcu::{self, Atomic};
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
        let old = loop {
            match self.compare_exchange(current, new, &guard) {
                Ok(old) => break old,
                Err(error) => (current, new) = (error.current, error.new),
            }
            step!("update: compute again from the value found", *new = f(current));
        };
        // First: the drops that `retire` may run may wait for a grace period.
        drop(guard);
        drop(old);
    }

    /// Replaces the value by `new` if the pointer still points to `current`. Returns the old value.
    ///
    /// `current` is compared by address, not by value. The address of a reference from
    /// [`load`](Atomic::load) cannot belong to another object meanwhile, because the guard keeps
    /// the object alive. Lock-free.
    ///
    /// # Errors
    ///
    /// [`CompareExchangeError`] has the current value, and returns `new`.
    #[inline]
    pub fn compare_exchange<'g>(
        &'g self,
        current: &T,
        new: Owned<T>,
        guard: &'g impl Pinned,
    ) -> Result<Unlinked<T>, CompareExchangeError<'g, T>> {
        let _ = guard;
        // Ordering: Acquire pairs with the Release of `swap` and of the exchange below; it carries
        // the node, whose value the error borrows.
        let mut found = self.node.load(Ordering::Acquire);
        let new = new.into_node_ptr();
        loop {
            // SAFETY: never null. The node was in this `Atomic` after the guard began, so the grace
            // period before its end waits for the guard (invariant 2).
            let node = unsafe { &*found };
            let value = &node.value;
            if !ptr::eq(value, current) {
                // SAFETY: `new` is from `into_node_ptr` above and was not published.
                let new = unsafe { Owned::from_node_ptr(new) };
                return Err(CompareExchangeError { current: value, new });
            }
            let publish = order!(Release, "update: the node is built");
            // Ordering: Release on success pairs with the Acquire in `load`; it carries the new
            // node. The found node is acquired already, by the load above or by a failure: Acquire
            // on failure pairs with the Release of the exchange that put the found node in.
            let exchanged =
                self.node.compare_exchange(found, new.as_ptr(), publish, Ordering::Acquire);
            match exchanged {
                // SAFETY: `old` was in this `Atomic`, and only this exchange took it out.
                Ok(old) => return Ok(unsafe { Unlinked::new(old) }),
                Err(other) => found = other,
            }
        }
    }

    /// Returns the value for a change in place. No reader can reach it during the borrow.
    pub fn get_mut(&mut self) -> &mut T {
        // Ordering: Relaxed; `&mut self` excludes other threads.
        let node = self.node.load(Ordering::Relaxed);
        // SAFETY: never null. `&mut self` borrows the `Atomic` exclusively, and no `&T` outlives a
        // borrow of the `Atomic` (invariant 2).
        let node = unsafe { &mut *node };
        &mut node.value
    }

    /// Returns the value as an owned node. No reader can reach it, because `self` is not borrowed.
    #[must_use]
    pub fn into_inner(self) -> Owned<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, and not dropped.
        unsafe { this.take() }
    }

    /// Takes the node out of the pointer.
    ///
    /// # Safety
    ///
    /// The caller does not use or drop the `Atomic` again.
    unsafe fn take(&mut self) -> Owned<T> {
        // Ordering: Relaxed; `&mut self` excludes other threads.
        let node = self.node.load(Ordering::Relaxed);
        // SAFETY: the pointer is from `into_node_ptr`, so it is not null.
        let node = unsafe { NonNull::new_unchecked(node) };
        // SAFETY: the caller does not use the `Atomic` again, so the node is converted back once.
        // No reader can reach it, because `&mut self` borrows the `Atomic` exclusively.
        unsafe { Owned::from_node_ptr(node) }
    }
}

impl<T: Default + Send + Sync + 'static> Default for Atomic<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Send + Sync + 'static> From<Owned<T>> for Atomic<T> {
    fn from(owned: Owned<T>) -> Self {
        Self { node: AtomicPtr::new(owned.into_node_ptr().as_ptr()) }
    }
}

impl<T: Send + Sync + 'static> From<T> for Atomic<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: Send + Sync + 'static> Drop for Atomic<T> {
    fn drop(&mut self) {
        // SAFETY: the `Atomic` is not used after its drop.
        drop(unsafe { self.take() });
    }
}

/// The current value that [`Atomic::compare_exchange`] found, and the refused new value.
///
/// ```
/// use offlock_percpu::rcu::{self, Atomic, Owned};
///
/// let shared = Atomic::new(1);
/// let guard = rcu::pin();
/// let first = shared.load(&guard);
/// shared.store(Owned::new(2));
/// let error = shared.compare_exchange(first, Owned::new(3), &guard).unwrap_err();
/// assert_eq!((*error.current, *error.new), (2, 3));
/// ```
#[non_exhaustive]
pub struct CompareExchangeError<'g, T> {
    /// The current value.
    pub current: &'g T,
    /// The refused new value.
    pub new: Owned<T>,
}

impl<T> fmt::Debug for CompareExchangeError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompareExchangeError").finish_non_exhaustive()
    }
}

impl_error! {
    [T] CompareExchangeError<'_, T> { _ => EAGAIN, "the pointer points to another value"; }
}
