//! The node of an owning list, which stores one value and counts the references to it.
//!
//! # Invariants
//!
//! 1. A node lives until the last of its `refs` is released. One count is that of the
//!    [`Entry`](super::Entry), which may pass from it to the stack of deferred removals or to the
//!    pool. Each of the others is that of a [`Ref`].
//! 2. The entry's count is released only after the node was unlinked. So a thread that finds a node
//!    in an array, under the slot's lock, may acquire a count.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;
use std::ptr::{self, NonNull};

use offlock_percpu::CpuId;
use offlock_sync::alloc::try_box;
use offlock_sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{check, order};

use crate::anchor::Anchor;

/// A value with its anchor and its count. The anchor comes first, so a pointer to it is one to the
/// node.
#[repr(C)]
pub(super) struct Node<T> {
    anchor: Anchor,
    refs: AtomicUsize,
    /// The next node in a [`DropList`], in a stack of deferred removals or in a pool.
    next: AtomicPtr<Anchor>,
    value: ManuallyDrop<T>,
}

// The crate documentation says how much memory a node takes. The atomics of a model are larger.
#[cfg(not(offlock_model))]
const _: () = assert!(size_of::<Node<u64>>() == 32 + size_of::<u64>());

impl<T> Node<T> {
    #[inline(always)]
    fn value_mut(&mut self) -> &mut ManuallyDrop<T> {
        &mut self.value
    }
}

/// A pointer to a node. Copies do not count.
pub(super) struct NodePtr<T>(NonNull<Watched<Node<T>>>);

impl<T> Clone for NodePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for NodePtr<T> {}

