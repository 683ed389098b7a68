//! Deferred removals, for threads that cannot lock the slot: in a signal handler, or inside a
//! locked walk.
//!
//! Each shard has a stack of entries to remove. A push is lock-free. The next thread that locks the
//! shard pops the whole stack at once, so there is no ABA problem.

use std::ptr::{self, NonNull};

use percpu::sync::atomic::Ordering;
use percpu::sync::{check, order};

use crate::core::{Core, LockedShard};

use super::node::{DropList, NodePtr};

/// Pushes a node on the stack of its shard, for the next thread that locks the shard. Lock-free;
/// allocates nothing and drops nothing.
///
/// # Safety
///
/// The node was inserted into the list of `core`. The caller has the count of its entry, which
/// passes to the stack.
pub(super) unsafe fn defer<T>(core: &Core, node: NodePtr<T>) {
    // SAFETY: by the contract of this function the caller has a count, so the node is alive.
    let home = unsafe { node.anchor() }.home(); // the home of a node never changes
    let Some(shard) = core.shard(home) else { unreachable!("a node was inserted in its home") };
    let stack = shard.deferred();
    loop {
        // Ordering: Relaxed; `first` is not followed, and the exchange below checks it.
        let first = stack.load(Ordering::Relaxed);
        // Ordering: Relaxed; the exchange below publishes it.
        // SAFETY: the caller has the entry's count, and with it the right to use `next`.
        unsafe { node.next() }.store(first, Ordering::Relaxed);
        // Ordering: Release on success pairs with the Acquire in `flush_stack`; it carries `next`,
        // and this thread's uses of the value. Relaxed on failure: the value read is not used.
        let order = order!(Release, "defer: the link and the last use are complete");
        let anchor = node.anchor_ptr().as_ptr();
        let pushed = stack.compare_exchange(first, anchor, order, Ordering::Relaxed);
        if check!("defer: no other push came first", pushed.is_ok()) {
            return;
        }
    }
}

/// Performs the deferred removals of a locked shard. The caller drops `removed` after the unlock.
///
/// # Safety
///
/// The shard belongs to `core`, whose anchors are those of nodes of `T`.
#[inline(always)]
pub(super) unsafe fn flush<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    if locked.shard().has_deferred() {
        // SAFETY: the contract of this function is that of `flush_stack`.
        unsafe { flush_stack(core, locked, removed) };
    }
}

/// Removes the entries on the stack of a shard.
///
/// # Safety
///
/// The shard belongs to `core`, whose anchors are those of nodes of `T`.
#[cold]
#[inline(never)]
unsafe fn flush_stack<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    let from = core.domain().current_slot();
    // Ordering: Acquire pairs with the Release in `defer`; it carries the links, and the uses of
    // the values by the threads that deferred the removals.
    let stack = locked.shard().deferred();
    let order = order!(Acquire, "flush: before the links are followed");
    let mut first = stack.swap(ptr::null_mut(), order);
    while let Some(anchor) = NonNull::new(first) {
        // SAFETY: `defer` pushes anchors of nodes of this list, which are nodes of `T`.
        let node = unsafe { NodePtr::<T>::from_anchor(anchor) };
        // Ordering: Relaxed; the exchange above ordered the store in `defer`.
        // SAFETY: the entry's count came with the node.
        first = unsafe { node.next() }.load(Ordering::Relaxed);
        // SAFETY: the entry's count keeps the node alive.
        let anchor = unsafe { node.anchor() };
        // SAFETY: the node was inserted into this shard, and its home never changes.
        unsafe { locked.remove(anchor, from, core.domain()) };
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
/// the list: a linked entry is either deferred or was forgotten.
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
        unsafe { locked.remove(anchor, anchor.home(), core.domain()) };
        // SAFETY: the entry was forgotten, so its count passes to the list. The node is unlinked
        // for good, because the list is being dropped.
        unsafe { removed.push(node) };
    }
}
