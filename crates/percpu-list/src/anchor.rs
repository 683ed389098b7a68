//! The anchor of an entry: the slot whose shard holds it, and its index in the array of that shard.
//!
//! # Invariants
//!
//! 1. `index` and `shard` change only under the lock of the slot that `home` names. `home` changes
//!    only under the locks of both the old slot and the new one. A thread that locks the slot in
//!    `home` loads `home` again, because it may have changed before the lock was acquired.
//! 2. `index` is [`UNLINKED`], or the index of the cell that points to this anchor, in the array of
//!    the shard that `shard` points to.
//! 3. Only the list that holds a linked anchor can unlink it. So the owner of the entry keeps the
//!    anchor alive and in place until the owner has unlinked it or has loaded `UNLINKED`.

use std::ptr;

use percpu::CpuId;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{load_own, order};

/// The `index` of an anchor that is on no list.
pub(crate) const UNLINKED: u32 = u32::MAX;

/// The part of an entry that lists use. A node begins with one, and a link embeds one.
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

    /// Returns the pointer that [`new`](Self::new) was given. `S` must be the same type.
    #[inline(always)]
    pub(crate) fn as_ptr<S>(self) -> *const S {
        self.0.cast()
    }
}

// SAFETY: `shard` is used only under the lock of the home slot (invariant 1), and a shard is
// `Sync`. The other fields are atomics.
unsafe impl Send for Anchor {}
// SAFETY: the lock of the home slot gives one thread at a time access to `shard` (invariant 1), and
// a shard is `Sync`. The other fields are atomics.
unsafe impl Sync for Anchor {}

impl Anchor {
    /// Creates an anchor on no list, whose home is `slot`.
    pub(crate) fn new(slot: CpuId) -> Self {
        Self {
            home: AtomicU32::new(slot.get()),
            index: AtomicU32::new(UNLINKED),
            shard: UnsafeCell::new(ShardPtr::NULL),
        }
    }

    /// Returns the slot to lock. The caller checks it again under that lock (invariant 1).
    #[inline(always)]
    pub(crate) fn home(&self) -> CpuId {
        // Ordering: Relaxed; the caller loads it again under the lock of the slot, which orders it.
        CpuId::new(self.home.load(Ordering::Relaxed))
    }

    /// Changes the home. The caller holds the locks of the old and the new slot.
    #[inline]
    pub(crate) fn set_home(&self, slot: CpuId) {
        // Ordering: Relaxed; the locks of both slots carry it: the new one to threads that load the
        // new home, the old one to threads that loaded the old home and wait for that lock.
        self.home.store(slot.get(), Ordering::Relaxed);
    }

    /// Returns the index in the array, or [`UNLINKED`]. It may change unless the caller holds the
    /// lock of the home slot.
    #[inline(always)]
    pub(crate) fn index(&self) -> u32 {
        // Ordering: Relaxed, because the lock orders it. A caller without the lock uses
        // `is_linked`.
        load_own(&self.index)
    }

    /// Stores the index in the array. The caller holds the lock of the home slot.
    #[inline(always)]
    pub(crate) fn set_index(&self, index: u32) {
        // Ordering: Release pairs with the Acquire in `is_linked`; it carries the uses that walks
        // made of the entry before it was unlinked.
        self.index.store(index, order!(Release, "unlink: after the last use by a walk"));
    }

    /// Returns whether the anchor is on a list. The result may be out of date when it is returned.
    #[inline(always)]
    pub(crate) fn is_linked(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `set_index`; it carries the uses that walks
        // made of the entry. A thread that sees the anchor unlinked may destroy the entry.
        self.index.load(order!(Acquire, "is_linked: before the item is destroyed")) != UNLINKED
    }

    /// Returns the shard that holds the anchor, or held it last.
    ///
    /// # Safety
    ///
    /// No thread stores `shard` at the same time: the caller holds the lock of the home slot, or
    /// has a reference to the node of the anchor, which stays in one shard while it has references.
    #[inline(always)]
    pub(crate) unsafe fn shard(&self) -> ShardPtr {
        self.shard.with(|shard| {
            // SAFETY: by the contract of this function no thread stores it now.
            unsafe { *shard }
        })
    }

    /// Stores the shard that holds the anchor.
    ///
    /// # Safety
    ///
    /// No other thread uses `shard` at the same time: the caller holds the lock of the home slot,
    /// and the anchor is unlinked.
    #[inline(always)]
    pub(crate) unsafe fn set_shard(&self, to: ShardPtr) {
        self.shard.with_mut(|shard| {
            // SAFETY: by the contract of this function no other thread uses it now.
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
        assert!(!anchor.is_linked());
        // SAFETY: no other thread knows the anchor.
        assert_eq!(unsafe { anchor.shard() }, ShardPtr::NULL);
    }

    #[test]
    fn an_anchor_returns_what_was_stored() {
        let anchor = Anchor::new(CpuId::new(0));
        let shard = ShardPtr::new(&raw const anchor);
        anchor.set_home(CpuId::new(3));
        // SAFETY: no other thread knows the anchor.
        unsafe { anchor.set_shard(shard) };
        for index in [0, 1, UNLINKED - 1] {
            anchor.set_index(index);
            assert!(anchor.is_linked());
            assert_eq!(anchor.index(), index);
        }
        anchor.set_index(UNLINKED);
        assert!(!anchor.is_linked());
        assert_eq!(anchor.home(), CpuId::new(3), "it keeps its home");
        // SAFETY: no other thread knows the anchor.
        assert_eq!(unsafe { anchor.shard() }, shard, "it keeps the shard that held it last");
    }

    /// The lowest bit of a cell tells an anchor from a hole, so anchors are aligned. The
    /// documentation says that a link is three words, of which the anchor is two.
    #[test]
    fn an_anchor_is_two_words_and_aligned() {
        assert_eq!((size_of::<Anchor>(), align_of::<Anchor>()), (16, 8));
    }
}