impl<T> NodePtr<T> {
    /// Allocates a node with one count, which is that of the entry. Returns the value if memory is
    /// out.
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
                // SAFETY: the value is taken once, because a node does not drop its value.
                Err(unsafe { ManuallyDrop::take(&mut node.value) })
            }
        }
    }

    /// Returns the node of an anchor.
    ///
    /// # Safety
    ///
    /// The anchor is that of a `Node<T>`, and the pointer has the provenance of the whole node.
    #[inline(always)]
    pub(super) unsafe fn from_anchor(anchor: NonNull<Anchor>) -> Self {
        // SAFETY: the node is `OFFSET` bytes into the allocation, and the anchor is its first
        // field.
        Self(unsafe { anchor.byte_sub(Watched::<Node<T>>::OFFSET) }.cast())
    }

    /// Returns a pointer to the anchor, with the provenance of the whole node.
    #[inline(always)]
    pub(super) fn anchor_ptr(self) -> NonNull<Anchor> {
        // SAFETY: the node is `OFFSET` bytes into the allocation.
        unsafe { self.0.byte_add(Watched::<Node<T>>::OFFSET) }.cast()
    }

    /// Returns a reference to the node.
    ///
    /// # Safety
    ///
    /// For `'a`, the caller has a count of the node, or the node is linked and the caller holds the
    /// lock of its slot.
    #[inline(always)]
    unsafe fn node<'a>(self) -> &'a Node<T> {
        // SAFETY: by the contract of this function and the invariants the node is alive for `'a`.
        let watched: &'a Watched<Node<T>> = unsafe { self.0.as_ref() };
        watched
    }

    /// Returns a reference to the anchor.
    ///
    /// # Safety
    ///
    /// For `'a`, the caller has a count of the node, or the node is linked and the caller holds the
    /// lock of its slot.
    #[inline(always)]
    pub(super) unsafe fn anchor<'a>(self) -> &'a Anchor
    where
        T: 'a,
    {
        // SAFETY: the contract of this function is that of `node`.
        &unsafe { self.node() }.anchor
    }

    /// Returns a reference to the value.
    ///
    /// # Safety
    ///
    /// For `'a`, the caller has a count of the node, or the node is linked and the caller holds the
    /// lock of its slot.
    #[inline(always)]
    pub(super) unsafe fn value<'a>(self) -> &'a T {
        // SAFETY: the contract of this function is that of `node`.
        &unsafe { self.node() }.value
    }

    /// Returns the link to the next node of a stack.
    ///
    /// # Safety
    ///
    /// The caller has the entry's count for `'a`, and with it the right to use the link.
    pub(super) unsafe fn next<'a>(self) -> &'a AtomicPtr<Anchor>
    where
        T: 'a,
    {
        // SAFETY: by the contract of this function the caller has a count.
        &unsafe { self.node() }.next
    }

    /// Adds a count, and returns the reference that has it.
    ///
    /// # Safety
    ///
    /// The caller has a count, or the node is linked and the caller holds the lock of its slot.
    #[inline]
    pub(super) unsafe fn acquire(self) -> Ref<T> {
        // SAFETY: the contract of this function is that of `node`.
        let node = unsafe { self.node() };
        // Ordering: Relaxed; the count or the lock of the caller orders the content of the node.
        if node.refs.fetch_add(1, Ordering::Relaxed) > isize::MAX as usize {
            process::abort(); // like `Arc`, because so many forgotten references could overflow it
        }
        Ref { node: self, _value: PhantomData }
    }

    /// Returns whether the caller has the only count. No other thread can then acquire one, because
    /// the node is not linked: a linked node has the count of its entry too.
    ///
    /// # Safety
    ///
    /// The caller has a count. If that is the entry's, the node is unlinked for good.
    #[inline(always)]
    pub(super) unsafe fn is_last(self) -> bool {
        // Ordering: Acquire pairs with the Release in `release`; it carries the other threads' uses
        // of the value.
        let order = order!(Acquire, "last count: after the uses by other threads");
        // SAFETY: by the contract of this function the caller has a count.
        unsafe { self.node() }.refs.load(order) == 1
    }

    /// Releases a count. The release of the last one drops the value and frees the node.
    ///
    /// # Safety
    ///
    /// The caller has a count and gives it up. If that is the entry's, the node is unlinked for
    /// good.
    #[inline]
    pub(super) unsafe fn release(self) {
        // If this count is the only one, it needs no read-modify-write.
        // SAFETY: the contract of this function is that of `is_last`.
        let is_last = unsafe { self.is_last() };
        if !check!("release: no other count is left", is_last) {
            // Ordering: AcqRel. Release pairs with the Acquire here and in `is_last`; it carries
            // this thread's uses of the value. Acquire pairs with the Release here; it carries the
            // other threads' uses, before the value is dropped.
            let order = order!(AcqRel, "release: after this thread's last use");
            // SAFETY: by the contract of this function the caller has a count.
            if unsafe { self.node() }.refs.fetch_sub(1, order) != 1 {
                return;
            }
        }
        // SAFETY: this was the last count, so no other thread uses the node (invariant 1). The
        // pointer is from `Box::leak`.
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: the value is dropped once. If its drop panics, the drop of the box does not use
        // it.
        unsafe { ManuallyDrop::drop(&mut node.value) };
        free(node);
    }

    /// Moves the value out of the node.
    ///
    /// # Safety
    ///
    /// The caller has the only count, and the node has a value.
    #[inline(always)]
    pub(super) unsafe fn take_value(self) -> T {
        // SAFETY: by the contract of this function no other thread uses the node.
        let value = unsafe { (*self.node_mut()).value_mut() };
        // SAFETY: by the contract of this function the node has a value.
        unsafe { ManuallyDrop::take(value) }
    }

    /// Moves a value into a node that has none.
    ///
    /// # Safety
    ///
    /// The caller has the only count, and the node has no value.
    #[inline(always)]
    pub(super) unsafe fn write_value(self, value: T) {
        // SAFETY: by the contract of this function no other thread uses the node.
        let place = unsafe { (*self.node_mut()).value_mut() };
        *place = ManuallyDrop::new(value); // drops nothing
    }

    /// Frees a node that has no value.
    ///
    /// # Safety
    ///
    /// The caller has the only count and gives it up, and the node has no value.
    pub(super) unsafe fn free_empty(self) {
        // SAFETY: by the contract of this function no other thread uses the node. The pointer is
        // from `Box::leak`.
        free(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    #[inline(always)]
    fn node_mut(self) -> *mut Watched<Node<T>> {
        self.0.as_ptr()
    }

    /// Returns the value and frees the node, if the caller has the only count.
    ///
    /// # Safety
    ///
    /// The caller has a count, and gives it up if the result is a value. If that is the entry's,
    /// the node is unlinked for good.
    pub(super) unsafe fn try_unwrap(self) -> Option<T> {
        // SAFETY: the contract of this function includes that of `is_last`.
        if !unsafe { self.is_last() } {
            return None;
        }
        // SAFETY: this was the last count, so no other thread uses the node (invariant 1). The
        // pointer is from `Box::leak`.
        let mut node = unsafe { Box::from_raw(self.0.as_ptr()) };
        // SAFETY: the value is taken once, and the drop of the box does not use it.
        let value = unsafe { ManuallyDrop::take(&mut node.value) };
        free(node);
        Some(value)
    }
}

/// A reference that keeps a value of a list alive, even after its entry was removed or the list was
/// dropped.
///
/// The value is dropped with the last of its references and its entry. Clone and drop are
/// wait-free. Each is one atomic operation on the cache line of the value.
///
/// ```
/// use percpu_list::{PerCpuList, Ref};
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert(String::from("alice"))?;
/// let found: Ref<String> = sessions.iter().next().unwrap()?;
/// drop(alice);
/// assert!(sessions.is_empty() && !found.is_linked());
/// assert_eq!(*found, "alice"); // dropped with the last reference
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Ref<T> {
    node: NodePtr<T>,
    /// Tells the compiler that the last reference drops a `T`.
    _value: PhantomData<T>,
}

// SAFETY: references on several threads share `&T`, for which `T` is `Sync`. The last one drops the
// value on its thread, for which `T` is `Send`.
unsafe impl<T: Send + Sync> Send for Ref<T> {}
// SAFETY: a shared reference gives out `&T`, and clones, which are `Send` because `T` is `Send` and
// `Sync`.
unsafe impl<T: Send + Sync> Sync for Ref<T> {}

impl<T> Ref<T> {
    #[inline(always)]
    pub(super) fn node(&self) -> NodePtr<T> {
        self.node
    }

    /// Makes a reference from a count.
    ///
    /// # Safety
    ///
    /// The caller has a count, which passes to the reference. If that is the entry's, the node is
    /// unlinked for good.
    pub(super) unsafe fn from_count(node: NodePtr<T>) -> Self {
        Self { node, _value: PhantomData }
    }

    /// Returns whether the entry is on its list. Another thread may change that at any time.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: the reference has a count.
        unsafe { self.node.anchor() }.is_linked()
    }

    /// Returns the CPU whose slot the entry was added to.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: the reference has a count.
        unsafe { self.node.anchor() }.home()
    }

    /// Returns whether both are references to the same entry.
    #[must_use]
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.node.0 == other.node.0
    }
}

