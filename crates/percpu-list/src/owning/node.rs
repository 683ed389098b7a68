//! A value of an owning list, and who keeps it alive.
//!
//! # Invariants
//!
//! 1. A node lives until the last of its `refs` is released: one is the [`Entry`](super::Entry)'s,
//!    or passes from it to the stack of deferred removals; the others are [`Ref`]s.
//! 2. The entry's count goes only after the node was unlinked: so whoever finds a node in an array,
//!    under the slot's lock, may take a count.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;
use std::ptr::{self, NonNull};

use percpu::CpuId;
use percpu::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::{check, order};

use crate::anchor::Anchor;
use percpu::alloc::try_box;

/// See the module. The anchor comes first, so that a pointer to it is one to the node.
#[repr(C)]
pub(super) struct Node<T> {
    anchor: Anchor,
    refs: AtomicUsize,
    /// The next in a [`DropList`], or in a stack of deferred removals.
    next: AtomicPtr<Anchor>,
    value: ManuallyDrop<T>,
}

// What the crate's page says of memory; a model's atomics are larger.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Node<u64>>() == 32 + size_of::<u64>());

impl<T> Node<T> {
    #[inline(always)]
    fn value_mut(&mut self) -> &mut ManuallyDrop<T> {
        &mut self.value
    }
}

/// A pointer to a node, as copyable as any.
pub(super) struct NodePtr<T>(NonNull<Watched<Node<T>>>);

impl<T> Clone for NodePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for NodePtr<T> {}

impl<T> NodePtr<T> {
    /// Allocates a node with one count, for the entry.
    pub(super) fn try_new(slot: CpuId, value: T) -> Result<Self, T> {
        let node = Node {
            anchor: Anchor::new(slot),
            refs: AtomicUsize::new(1),
            next: AtomicPtr::new(ptr::null_mut()),
            value: ManuallyDrop::new(value),
        };
        match try_box(Watched::new(node)) {
            Ok(node) => Ok(Self(NonNull::from(Box::leak(node)))),
            Err(mut node) => {
                // SAFETY: taken once: a node does not drop its value.
                Err(unsafe { ManuallyDrop::take(&mut node.value) })
            }
        }
    }

    /// The node of an anchor of a list of `T`.
    ///
    /// # Safety
    ///
    /// The anchor is that of a `Node<T>`, and the pointer may be used for all of it.
    #[inline(always)]
    pub(super) unsafe fn from_anchor(anchor: NonNull<Anchor>) -> Self {
        // SAFETY: the anchor is the first field of what is `OFFSET` into the allocation.
        Self(unsafe { anchor.byte_sub(Watched::<Node<T>>::OFFSET) }.cast())
    }

