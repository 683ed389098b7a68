//! The tree of a table's slabs, and lookups in it.
//!
//! A lookup reads the tree, the slab and the slot, and nothing else of the table. The tree is changed
//! under the table's lock only.

use std::marker::PhantomData;
use std::ptr::NonNull;

use percpu::rcu;
use percpu::sync::atomic::Ordering;
use percpu::sync::quarantine::Watched;

use super::error::LookupError;
use super::id::Id;
use super::slab::{NotLive, SLAB_BITS, Slab, SlabPtr, Slot};
use crate::tree::{Cursor, Tree, floor_in};

/// The key of the slab with the highest index.
pub(super) const LAST_KEY: u64 = u32::MAX as u64 >> SLAB_BITS;

/// A tree whose entries are slabs, by key. A floor in it is the generation that the slots of a released
/// slab continue with.
pub(super) struct SlabTree<T: Send + Sync + 'static> {
    tree: Tree,
    _slabs: PhantomData<SlabPtr<T>>,
}

impl<T: Send + Sync + 'static> SlabTree<T> {
    pub(super) fn new() -> Self {
        Self { tree: Tree::new(), _slabs: PhantomData }
    }

    /// Returns the tree of words.
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Iterates over the slabs with keys in a range.
    ///
    /// # Safety
    ///
    /// For `'g` the caller holds an RCU guard.
    pub(super) unsafe fn range<'g>(&'g self, from: u64, to: u64) -> Cursor<'g> {
        // SAFETY: the caller holds a guard for `'g`.
        unsafe { self.tree.cursor(from, to) }
    }

    /// Returns the slab that an index belongs to. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard.
    #[inline(always)]
    pub(super) unsafe fn slab<'a>(&self, index: u32) -> Option<&'a Watched<Slab<T>>> {
        // SAFETY: the caller holds a guard.
        let word = unsafe { self.tree.load(u64::from(index) >> SLAB_BITS) };
        // SAFETY: invariant 4 of `slab`: the slab was found under the caller's guard.
        slab_of(word).map(|slab| unsafe { slab.as_ref() })
    }

    /// Returns the slot of a live context. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard.
    #[inline(always)]
    pub(super) unsafe fn find<'a>(
        &self,
        id: Id,
    ) -> Result<(&'a Watched<Slab<T>>, &'a Slot<T>), LookupError> {
        // SAFETY: the caller holds a guard for `'a`.
        if let Some(slab) = unsafe { self.slab(id.index()) } {
            let slot = slab.slot(id.index());
            // Ordering: Acquire pairs with the Release in `Claim::fill`; it carries the value.
            let state = slot.state.load(Ordering::Acquire);
            if state == id.to_bits() {
                return Ok((slab, slot));
            }
        }
        // SAFETY: the caller holds a guard.
        Err(unsafe { self.lookup_error(id) })
    }

    /// Returns the reason why an id is not live.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn lookup_error(&self, id: Id) -> LookupError {
        // SAFETY: the caller holds a guard.
        let word = unsafe { self.tree.load_or_floor(u64::from(id.index()) >> SLAB_BITS) };
        let next = match slab_of::<T>(word) {
            // SAFETY: invariant 4 of `slab`: the slab was found under the caller's guard.
            Some(slab) => next_generation(unsafe { slab.as_ref() }, id.index()),
            None => floor_in(word) as u32,
        };
        if id.generation() < next { LookupError::Stale } else { LookupError::NotFound }
    }

    /// Returns the slab with the lowest key of a range.
    ///
    /// Invariant 4 of [`slab`](super::slab) says which callers may follow the pointer: those that were
    /// pinned before the call, hold the lock, or own the core of a dropped table.
    pub(super) fn next_slab(&self, from: u64, to: u64) -> Option<(u64, SlabPtr<T>)> {
        if from > to {
            return None;
        }
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        let (key, word) = unsafe { self.tree.next(from, to) }?;
        Some((key, slab_of(word)?))
    }

    /// Returns the key of the last slab, or 0 if there is no slab.
    pub(super) fn last_key(&self) -> u64 {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        unsafe { self.tree.prev(LAST_KEY) }.map_or(0, |(key, _)| key)
    }

    /// Takes every slab out and passes it to `slab`. Frees the nodes at once.
    pub(super) fn destroy(&mut self, mut slab: impl FnMut(SlabPtr<T>)) {
        self.tree.destroy(|_, word| {
            if let Some(found) = slab_of::<T>(word) {
                slab(found);
            }
        });
    }
}

/// Returns the slab that a word of the tree leads to, or `None` for a floor.
#[inline(always)]
pub(super) fn slab_of<T: Send + Sync + 'static>(word: *mut ()) -> Option<SlabPtr<T>> {
    // SAFETY: a tree with floors has no null words.
    (word.addr() & 1 == 0).then(|| unsafe { NonNull::new_unchecked(word.cast()) })
}

/// Returns the generation of the next context at `index`, or of the live one. Lower generations are
/// stale.
pub(super) fn next_generation<T: Send + Sync + 'static>(slab: &Slab<T>, index: u32) -> u32 {
    // Ordering: Relaxed; the lock orders it, or the caller uses it as a hint.
    let state = slab.slot(index).state.load(Ordering::Relaxed);
    match NotLive::read(state) {
        Some(state) => state.next(),
        None => Id::from_live(state).generation(),
    }
}