impl<T> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the reference has a count as long as `self`.
        unsafe { self.node.value() }
    }
}

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Self {
        // SAFETY: the reference has a count.
        unsafe { self.node.acquire() }
    }
}

impl<T> Drop for Ref<T> {
    fn drop(&mut self) {
        // SAFETY: the reference gives up its count, once. If that was the entry's, the node is
        // unlinked for good, by the contract of `from_count`.
        unsafe { self.node.release() };
    }
}

impl<T: fmt::Debug> fmt::Debug for Ref<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&**self).finish()
    }
}

/// Nodes whose entry's count is released when the list is dropped, with no lock held. It links them
/// by `next`.
///
/// If the drop of a value panics, the remaining values are still dropped, and the panic goes on.
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
    /// The caller has the entry's count, which passes to the list. The node is unlinked for good.
    pub(super) unsafe fn push(&mut self, node: NodePtr<T>) {
        let next = self.first.map_or(ptr::null_mut(), |next| next.anchor_ptr().as_ptr());
        // Ordering: Relaxed; only this list uses the link, on one thread at a time.
        // SAFETY: by the contract of this function the caller has the entry's count.
        unsafe { node.next() }.store(next, Ordering::Relaxed);
        self.first = Some(node);
    }

    fn pop(&mut self) -> Option<NodePtr<T>> {
        let node = self.first?;
        // Ordering: Relaxed; only this list uses the link, on one thread at a time.
        // SAFETY: the list has the entry's count.
        let next = unsafe { node.next() }.load(Ordering::Relaxed);
        // SAFETY: `push` stored the anchor of a node of this type.
        self.first = NonNull::new(next).map(|next| unsafe { NodePtr::from_anchor(next) });
        Some(node)
    }
}

impl<T> Drop for DropList<T> {
    fn drop(&mut self) {
        while let Some(node) = self.pop() {
            let rest = Self { first: self.first.take() }; // dropped if the next line panics
            // SAFETY: the list has the entry's count, and by the contract of `push` the node is
            // unlinked for good.
            unsafe { node.release() };
            self.first = ManuallyDrop::new(rest).first;
        }
    }
}