    /// A pointer to the anchor that may be used for the whole node.
    #[inline(always)]
    pub(super) fn anchor_ptr(self) -> NonNull<Anchor> {
        // SAFETY: inside the allocation: `OFFSET` says where the node is, of which it is the first field.
        unsafe { self.0.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
    }

    /// # Safety
    ///
    /// The node lives for `'a`: the caller has a count, or the lock of the slot it is linked in.
    #[inline(always)]
    unsafe fn node<'a>(self) -> &'a Node<T> {
        // SAFETY: the caller's.
        let watched: &'a Watched<Node<T>> = unsafe { self.0.as_ref() };
        watched
    }

    /// # Safety
    ///
    /// As for a value that is used for `'a`: a count, or the lock of the slot it is linked in.
    #[inline(always)]
    pub(super) unsafe fn anchor<'a>(self) -> &'a Anchor
    where
        T: 'a,
    {
        // SAFETY: the caller's.
        &unsafe { self.node() }.anchor
    }

    /// # Safety
    ///
    /// As for [`anchor`](Self::anchor).
    #[inline(always)]
    pub(super) unsafe fn value<'a>(self) -> &'a T {
        // SAFETY: the caller's.
        &unsafe { self.node() }.value
    }

    /// # Safety
    ///
    /// As for [`anchor`](Self::anchor); and the link is the caller's: it has the entry's count.
    pub(super) unsafe fn next<'a>(self) -> &'a AtomicPtr<Anchor>
    where
        T: 'a,
    {
        // SAFETY: the caller's.
        &unsafe { self.node() }.next
    }

    /// Takes a count.
    ///
    /// # Safety
    ///
    /// The caller has a count, or the lock of the slot in which the node is linked.
    #[inline]
    pub(super) unsafe fn acquire(self) -> Ref<T> {
        // SAFETY: the caller's.
        let node = unsafe { self.node() };
        // Ordering: Relaxed; the caller's way to the node orders its content.
        if node.refs.fetch_add(1, Ordering::Relaxed) > isize::MAX as usize {
            process::abort(); // as `Arc` does: forgotten references by the billion
        }
        Ref { node: self, _value: PhantomData }
    }

    /// True if the caller's count is the only one; then it stays so.
    ///
    /// # Safety
    ///
    /// The caller has a count, and the node is unlinked for good.
    #[inline(always)]
    pub(super) unsafe fn is_last(self) -> bool {
        // Ordering: Acquire pairs with the Release in `release`; it carries what others did with the
        // value.
        let order = order!(Acquire, "last count: after the uses by other threads");
        // SAFETY: the caller's.
        unsafe { self.node() }.refs.load(order) == 1
    }

    /// Gives a count back, and drops the value with the last.
    ///
    /// # Safety
    ///
    /// The count is the caller's; if it is the entry's, the node is unlinked for good.
    #[inline]
    pub(super) unsafe fn release(self) {
        // With one count left no thread can take another: no exchange is needed.
        // SAFETY: the caller's. A `Ref` may ask while the node is linked: then the entry has one.
        let is_last = unsafe { self.is_last() };
        if !check!("release: no other count is left", is_last) {
            // Ordering: Release pairs with the Acquire in `is_last` or below; it carries our uses of
            // the value. Acquire: theirs.
            let order = order!(AcqRel, "release: after this thread's last use");
            // SAFETY: the caller's.
            if unsafe { self.node() }.refs.fetch_sub(1, order) != 1 {
                return;
            }
        }
        // SAFETY: the last count was ours, so nobody else has the node (invariant 1); from `leak`.
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: dropped once, here. If that panics the box goes without touching it.
        unsafe { ManuallyDrop::drop(&mut node.value) };
        free(node);
    }

    /// The value, which the node is without from now on.
    ///
    /// # Safety
    ///
    /// The caller's count is the only one, and the value is there.
    #[inline(always)]
    pub(super) unsafe fn take_value(self) -> T {
        // SAFETY: the caller's: nobody else has the node.
        let value = unsafe { (*self.node_mut()).value_mut() };
        // SAFETY: there, says the caller.
        unsafe { ManuallyDrop::take(value) }
    }

    /// Gives a node without a value one.
    ///
    /// # Safety
    ///
    /// The caller's count is the only one, and the node is without a value.
    #[inline(always)]
    pub(super) unsafe fn write_value(self, value: T) {
        // SAFETY: the caller's: nobody else has the node.
        let place = unsafe { (*self.node_mut()).value_mut() };
        *place = ManuallyDrop::new(value); // drops nothing
    }

    /// Frees a node without a value.
    ///
    /// # Safety
    ///
    /// As for [`write_value`](Self::write_value); the count is used up.
    pub(super) unsafe fn free_empty(self) {
        // SAFETY: the only count is the caller's; from `leak`.
        free(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    #[inline(always)]
    fn node_mut(self) -> *mut Watched<Node<T>> {
        self.0.as_ptr()
    }

    /// The value, if the caller's count is the only one.
    ///
    /// # Safety
    ///
    /// As for [`release`](Self::release).
    pub(super) unsafe fn try_unwrap(self) -> Option<T> {
        // SAFETY: the caller's.
        if !unsafe { self.is_last() } {
            return None;
        }
        // SAFETY: as in `release`.
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: taken once, here.
        let value = unsafe { ManuallyDrop::take(&mut node.value) };
        free(node);
        Some(value)
    }
}

/// A value that was found in a list, kept alive: also after its entry was removed, and after the
/// list is gone.
///
/// The value is dropped with the last reference or, if that is later, the entry. Clone and drop are
/// wait-free, an atomic operation each on the value's own line.
pub struct Ref<T> {
    node: NodePtr<T>,
    /// Drops a `T`, if it is the last.
    _value: PhantomData<T>,
}

// SAFETY: shares `&T`, and drops the `T` on the thread of the last reference.
unsafe impl<T: Send + Sync> Send for Ref<T> {}
// SAFETY: as above: `&Ref<T>` may be cloned.
unsafe impl<T: Send + Sync> Sync for Ref<T> {}

impl<T> Ref<T> {
    #[inline(always)]
    pub(super) fn node(&self) -> NodePtr<T> {
        self.node
    }

    /// Makes a reference of a count that the caller has.
    ///
    /// # Safety
    ///
    /// The count passes to the reference; the node is unlinked for good, if it was the entry's.
    pub(super) unsafe fn from_count(node: NodePtr<T>) -> Self {
        Self { node, _value: PhantomData }
    }

    /// True if the entry is on its list; by the time it is known it may have changed.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: our count.
        unsafe { self.node.anchor() }.is_linked()
    }

    /// The slot that the entry was added to: the CPU, if the list has a slot for each.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: our count.
        unsafe { self.node.anchor() }.home()
    }

    /// The value itself, if this is the last reference and the entry is gone.
    ///
    /// # Errors
    ///
    /// The reference, if there is another or the entry.
    pub fn try_unwrap(self) -> Result<T, Self> {
        // SAFETY: our count; if it is the only one the entry is gone, so the node unlinked.
        match unsafe { self.node.try_unwrap() } {
            Some(value) => {
                std::mem::forget(self); // its count is used up
                Ok(value)
            }
            None => Err(self),
        }
    }

    /// True if both are of the same entry.
    #[must_use]
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.node.0 == other.node.0
    }
}

