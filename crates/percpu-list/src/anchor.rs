//! The anchor of an entry: the slot whose shard holds it, and its index in the array of that shard.
//!
//! # Invariants
//!
//! 1. `index` and `shard` change only under the lock of the slot that `home` names, and `home` never
//!    changes.
//! 2. `index` is [`UNLINKED`], or the index of the cell that points to this anchor, in the array of
//!    the shard that `shard` points to.
//! 3. Only the list that holds a linked anchor can unlink it. So the owner of the entry keeps the
//!    anchor alive and in place until the owner has unlinked it or has loaded `UNLINKED`.

use std::ptr;

use offlock_percpu::CpuId;
use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::load_own;

/// The `index` of an anchor that is on no list.
pub(crate) const UNLINKED: u32 = u32::MAX;

/// The part of an entry that lists use. A node begins with one.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Anchor {
    home: CpuId,
    index: AtomicU32,
    shard: UnsafeCell<ShardPtr>,
}

/// A pointer to the shard that holds an anchor, to compare with others.
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
        Self { home: slot, index: AtomicU32::new(UNLINKED), shard: UnsafeCell::new(ShardPtr::NULL) }
    }

    /// Returns the slot whose lock protects the anchor.
    #[inline(always)]
    pub(crate) fn home(&self) -> CpuId {
        self.home
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
        // Ordering: Relaxed; the lock orders it, and `is_linked` carries nothing.
        self.index.store(index, Ordering::Relaxed);
    }

    /// Returns whether the anchor is on a list. The result may be out of date when it is returned.
    #[inline(always)]
    pub(crate) fn is_linked(&self) -> bool {
        // Ordering: Relaxed; the value is kept by a count, and not by what this load returns.
        self.index.load(Ordering::Relaxed) != UNLINKED
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

#[cfg(all(test, not(offlock_model)))]
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
        // SAFETY: no other thread knows the anchor.
        unsafe { anchor.set_shard(shard) };
        for index in [0, 1, UNLINKED - 1] {
            anchor.set_index(index);
            assert!(anchor.is_linked());
            assert_eq!(anchor.index(), index);
        }
        anchor.set_index(UNLINKED);
        assert!(!anchor.is_linked());
        assert_eq!(anchor.home(), CpuId::new(0), "it keeps its home");
        // SAFETY: no other thread knows the anchor.
        assert_eq!(unsafe { anchor.shard() }, shard, "it keeps the shard that held it last");
    }

    /// The lowest bit of a cell tells an anchor from a hole, so anchors are aligned.
    #[test]
    fn an_anchor_is_two_words_and_aligned() {
        assert_eq!((size_of::<Anchor>(), align_of::<Anchor>()), (16, 8));
    }
}
