//! Nodes that a slot keeps for its next values: under the lock that is taken anyway, so that the
//! allocator is asked for memory seldom, and never under a lock.
//!
//! # Invariants
//!
//! 1. A node on the stack has no value, no count but the next entry's, and the shard's slot as home.
//! 2. The stack and its count change under the slot's lock only.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use percpu::sync::atomic::Ordering;
use percpu::sync::{check, step};

use crate::anchor::Anchor;
use crate::core::LockedShard;
use crate::shard::Shard;

use super::node::NodePtr;

/// How many nodes a slot keeps: a guess. A model keeps one, to see it taken and left.
const LIMIT: u8 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 16 };
/// Values that are larger are not moved in and out under a lock: a guess.
const MAX_SIZE: usize = 128;

/// True if values of this type are moved in and out under the lock.
const fn is_pooled<T>() -> bool {
    size_of::<T>() <= MAX_SIZE
}

/// True if there may be a spare node. Needs no lock, and may be wrong.
#[inline(always)]
pub(super) fn may_have_node<T>(shard: &Shard) -> bool {
    // Ordering: Relaxed; a hint.
    is_pooled::<T>() && !shard.pool().0.load(Ordering::Relaxed).is_null()
}

/// Takes a spare node: its value is to be written at once.
///
/// # Safety
///
/// The shard is of a list of `T`.
#[inline(always)]
pub(super) unsafe fn acquire<T, G>(locked: &LockedShard<'_, G>) -> Option<NodePtr<T>> {
    let (first, count) = locked.shard().pool();
    // Ordering: Relaxed, all here; the lock orders them (invariant 2).
    let node = NonNull::new(first.load(Ordering::Relaxed))?;
    // SAFETY: `release` pushed it: a node of this list, and so of its `T`, says the caller.
    let node = unsafe { NodePtr::<T>::from_anchor(node) };
    // SAFETY: the count that comes with it.
    let next = unsafe { node.next() }.load(Ordering::Relaxed);
    step!("pool: pop the node off the stack", first.store(next, Ordering::Relaxed));
    count.store(count.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    Some(node)
}

/// Keeps an entry's node if there is room and nobody else has it: then its value comes back, to be
/// dropped after the unlock.
///
/// # Safety
///
/// The entry's count passes on, if a value comes back. The node is unlinked for good, and was inserted
/// into the locked shard.
#[inline(always)]
pub(super) unsafe fn release<T, G>(locked: &LockedShard<'_, G>, node: NodePtr<T>) -> Option<T> {
    let (first, count) = locked.shard().pool();
    // Ordering: Relaxed, all here; the lock orders them (invariant 2).
    let kept = count.load(Ordering::Relaxed);
    if !is_pooled::<T>() || kept >= LIMIT {
        return None;
    }
    // SAFETY: the entry's count, of an unlinked node.
    let is_last = unsafe { node.is_last() };
    if !check!("pool: no other count is left", is_last) {
        return None;
    }
    // SAFETY: the only count is ours, so nobody else has the value; it is taken once.
    let value = unsafe { node.take_value() };
    // SAFETY: the entry's count.
    unsafe { node.next() }.store(first.load(Ordering::Relaxed), Ordering::Relaxed);
    first.store(node.anchor_ptr().as_ptr(), Ordering::Relaxed);
    count.store(kept + 1, Ordering::Relaxed);
    Some(value)
}

/// Nodes that are not kept any more: freed on drop, after the unlock.
pub(super) struct FreeList<T> {
    first: *mut Anchor,
    _node: PhantomData<NodePtr<T>>,
}

/// Takes all spare nodes.
///
/// # Safety
///
/// The shard is of a list of `T`.
pub(super) unsafe fn remove_all<T, G>(locked: &LockedShard<'_, G>) -> FreeList<T> {
    let (first, count) = locked.shard().pool();
    // Ordering: Relaxed, both; the lock orders them (invariant 2).
    let taken = first.load(Ordering::Relaxed);
    first.store(ptr::null_mut(), Ordering::Relaxed);
    count.store(0, Ordering::Relaxed);
    FreeList { first: taken, _node: PhantomData }
}

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        while let Some(node) = NonNull::new(self.first) {
            // SAFETY: they are of a list of `T`, said the caller of `remove_all`.
            let node = unsafe { NodePtr::<T>::from_anchor(node) };
            // Ordering: Relaxed; the nodes are ours alone.
            // SAFETY: the count that comes with it.
            self.first = unsafe { node.next() }.load(Ordering::Relaxed);
            // SAFETY: the only count, and the value was taken.
            unsafe { node.free_empty() };
        }
    }
}
