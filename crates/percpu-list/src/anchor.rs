//! What a list knows of an entry: whose slot it belongs to, and where in that slot's array it is.
//!
//! # Invariants
//!
//! 1. `index` and `shard` change only under the lock of the slot that `home` names; `home` itself
//!    only under both the old slot's lock and the new one's. Whoever locked a slot because `home`
//!    named it looks again: it may have changed before the lock was had.
//! 2. `index` is [`UNLINKED`], or the place in `shard`'s array where a pointer to this anchor is.
//! 3. Nobody but the list that holds it can unlink a linked anchor, so it stays where it is, alive
//!    and in place, until its owner has unlinked it or seen it unlinked.

use std::ptr;

use percpu::CpuId;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{load_own, order};

/// The `index` of an anchor that is on no list.
pub(crate) const UNLINKED: u32 = u32::MAX;

/// The part of an entry that lists use. Entries begin with it, or embed it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Anchor {
    home: AtomicU32,
    index: AtomicU32,
    shard: UnsafeCell<ShardPtr>,
}

/// A pointer to the shard that holds an anchor, which only the layer of shards follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardPtr(*const ());

impl ShardPtr {
    /// The pointer of an anchor that has never been on a list.
    pub(crate) const NULL: Self = Self(ptr::null());

    /// Wraps a pointer to a shard, whose type this module does not name.
    #[inline(always)]
    pub(crate) fn new<S>(shard: *const S) -> Self {
        Self(shard.cast())
    }

    /// Returns the pointer that [`new`](Self::new) was given, for which `S` must be the same type.
    #[inline(always)]
    pub(crate) fn as_ptr<S>(self) -> *const S {
        self.0.cast()
    }
}

// SAFETY: `shard` is used under the lock of the home slot only (invariant 1), and what it points to
// is `Sync`; the rest is atomics.
unsafe impl Send for Anchor {}
// SAFETY: as above.
unsafe impl Sync for Anchor {}

impl Anchor {
    /// An anchor on no list, whose first home is `slot`.
    pub(crate) fn new(slot: CpuId) -> Self {
        Self {
            home: AtomicU32::new(slot.get()),
            index: AtomicU32::new(UNLINKED),
            shard: UnsafeCell::new(ShardPtr::NULL),
        }
    }

    /// The slot to lock, unless it changes meanwhile (invariant 1).
    #[inline(always)]
    pub(crate) fn home(&self) -> CpuId {
        // Ordering: Relaxed; under its slot's lock it is read again, which orders it.
        CpuId::new(self.home.load(Ordering::Relaxed))
    }

    /// Gives the anchor a new home. The caller holds the locks of both slots.
    #[inline]
    pub(crate) fn set_home(&self, slot: CpuId) {
        // Ordering: Relaxed; ordered by both locks, the old one for who waits for it still.
        self.home.store(slot.get(), Ordering::Relaxed);
    }

    /// Its place, or [`UNLINKED`]. Sure for whoever holds the home slot's lock only.
    #[inline(always)]
    pub(crate) fn index(&self) -> u32 {
        // Ordering: by the lock. See `is_linked` for who has none.
        load_own(&self.index)
    }

    /// Says where it is now. The caller holds the home slot's lock.
    #[inline(always)]
    pub(crate) fn set_index(&self, index: u32) {
        // Ordering: Release pairs with the Acquire in `is_linked`; it carries the uses that walks
        // made of the entry before it was unlinked.
        self.index.store(index, order!(Release, "unlink: after the last use by a walk"));
    }

    /// Whether it is on a list; by the time it is known it may have changed.
    #[inline(always)]
    pub(crate) fn is_linked(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `set_index`: whoever sees it unlinked may
        // destroy the entry, for all walks have done with it.
        self.index.load(order!(Acquire, "is_linked: before the item is destroyed")) != UNLINKED
    }

    /// The shard that holds it, or held it last. The caller holds the home slot's lock, or made the
    /// anchor and has not shown it to anybody.
    #[inline(always)]
    pub(crate) fn shard(&self) -> ShardPtr {
        self.shard.with(|shard| {
            // SAFETY: invariant 1: nobody writes it now.
            unsafe { *shard }
        })
    }

    /// Says which shard holds it. The caller as for [`shard`](Self::shard).
    #[inline(always)]
    pub(crate) fn set_shard(&self, to: ShardPtr) {
        self.shard.with_mut(|shard| {
            // SAFETY: invariant 1: nobody else uses it now.
            unsafe { *shard = to };
        });
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn a_new_anchor_is_at_home_and_on_no_list() {
        let anchor = Anchor::new(CpuId::new(7));
        assert_eq!((anchor.home(), anchor.index()), (CpuId::new(7), UNLINKED));
        assert!(!anchor.is_linked() && anchor.shard() == ShardPtr::NULL);
    }

    #[test]
    fn an_anchor_returns_what_was_stored() {
        let anchor = Anchor::new(CpuId::new(0));
        let shard = ShardPtr::new(&raw const anchor);
        anchor.set_home(CpuId::new(3));
        anchor.set_shard(shard);
        for index in [0, 1, UNLINKED - 1] {
            anchor.set_index(index);
            assert!(anchor.is_linked());
            assert_eq!(anchor.index(), index);
        }
        anchor.set_index(UNLINKED);
        assert!(!anchor.is_linked());
        assert_eq!(anchor.home(), CpuId::new(3), "it keeps its home");
        assert_eq!(anchor.shard(), shard, "it keeps the shard that held it last");
    }

    /// An entry's cell tells it from a hole by the lowest bit; a link of a list costs three words.
    #[test]
    fn an_anchor_is_two_words_and_aligned() {
        assert_eq!((size_of::<Anchor>(), align_of::<Anchor>()), (16, 8));
    }
}
