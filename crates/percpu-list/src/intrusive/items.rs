//! The core of an intrusive list, together with the type of its items.
//!
//! # Invariants
//!
//! 1. Every anchor in the shards of the core is that of the [`Link`](super::Link) in a pinned item
//!    of type `T`, and the pointer to it is from [`anchor_of`](super::link::anchor_of).

use std::marker::PhantomData;
use std::pin::Pin;
use std::ptr::NonNull;

use percpu::AllocError;

use crate::anchor::Anchor;
use crate::core::Core;
use crate::domain::Domain;

use super::link::{Linked, item_of};

/// A core whose anchors are all of items of type `T`.
pub(super) struct Items<T: Linked> {
    core: Core,
    /// Makes the list invariant in `T`. It is `Send` and `Sync`, because items are `Sync`.
    _item: PhantomData<fn(T) -> T>,
}

impl<T: Linked> Items<T> {
    pub(super) fn try_new(domain: &Domain, counts_hits: bool) -> Result<Self, AllocError> {
        Ok(Self { core: Core::new(domain, counts_hits)?, _item: PhantomData })
    }

    #[inline(always)]
    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// Returns the item of an anchor.
    ///
    /// # Safety
    ///
    /// The anchor was found in an array of this core, and the lock of its slot, held since then,
    /// stays held as long as `'a`.
    #[inline(always)]
    pub(super) unsafe fn item<'a>(&self, anchor: NonNull<Anchor>) -> Pin<&'a T> {
        // SAFETY: by invariant 1 the anchor is that of an item of type `T`.
        let item = unsafe { item_of::<T>(anchor) };
        // SAFETY: the item is linked. Its drop unlinks it first, under the lock of the slot, so it
        // is alive as long as the lock is held.
        let item = unsafe { item.as_ref() };
        // SAFETY: the item was pinned when it was added (invariant 1).
        unsafe { Pin::new_unchecked(item) }
    }
}

/// Removes all items.
///
/// Blocks while another thread holds a slot. If this thread holds it (in a locked walk or a
/// snapshot of the domain), the drop leaks the shard of that slot, and its items stay there until
/// they are removed or dropped.
impl<T: Linked> Drop for Items<T> {
    fn drop(&mut self) {
        let domain = self.core.domain().clone();
        for slot in self.core.slots() {
            let Some(shard) = self.core.shard(slot) else { continue };
            let Ok(mut locked) = shard.lock() else {
                self.core.leak_shard(slot);
                continue;
            };
            while let Some(anchor) = locked.array().last() {
                // SAFETY: the anchor is in the array, so it is linked and alive.
                let anchor = unsafe { anchor.as_ref() };
                // SAFETY: the anchor was found in the array of this shard.
                unsafe { locked.remove(anchor, slot, &domain) };
            }
        }
    }
}
