//! The node pool of a shard: nodes of removed values, kept for the next values.
//!
//! An add and a removal use the pool under the lock that they hold anyway. So they rarely allocate
//! or free, and never under a lock.
//!
//! # Invariants
//!
//! 1. A pooled node has no value. Its only count is that of the next entry, and its home is the
//!    slot of the shard.
//! 2. The stack of pooled nodes and its length change only under the slot's lock.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use offlock_sync::atomic::Ordering;
use offlock_sync::{check, step};

use crate::anchor::Anchor;
use crate::core::LockedShard;
use crate::shard::Shard;

use super::node::NodePtr;

/// The number of nodes that a shard keeps: a guess. The models keep one, to see the pool full and
/// empty.
const LIMIT: u8 = if cfg!(offlock_model) { 1 } else { 16 };
/// The size of the largest value that is moved in and out under a lock: a guess.
const MAX_SIZE: usize = 128;

/// Returns whether nodes of this type are pooled.
const fn is_pooled<T>() -> bool {
    size_of::<T>() <= MAX_SIZE
}

/// Returns whether the pool may have a node. Needs no lock, and may be wrong.
#[inline(always)]
pub(super) fn may_have_node<T>(shard: &Shard) -> bool {
    // Ordering: Relaxed; a hint, which `acquire` checks under the lock.
    is_pooled::<T>() && !shard.pool().0.load(Ordering::Relaxed).is_null()
}

/// Takes a node from the pool. The caller writes its value.
///
/// # Safety
///
/// The shard belongs to a list of `T`.
#[inline(always)]
pub(super) unsafe fn acquire<T, G>(locked: &LockedShard<'_, G>) -> Option<NodePtr<T>> {
    let (first, count) = locked.shard().pool();
    // Ordering: Relaxed, all here; the lock orders them (invariant 2).
    let node = NonNull::new(first.load(Ordering::Relaxed))?;
    // SAFETY: `release` pushed the anchor of a node of this list, which by the contract of this
    // function is a node of `T`.
    let node = unsafe { NodePtr::<T>::from_anchor(node) };
    // SAFETY: the only count comes with the node (invariant 1), and this thread holds the lock.
    let next = unsafe { node.next() }.load(Ordering::Relaxed);
    step!("pool: pop the node off the stack", first.store(next, Ordering::Relaxed));
    count.store(count.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    Some(node)
}

/// Puts the node of an entry into the pool, and returns its value, which the caller drops after the
/// unlock. Returns `None` if the pool is full or the node has another count.
///
/// # Safety
///
/// The node was inserted into the locked shard, and is unlinked. The caller has the entry's count,
/// which passes to the pool if the result is a value.
#[inline(always)]
pub(super) unsafe fn release<T, G>(locked: &LockedShard<'_, G>, node: NodePtr<T>) -> Option<T> {
    let (first, count) = locked.shard().pool();
    // Ordering: Relaxed, all here; the lock orders them (invariant 2).
    let kept = count.load(Ordering::Relaxed);
    if !is_pooled::<T>() || kept >= LIMIT {
        return None;
    }
    // SAFETY: by the contract of this function the caller has a count, and the node is unlinked.
    // Only the pool inserts it again.
    let is_last = unsafe { node.is_last() };
    if !check!("pool: no other count is left", is_last) {
        return None;
    }
    // SAFETY: the caller has the only count, and the value has not been taken.
    let value = unsafe { node.take_value() };
    // SAFETY: the caller has the entry's count, and with it the right to use `next`.
    unsafe { node.next() }.store(first.load(Ordering::Relaxed), Ordering::Relaxed);
    first.store(node.anchor_ptr().as_ptr(), Ordering::Relaxed);
    count.store(kept + 1, Ordering::Relaxed);
    Some(value)
}

/// Nodes that were removed from a pool; frees them on drop.
pub(super) struct FreeList<T> {
    first: *mut Anchor,
    _node: PhantomData<NodePtr<T>>,
}

/// Removes all nodes from the pool. The caller drops the result after the unlock.
///
/// # Safety
///
/// The shard belongs to a list of `T`.
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
            // SAFETY: by the contract of `remove_all` the nodes are those of a list of `T`.
            let node = unsafe { NodePtr::<T>::from_anchor(node) };
            // Ordering: Relaxed; only this thread has the nodes, and the lock ordered their links.
            // SAFETY: the only count comes with the node (invariant 1).
            self.first = unsafe { node.next() }.load(Ordering::Relaxed);
            // SAFETY: the only count comes with the node, which has no value (invariant 1).
            unsafe { node.free_empty() };
        }
    }
}
