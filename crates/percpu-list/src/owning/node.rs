//! The nodes of an owning list, and the references that keep them alive.
//!
//! # Invariants
//!
//! 1. A node lives until the last of its `refs` is released. One count belongs to the
//!    [`Entry`](super::Entry), or has passed from it to the stack of deferred removals. Each of the
//!    others belongs to a [`Ref`].
//! 2. The entry's count is released only after the node was unlinked. So a thread that finds a node in
//!    an array, under the slot's lock, may take a count.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;
use std::ptr::{self, NonNull};

use percpu::CpuId;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::{check, order};

use crate::anchor::Anchor;

/// A node. The anchor is the first field, so that a pointer to it is also a pointer to the node.
#[repr(C)]
pub(super) struct Node<T> {
    anchor: Anchor,
    refs: AtomicUsize,
    /// The next node in a [`DropList`], or in a stack of deferred removals.
    next: AtomicPtr<Anchor>,
    value: ManuallyDrop<T>,
}

// The crate documentation says how much memory a node takes. The atomics of a model are larger.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Node<u64>>() == 32 + size_of::<u64>());

impl<T> Node<T> {
    #[inline(always)]
    fn value_mut(&mut self) -> &mut ManuallyDrop<T> {
        &mut self.value
    }
}

/// A pointer to a node.
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
                // SAFETY: the value is taken once, because the drop of a node does not drop it.
                Err(unsafe { ManuallyDrop::take(&mut node.value) })
            }
        }
    }

    /// Returns the node of an anchor of a list of `T`.
    ///
    /// # Safety
    ///
    /// The anchor is that of a `Node<T>`, and the pointer is valid for the whole node.
    #[inline(always)]
    pub(super) unsafe fn from_anchor(anchor: NonNull<Anchor>) -> Self {
        // SAFETY: the anchor is the first field of the node, which lies `OFFSET` into the allocation.
        Self(unsafe { anchor.byte_sub(Watched::<Node<T>>::OFFSET) }.cast())
    }

    /// Returns a pointer to the anchor that is valid for the whole node.
    #[inline(always)]
    pub(super) fn anchor_ptr(self) -> NonNull<Anchor> {
        // SAFETY: the anchor is the first field of the node, which lies `OFFSET` into the allocation.
        unsafe { self.0.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
    }

    /// Returns the node.
    ///
    /// # Safety
    ///
    /// The node lives for `'a`: the caller has a count, or the lock of the slot in which it is linked.
    #[inline(always)]
    unsafe fn node<'a>(self) -> &'a Node<T> {
        // SAFETY: by the contract of this function the node lives for `'a`.
        let watched: &'a Watched<Node<T>> = unsafe { self.0.as_ref() };
        watched
    }

    /// Returns the anchor.
    ///
    /// # Safety
    ///
    /// The node lives for `'a`: the caller has a count, or the lock of the slot in which it is linked.
    #[inline(always)]
    pub(super) unsafe fn anchor<'a>(self) -> &'a Anchor
    where
        T: 'a,
    {
        // SAFETY: by the contract of this function the node lives for `'a`.
        &unsafe { self.node() }.anchor
    }

    /// Returns the value.
    ///
    /// # Safety
    ///
    /// The node has a value and lives for `'a`: the caller has a count, or the lock of the slot in which it
    /// is linked.
    #[inline(always)]
    pub(super) unsafe fn value<'a>(self) -> &'a T {
        // SAFETY: by the contract of this function the node lives for `'a`.
        &unsafe { self.node() }.value
    }

    /// Returns the link to the next node.
    ///
    /// # Safety
    ///
    /// The caller has the entry's count, and with it the right to use the link, for `'a`.
    pub(super) unsafe fn next<'a>(self) -> &'a AtomicPtr<Anchor>
    where
        T: 'a,
    {
        // SAFETY: the caller's count keeps the node alive.
        &unsafe { self.node() }.next
    }

    /// Takes a count.
    ///
    /// # Safety
    ///
    /// The caller has a count, or the lock of the slot in which the node is linked.
    #[inline]
    pub(super) unsafe fn acquire(self) -> Ref<T> {
        // SAFETY: the caller's count, or its lock, keeps the node alive.
        let node = unsafe { self.node() };
        // Ordering: Relaxed; the existing count, or the lock, orders the content of the node.
        if node.refs.fetch_add(1, Ordering::Relaxed) > isize::MAX as usize {
            process::abort(); // like `Arc`, after 2^63 forgotten references
        }
        Ref { node: self, _value: PhantomData }
    }

    /// Returns whether the caller's count is the only one. If it is, it stays the only one.
    ///
    /// # Safety
    ///
    /// The caller has a count, and the node is unlinked for good.
    #[inline(always)]
    pub(super) unsafe fn is_last(self) -> bool {
        // Ordering: Acquire pairs with the Release in `release`; it carries what other threads did with
        // the value.
        let order = order!(Acquire, "last count: after the uses by other threads");
        // SAFETY: the caller's count keeps the node alive.
        unsafe { self.node() }.refs.load(order) == 1
    }

    /// Releases a count, and drops the value with the last one.
    ///
    /// # Safety
    ///
    /// The caller has the count. If it is the entry's, the node is unlinked for good.
    #[inline]
    pub(super) unsafe fn release(self) {
        // If one count is left, no thread can take another, so the decrement is not needed.
        // SAFETY: the caller has a count. If that of a `Ref` is the only one, the entry's count is
        // released, so the node is unlinked for good.
        let is_last = unsafe { self.is_last() };
        if !check!("release: no other count is left", is_last) {
            // Ordering: AcqRel. Release pairs with the Acquire in `is_last` and here; it carries this
            // thread's uses of the value. Acquire pairs with the Release here; it carries theirs.
            let order = order!(AcqRel, "release: after this thread's last use");
            // SAFETY: the caller's count keeps the node alive.
            if unsafe { self.node() }.refs.fetch_sub(1, order) != 1 {
                return;
            }
        }
        // SAFETY: `try_new` leaked the box. The last count was this thread's, so no other thread uses the
        // node (invariant 1).
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: the value is dropped once: the drop of the box does not drop it, also if this panics.
        unsafe { ManuallyDrop::drop(&mut node.value) };
        free(node);
    }

    /// Moves the value out. The node has no value after this.
    ///
    /// # Safety
    ///
    /// The caller's count is the only one, and the node has a value.
    #[inline(always)]
    pub(super) unsafe fn take_value(self) -> T {
        // SAFETY: the caller has the only count, so no other thread uses the node.
        let value = unsafe { (*self.node_mut()).value_mut() };
        // SAFETY: by the contract of this function the node has a value.
        unsafe { ManuallyDrop::take(value) }
    }

    /// Writes the value of a node that has none.
    ///
    /// # Safety
    ///
    /// The caller's count is the only one, and the node has no value.
    #[inline(always)]
    pub(super) unsafe fn write_value(self, value: T) {
        // SAFETY: the caller has the only count, so no other thread uses the node.
        let place = unsafe { (*self.node_mut()).value_mut() };
        *place = ManuallyDrop::new(value); // drops nothing
    }

    /// Frees a node without a value.
    ///
    /// # Safety
    ///
    /// The caller's count is the only one, and the node has no value. The call consumes the count.
    pub(super) unsafe fn free_empty(self) {
        // SAFETY: `try_new` leaked the box, and the caller has the only count.
        free(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    #[inline(always)]
    fn node_mut(self) -> *mut Watched<Node<T>> {
        self.0.as_ptr()
    }

    /// Frees the node and returns the value, if the caller's count is the only one.
    ///
    /// # Safety
    ///
    /// The caller has a count. If it is the entry's, the node is unlinked for good. `Some` consumes it.
    pub(super) unsafe fn try_unwrap(self) -> Option<T> {
        // SAFETY: the caller has a count, and the node is unlinked for good if that is the only one.
        if !unsafe { self.is_last() } {
            return None;
        }
        // SAFETY: `try_new` leaked the box, and the caller has the only count.
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: the value is taken once: the drop of the box does not drop it.
        let value = unsafe { ManuallyDrop::take(&mut node.value) };
        free(node);
        Some(value)
    }
}

/// A counted reference to a value of a list. It keeps the value alive after its entry was removed, and
/// after the list was dropped.
///
/// The value is dropped with the last of its references and its entry. Clone and drop are wait-free: one
/// atomic operation on the node's cache line.
pub struct Ref<T> {
    node: NodePtr<T>,
    /// The drop of the last reference drops a `T`.
    _value: PhantomData<T>,
}

// SAFETY: a reference gives access to `&T`, and the last one drops the `T` on its thread.
unsafe impl<T: Send + Sync> Send for Ref<T> {}
// SAFETY: a `&Ref<T>` can be cloned on another thread, so the same bounds apply.
unsafe impl<T: Send + Sync> Sync for Ref<T> {}

impl<T> Ref<T> {
    #[inline(always)]
    pub(super) fn node(&self) -> NodePtr<T> {
        self.node
    }

    /// Makes a reference of the caller's count.
    ///
    /// # Safety
    ///
    /// The count passes to the reference; the node is unlinked for good, if it was the entry's.
    pub(super) unsafe fn from_count(node: NodePtr<T>) -> Self {
        Self { node, _value: PhantomData }
    }

    /// Returns whether the entry is on its list. Another thread may change that at any time.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: the reference's count keeps the node alive.
        unsafe { self.node.anchor() }.is_linked()
    }

    /// Returns the slot that the entry was added to. It is the CPU, if the list has a slot for each CPU.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: the reference's count keeps the node alive.
        unsafe { self.node.anchor() }.home()
    }

    /// Returns the value, if this is the last reference and the entry was dropped.
    ///
    /// # Errors
    ///
    /// Returns the reference, if another reference or the entry exists.
    pub fn try_unwrap(self) -> Result<T, Self> {
        // SAFETY: this reference has a count. If it is the only one, the entry's count is released, so the
        // node is unlinked for good.
        match unsafe { self.node.try_unwrap() } {
            Some(value) => {
                std::mem::forget(self); // its count is used up
                Ok(value)
            }
            None => Err(self),
        }
    }

    /// Returns whether both refer to the same entry.
    #[must_use]
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.node.0 == other.node.0
    }
}

