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

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use super::bag::RetireHead;
use super::batch::Batch;
use super::error::{CompareExchangeError, ReclaimError, TryNewError};
use super::reclaim::retire_raw;
use super::registry::Guard;
use super::registry::pin;
use super::send_guard::SendGuard;
use super::synchronize;
use crate::alloc::try_box;
use crate::sync::atomic::{AtomicPtr, Ordering};
use crate::sync::mutant;
use crate::sync::quarantine::{Watched, free};

/// A proof that the calling code reads: [`Guard`] or [`SendGuard`]. Sealed.
pub trait Pinned: sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Guard {}
impl Pinned for Guard {}
impl sealed::Sealed for SendGuard {}
impl Pinned for SendGuard {}

#[repr(C)]
#[derive(Debug)]
struct Node<T> {
    head: RetireHead,
    value: T,
}

type Place<T> = NonNull<Watched<Node<T>>>;

/// Frees the node around `head`.
///
/// # Safety
///
/// `head` came from [`head_of`] for the same `T`, and nobody uses the node any more.
unsafe fn free_node<T>(head: NonNull<RetireHead>) {
    // SAFETY: `head_of` added as much.
    let node = unsafe { head.byte_sub(Watched::<Node<T>>::OFFSET) }.cast::<Watched<Node<T>>>();
    // SAFETY: allocated as a box by `Owned`; nobody uses it any more.
    free(unsafe { Box::from_raw(node.as_ptr()) });
}

/// The head of a node, as a pointer that is good for all of the node.
fn head_of<T>(node: Place<T>) -> NonNull<RetireHead> {
    // SAFETY: the `Node` is inside the `Watched`, and starts with the head (`repr(C)`).
    unsafe { node.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
}

/// A `T` that nobody else can reach, ready to be put into an [`Atomic`].
///
/// A `Box` with 16 bytes in front for its end.
pub struct Owned<T> {
    node: Place<T>,
    _owns: PhantomData<T>,
}

// SAFETY: the only way to the `T`, as a `Box`.
unsafe impl<T: Send> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Owned<T> {}
// As `Box<T>`: the head in front of the `T` is not touched before it is retired.
impl<T: UnwindSafe> UnwindSafe for Owned<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Owned<T> {}

impl<T: fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&**self).finish()
    }
}

impl<T> Owned<T> {
    /// Allocates a node. Aborts if there is no memory, as `Box::new`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self::from_box(Box::new(Self::node(value)))
    }

    /// Allocates a node.
    ///
    /// # Errors
    ///
    /// [`TryNewError`] gives the value back: there is no memory.
    pub fn try_new(value: T) -> Result<Self, TryNewError<T>> {
        // The node is built in place only once there is memory, so the value can be returned.
        let mut node = try_box(std::mem::MaybeUninit::<Watched<Node<T>>>::uninit());
        match node.as_mut() {
            Ok(node) => {
                node.write(Self::node(value));
            }
            Err(_) => return Err(TryNewError(value)),
        }
        let Ok(node) = node else { unreachable!("checked just above") };
        // SAFETY: written just above.
        Ok(Self::from_box(unsafe { node.assume_init() }))
    }

    fn node(value: T) -> Watched<Node<T>> {
        // SAFETY: the head of such a node is retired by `Unlinked` only, as a `Node<T>`.
        let head = unsafe { RetireHead::new(free_node::<T>) };
        Watched::new(Node { head, value })
    }

    fn from_box(node: Box<Watched<Node<T>>>) -> Self {
        let node = Box::into_raw(node);
        // SAFETY: a box is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) }, _owns: PhantomData }
    }

    fn into_place(self) -> Place<T> {
        ManuallyDrop::new(self).node
    }

    /// Takes the value out and frees the node.
    #[must_use]
    pub fn into_inner(self) -> T {
        let node = self.into_place();
        // SAFETY: ours alone (invariant 1), and initialised.
        let value = &unsafe { node.as_ref() }.value;
        // SAFETY: it is not dropped where it was, only its memory is freed.
        let value = unsafe { ptr::read(value) };
        let memory = node.as_ptr().cast::<std::mem::MaybeUninit<Watched<Node<T>>>>();
        // SAFETY: a box of the same layout; a `MaybeUninit` drops nothing, and the head needs no
        // drop.
        drop(unsafe { Box::from_raw(memory) });
        value
    }
}

/// For structures of the other crates, which have a word in the place of an [`Atomic`]: they keep its
/// invariants themselves. Not covered by semantic versioning.
#[doc(hidden)]
impl<T> Owned<T> {
    /// The node as a word; its two lowest bits are clear.
    #[inline]
    #[must_use]
    pub fn into_raw(self) -> NonNull<()> {
        const { assert!(align_of::<Node<T>>() >= 4) };
        self.into_place().cast()
    }

    /// # Safety
    ///
    /// From [`into_raw`](Owned::into_raw), of which this is the only way back taken; nobody else can
    /// reach the node any more, nor has a reference from it.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast(), _owns: PhantomData }
    }

    /// The value of a node that others may reach, too.
    ///
    /// # Safety
    ///
    /// From [`into_raw`](Owned::into_raw), and not freed, nor changed, during `'g`.
    #[inline]
    pub unsafe fn borrow_raw<'g>(node: NonNull<()>) -> &'g T {
        // SAFETY: the caller's.
        let node: &'g Watched<Node<T>> = unsafe { node.cast().as_ref() };
        &node.value
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: ours alone (invariant 1), and initialised.
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        &mut unsafe { self.node.as_mut() }.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: ours alone (invariant 1), from a box, and not used again.
        free(unsafe { Box::from_raw(self.node.as_ptr()) });
    }
}