impl<T> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: our count, as long as `self`.
        unsafe { self.node.value() }
    }
}

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Self {
        // SAFETY: our count.
        unsafe { self.node.acquire() }
    }
}

impl<T> Drop for Ref<T> {
    fn drop(&mut self) {
        // SAFETY: our count, once.
        unsafe { self.node.release() };
    }
}

impl<T: fmt::Debug> fmt::Debug for Ref<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&**self).finish()
    }
}

/// Entries' counts, to be released when no lock is held: through `next`, each the chain's alone.
///
/// A value's drop that panics is the caller's to see; the others are dropped all the same.
pub(super) struct DropList<T> {
    first: Option<NodePtr<T>>,
}

impl<T> DropList<T> {
    pub(super) const fn new() -> Self {
        Self { first: None }
    }

    /// # Safety
    ///
    /// The entry's count passes to the chain, and the node is unlinked for good.
    pub(super) unsafe fn push(&mut self, node: NodePtr<T>) {
        let next = self.first.map_or(ptr::null_mut(), |next| next.anchor_ptr().as_ptr());
        // Ordering: Relaxed; the link is the chain's alone.
        // SAFETY: the caller's count.
        unsafe { node.next() }.store(next, Ordering::Relaxed);
        self.first = Some(node);
    }

    fn pop(&mut self) -> Option<NodePtr<T>> {
        let node = self.first?;
        // Ordering: Relaxed; as in `push`.
        // SAFETY: the chain has the entry's count.
        let next = unsafe { node.next() }.load(Ordering::Relaxed);
        // SAFETY: `push` put the anchor of a node of this type there.
        self.first = NonNull::new(next).map(|next| unsafe { NodePtr::from_anchor(next) });
        Some(node)
    }
}

impl<T> Drop for DropList<T> {
    fn drop(&mut self) {
        while let Some(node) = self.pop() {
            let rest = Self { first: self.first.take() }; // dropped if the next line panics
            // SAFETY: the entry's count, of an unlinked node: see `push`.
            unsafe { node.release() };
            self.first = ManuallyDrop::new(rest).first;
        }
    }
}