impl<T> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the reference's count keeps the node alive as long as `self`.
        unsafe { self.node.value() }
    }
}

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Self {
        // SAFETY: the reference's count keeps the node alive.
        unsafe { self.node.acquire() }
    }
}

impl<T> Drop for Ref<T> {
    fn drop(&mut self) {
        // SAFETY: the reference's count is released once.
        unsafe { self.node.release() };
    }
}

impl<T: fmt::Debug> fmt::Debug for Ref<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&**self).finish()
    }
}

/// A chain of nodes whose entry's count is released later, without a lock. The chain owns their `next`.
///
/// If the drop of a value panics, the panic propagates and the other values are still dropped.
pub(super) struct DropList<T> {
    first: Option<NodePtr<T>>,
}

impl<T> DropList<T> {
    pub(super) const fn new() -> Self {
        Self { first: None }
    }

    /// Adds a node.
    ///
    /// # Safety
    ///
    /// The caller has the entry's count, which passes to the chain, and the node is unlinked for good.
    pub(super) unsafe fn push(&mut self, node: NodePtr<T>) {
        let next = self.first.map_or(ptr::null_mut(), |next| next.anchor_ptr().as_ptr());
        // Ordering: Relaxed; only the chain uses the link.
        // SAFETY: the caller has the entry's count.
        unsafe { node.next() }.store(next, Ordering::Relaxed);
        self.first = Some(node);
    }

    fn pop(&mut self) -> Option<NodePtr<T>> {
        let node = self.first?;
        // Ordering: Relaxed; only the chain uses the link.
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
            // SAFETY: the chain has the entry's count, and the node is unlinked for good (`push`).
            unsafe { node.release() };
            self.first = ManuallyDrop::new(rest).first;
        }
    }
}