impl<T> From<T> for Owned<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

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
    /// From [`Owned::into_place`], so never null.
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
        let old = self.node.swap(new.into_place().as_ptr(), order);
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
        let new = new.into_place();
        loop {
            // SAFETY: as in `load`: never null, and held up by the guard.
            let node = unsafe { &*found };
            let value = &node.value;
            if !ptr::eq(value, current) {
                // `new` was published to no thread.
                let new = Owned { node: new, _owns: PhantomData };
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
        // SAFETY: from `into_place`, which is never null.
        Owned { node: unsafe { NonNull::new_unchecked(node) }, _owns: PhantomData }
    }
}

impl<T: Default + Send + Sync + 'static> Default for Atomic<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Send + Sync + 'static> From<Owned<T>> for Atomic<T> {
    fn from(owned: Owned<T>) -> Self {
        Self { node: AtomicPtr::new(owned.into_place().as_ptr()), _owns: PhantomData }
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

/// A `T` that readers cannot find any more, but may still be reading.
///
/// Dropping it is [`retire`](Unlinked::retire).
#[must_use = "dropping it retires the value; say so with `retire`"]
pub struct Unlinked<T: Send + Sync + 'static> {
    node: Place<T>,
    _owns: PhantomData<T>,
}

// SAFETY: gives `&T` to its holder and, later, the `T` to whoever frees it: `T` is both.
unsafe impl<T: Send + Sync + 'static> Send for Unlinked<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync + 'static> Sync for Unlinked<T> {}
// As `Arc<T>`: readers may have `&T`, too.
impl<T: Send + Sync + RefUnwindSafe + 'static> UnwindSafe for Unlinked<T> {}
impl<T: Send + Sync + RefUnwindSafe + 'static> RefUnwindSafe for Unlinked<T> {}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for Unlinked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unlinked").field(&**self).finish()
    }
}

impl<T: Send + Sync + 'static> Unlinked<T> {
    /// # Safety
    ///
    /// `node` was in an [`Atomic`], and the caller alone took it out.
    #[inline]
    unsafe fn new(node: *mut Watched<Node<T>>) -> Self {
        // SAFETY: the pointer of an `Atomic` is never null.
        Self { node: unsafe { NonNull::new_unchecked(node) }, _owns: PhantomData }
    }

    /// Has the value dropped once no reader is left that may see it.
    ///
    /// Lock-free, and never allocates (but for the first call in the process, which makes the bags, and
    /// does without if there is no memory). Once in a while (a bag of objects is full, or the oldest in
    /// it is too old) it moves grace periods on, and then runs drops of objects retired before, on
    /// this thread and after all of its own work: do not hold a lock that such a drop takes.
    #[inline]
    pub fn retire(self) {
        drop(self);
    }

    /// [`retire`](Unlinked::retire), for a value that owns more than its own size: `bytes` is what its
    /// drop will give back besides (the capacity of a `Vec`, say), for the byte bound and the
    /// statistics. Without it the bound sees the node alone.
    ///
    /// # Examples
    ///
    /// ```
    /// use percpu::rcu::{self, Atomic, Owned};
    ///
    /// let table = Atomic::new(vec![0_u8; 1 << 20]);
    /// let old = table.swap(Owned::new(Vec::new()));
    /// let bytes = old.capacity();
    /// old.retire_sized(bytes);
    /// assert!(rcu::stats().pending_bytes + rcu::stats().reclaimed_bytes >= 1 << 20);
    /// ```
    #[inline]
    pub fn retire_sized(self, bytes: usize) {
        ManuallyDrop::new(self).retire_node(bytes);
    }

    /// To be called once, instead of a drop.
    #[inline]
    fn retire_node(&mut self, owns: usize) {
        let bytes = owns.saturating_add(size_of::<Watched<Node<T>>>());
        // SAFETY: unlinked by the exchange that made this `Unlinked`, the only one of the node
        // (invariant 1); `free_node::<T>` fits, and `T` may be dropped on any thread at any time.
        unsafe { retire_raw(head_of(self.node), bytes) };
    }

    /// Waits until no reader is left that may see the value, and takes it back.
    ///
    /// Blocks: see [`synchronize`].
    ///
    /// # Errors
    ///
    /// [`ReclaimError`]: it cannot wait here; it gives `self` back.
    pub fn reclaim(self) -> Result<Owned<T>, ReclaimError<T>> {
        match synchronize() {
            Ok(()) => Ok(Owned { node: ManuallyDrop::new(self).node, _owns: PhantomData }),
            Err(why) => Err(ReclaimError { why, unlinked: self }),
        }
    }
}

/// As for [`Owned`]. Not covered by semantic versioning.
#[doc(hidden)]
impl<T: Send + Sync + 'static> Unlinked<T> {
    /// # Safety
    ///
    /// From [`Owned::into_raw`], of which this is the only way back taken; no reader that begins now
    /// can find the node, and those that may have are in sections of this domain.
    #[inline]
    pub unsafe fn from_raw(node: NonNull<()>) -> Self {
        Self { node: node.cast(), _owns: PhantomData }
    }

    /// [`retire`](Unlinked::retire), together with others.
    #[inline]
    pub fn retire_with(self, batch: &mut Batch) {
        let node = ManuallyDrop::new(self).node;
        // SAFETY: as in `retire_node`; no reader that begins now can find it.
        unsafe { batch.push(head_of(node), size_of::<Watched<Node<T>>>()) };
    }
}

impl<T: Send + Sync + 'static> Deref for Unlinked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: freed by this `Unlinked` or after it (invariant 1).
        &unsafe { self.node.as_ref() }.value
    }
}

impl<T: Send + Sync + 'static> Drop for Unlinked<T> {
    #[inline]
    fn drop(&mut self) {
        self.retire_node(0);
    }
}
