//! Removal by whoever comes next, for who cannot take the lock: a signal handler, or a thread that
//! holds it already.
//!
//! Each shard has a stack of such entries. Pushing is lock-free; whoever locks the shard takes the
//! whole stack, so there is no ABA.

use std::ptr::{self, NonNull};

use percpu::sync::atomic::Ordering;
use percpu::sync::{check, order};

use crate::core::{Core, LockedShard};

use super::node::{DropList, NodePtr};

/// Leaves a node, and the entry's count, to whoever locks its slot next. Lock-free; allocates
/// nothing and drops nothing.
///
/// # Safety
///
/// The entry's count is the caller's, and passes on. The node was inserted into the list.
pub(super) unsafe fn defer<T>(core: &Core, node: NodePtr<T>) {
    // SAFETY: the caller's count.
    let home = unsafe { node.anchor() }.home(); // which never changes
    let Some(shard) = core.shard(home) else { unreachable!("a node was inserted in its home") };
    let stack = shard.deferred();
    loop {
        // Ordering: Relaxed; the exchange checks it, and `first` is not followed.
        let first = stack.load(Ordering::Relaxed);
        // Ordering: Relaxed; published by the exchange.
        // SAFETY: the caller's count, and with it the link.
        unsafe { node.next() }.store(first, Ordering::Relaxed);
        // Ordering: Release on success pairs with the Acquire in `flush_stack`; it carries `next`, and
        // the caller's uses of the value. Relaxed on failure: the value is not used.
        let order = order!(Release, "defer: the link and the last use are complete");
        let anchor = node.anchor_ptr().as_ptr();
        let pushed = stack.compare_exchange(first, anchor, order, Ordering::Relaxed);
        if check!("defer: no other push came first", pushed.is_ok()) {
            return;
        }
    }
}

/// Removes what was left to be removed. The values are in `removed`, to be dropped after the unlock.
///
/// # Safety
///
/// The shard is of `core`, and that of a list of `T`.
#[inline(always)]
pub(super) unsafe fn flush<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    if locked.shard().has_deferred() {
        // SAFETY: the caller's.
        unsafe { flush_stack(core, locked, removed) };
    }
}

/// # Safety
///
/// As for [`flush`].
#[cold]
#[inline(never)]
unsafe fn flush_stack<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    let from = core.domain().current_slot();
    // Ordering: Acquire pairs with the Release in `defer`; it carries the links, and the uses of the
    // values by those who deferred.
    let stack = locked.shard().deferred();
    let order = order!(Acquire, "flush: before the links are followed");
    let mut first = stack.swap(ptr::null_mut(), order);
    while let Some(anchor) = NonNull::new(first) {
        // SAFETY: `defer` pushes anchors of nodes, of this list and so of its `T`.
        let node = unsafe { NodePtr::<T>::from_anchor(anchor) };
        // Ordering: Relaxed; see the exchange.
        // SAFETY: the entry's count came with it.
        first = unsafe { node.next() }.load(Ordering::Relaxed);
        // SAFETY: as above.
        let anchor = unsafe { node.anchor() };
        // SAFETY: inserted into this shard, and a node's home never changes.
        unsafe { locked.remove(anchor, from, core.domain()) };
        // SAFETY: it is unlinked, for good since nobody inserts a node again.
        unsafe { removed.push(node) };
    }
}

/// Takes everything out of a shard of a list that is being dropped.
///
/// # Safety
///
/// As for [`flush`]; and nobody has an entry of the list: what is linked, but for what was left to be
/// removed, was forgotten.
pub(super) unsafe fn remove_all<T, G>(
    core: &Core,
    locked: &mut LockedShard<'_, G>,
    removed: &mut DropList<T>,
) {
    // SAFETY: the caller's.
    unsafe { flush(core, locked, removed) };
    while let Some(anchor) = locked.array().last() {
        // SAFETY: an entry of this list is a node of its `T`.
        let node = unsafe { NodePtr::<T>::from_anchor(anchor) };
        // SAFETY: linked, so it lives; the entry's count is nobody's any more.
        let anchor = unsafe { node.anchor() };
        // SAFETY: found in this shard's array.
        unsafe { locked.remove(anchor, anchor.home(), core.domain()) };
        // SAFETY: the entry's count, of a node that is unlinked for good.
        unsafe { removed.push(node) };
    }
}
