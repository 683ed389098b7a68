//! The entries that a thread drops while it has a snapshot. They are removed at the end of it.
//!
//! Each shard has a stack of them, which changes only under the lock of the slot: the thread that
//! defers a removal holds all slots.

use std::ptr::{self, NonNull};

use offlock_sync::atomic::Ordering;

use crate::core::{Core, LockedShard};

use super::node::{DropList, NodePtr};

/// Pushes a node on the stack of its shard.
///
/// # Safety
///
/// The node was inserted into the list of `core`, and this thread holds the lock of its slot. The
/// caller has the count of its entry, which passes to the stack.
#[cold]
pub(super) unsafe fn defer<T>(core: &Core, node: NodePtr<T>) {
    // SAFETY: by the contract of this function the caller has a count, so the node is alive.
    let home = unsafe { node.anchor() }.home();
    let Some(shard) = core.shard(home) else { unreachable!("a node was inserted in its home") };
    // Ordering: Relaxed, all here; the lock of the slot orders them.
    // SAFETY: the caller has the entry's count, and with it the right to use `next`.
    unsafe { node.next() }.store(shard.deferred().load(Ordering::Relaxed), Ordering::Relaxed);
    shard.deferred().store(node.anchor_ptr().as_ptr(), Ordering::Relaxed);
}

/// Performs the deferred removals of a locked shard. The caller drops `removed` after the unlock.
///
/// # Safety
///
/// The shard belongs to `core`, whose anchors are those of nodes of `T`.
pub(super) unsafe fn flush<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    let stack = locked.shard().deferred();
    // Ordering: Relaxed, all here; the lock of the slot orders them.
    let mut first = stack.load(Ordering::Relaxed);
    stack.store(ptr::null_mut(), Ordering::Relaxed);
    while let Some(anchor) = NonNull::new(first) {
        // SAFETY: `defer` pushes anchors of nodes of this list, which are nodes of `T`.
        let node = unsafe { NodePtr::<T>::from_anchor(anchor) };
        // SAFETY: the entry's count came with the node.
        first = unsafe { node.next() }.load(Ordering::Relaxed);
        // SAFETY: the entry's count keeps the node alive.
        let anchor = unsafe { node.anchor() };
        // SAFETY: the node was inserted into this shard, and its home never changes.
        unsafe { locked.remove(anchor, core.slots().current(), core.slots()) };
        // SAFETY: the entry's count came with the node. The node is unlinked for good, because only
        // a pooled node is inserted again.
        unsafe { removed.push(node) };
    }
}

/// Removes every entry of a shard of a list that is being dropped. The caller drops `removed`.
///
/// # Safety
///
/// The shard belongs to `core`, whose anchors are those of nodes of `T`. No thread has an entry of
/// the list: a linked entry was forgotten, or deferred under a forgotten snapshot.
pub(super) unsafe fn remove_all<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    // SAFETY: by the contract of this function the shard belongs to `core`.
    unsafe { flush(core, locked, removed) };
    while let Some(anchor) = locked.array().last() {
        // SAFETY: by the contract of this function the anchor is that of a node of `T`.
        let node = unsafe { NodePtr::<T>::from_anchor(anchor) };
        // SAFETY: the node is linked, so it has the entry's count and is alive.
        let anchor = unsafe { node.anchor() };
        // SAFETY: the anchor was found in the array of this shard.
        unsafe { locked.remove(anchor, anchor.home(), core.slots()) };
        // SAFETY: the entry was forgotten, so its count passes to the list. The node is unlinked
        // for good, because the list is being dropped.
        unsafe { removed.push(node) };
    }
}
