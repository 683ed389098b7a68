//! Walks over the live contexts, ascending by index.
//!
//! A walk is weakly consistent: a context that is live from its begin to its end is seen once; one
//! that is inserted or removed meanwhile is seen or not; none is seen twice, unless an index is used
//! again ahead of the walk, and then by two ids. Inserts and removals never wait for a walk, nor it
//! for them.

use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::ptr::NonNull;
use std::slice;

use percpu::rcu::{self, Pinned};
use percpu::sync::atomic::Ordering;

use super::CtxTable;
use super::core::{Core, slab_of};
use super::id::Id;
use super::insert::inclusive;
use super::slab::{Gone, SLAB_BITS, SLOTS, SlabPtr, Slot};
use crate::tree::{Cursor, Which};

/// The key of the slab with the highest index.
pub(super) const LAST_KEY: u64 = u32::MAX as u64 >> SLAB_BITS;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// The live contexts, ascending by index. See [`Iter`] for what it sees of changes.
    pub fn iter<'g>(&'g self, guard: &'g impl Pinned) -> Iter<'g, T> {
        self.range(.., guard)
    }

    /// The live contexts with an index in a range, ascending.
    pub fn range<'g>(
        &'g self,
        indexes: impl RangeBounds<u32>,
        guard: &'g impl Pinned,
    ) -> Iter<'g, T> {
        let _ = guard;
        let (next, end) =
            inclusive(&indexes).map_or((0, 0), |(first, last)| (first.into(), u64::from(last) + 1));
        // SAFETY: the guard, which is borrowed for `'g`.
        unsafe { Iter::new(self.core(), next, end) }
    }

    /// The first live context at `index` or above. Wait-free.
    pub fn next<'g>(&'g self, index: u32, guard: &'g impl Pinned) -> Option<(Id, &'g T)> {
        self.range(index.., guard).next()
    }

    /// The last live context at `index` or below. Wait-free.
    pub fn prev<'g>(&'g self, index: u32, guard: &'g impl Pinned) -> Option<(Id, &'g T)> {
        let _ = guard;
        // SAFETY: the guard.
        unsafe { self.core().last_live(index) }
    }
}

/// Live contexts, ascending by index. From [`CtxTable::iter`] and [`CtxTable::range`].
///
/// Weakly consistent: what is live throughout is seen once; what comes or goes meanwhile may be seen
/// or not; indexes only ascend. [`next_index`](Self::next_index) is where a later walk can go on, under
/// another guard. Each step is wait-free, and skips removed contexts and absent slabs.
pub struct Iter<'g, T: Send + Sync + 'static> {
    _core: PhantomData<&'g Core<T>>,
    slabs: Cursor<'g, true>,
    /// What is left of a slab.
    slots: slice::Iter<'g, Slot<T>>,
    /// The index after the last of `slots`.
    stop: u64,
    end: u64,
}

impl<'g, T: Send + Sync + 'static> Iter<'g, T> {
    /// # Safety
    ///
    /// For `'g` the caller holds an RCU guard.
    unsafe fn new(core: &'g Core<T>, next: u64, end: u64) -> Self {
        let last = end.max(1) - 1;
        // SAFETY: the caller's guard.
        let slabs = unsafe { core.slabs(next >> SLAB_BITS, last >> SLAB_BITS) };
        Self { slabs, slots: [].iter(), stop: next, end, _core: PhantomData }
    }

    fn next_index_wide(&self) -> u64 {
        self.stop - self.slots.len() as u64
    }

    /// The index that the walk comes to next: `table.range(next_index.., ..)` goes on from there. `None`
    /// at the end.
    #[must_use]
    pub fn next_index(&self) -> Option<u32> {
        let next = self.next_index_wide();
        (next < self.end).then_some(next as u32)
    }

    /// Takes the next slab. False at the end.
    fn next_slab(&mut self) -> bool {
        let next = self.next_index_wide();
        if next >= self.end {
            return false;
        }
        let found = self.slabs.next();
        let Some((key, slab)) = found.and_then(|(key, word)| Some((key, slab_of::<T>(word)?)))
        else {
            self.stop = self.end;
            return false;
        };
        let base = key << SLAB_BITS;
        let (first, last) = (next.max(base), self.end.min((key + 1) << SLAB_BITS));
        // SAFETY: invariant 4 of `slab`: found under the guard of `new`, which is there for `'g`.
        let it: &'g _ = unsafe { slab.as_ref() };
        self.slots = it.slots()[(first - base) as usize..(last - base) as usize].iter();
        self.stop = last;
        true
    }
}

/// The id of the context in a slot, if that is live.
#[inline(always)]
fn live<T>(slot: &Slot<T>) -> Option<Id> {
    // Ordering: Acquire pairs with the Release in `fill`; it carries the value.
    let state = slot.state.load(Ordering::Acquire);
    Gone::read(state).is_none().then(|| Id::from_live(state))
}

impl<'g, T: Send + Sync + 'static> Iterator for Iter<'g, T> {
    type Item = (Id, &'g T);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            for slot in self.slots.by_ref() {
                if let Some(id) = live(slot) {
                    // SAFETY: live a moment ago, under the guard of `new`.
                    return Some((id, unsafe { slot.value() }));
                }
            }
            if !self.next_slab() {
                return None;
            }
        }
    }

    /// A loop within a loop, which compilers like better than `next`.
    #[inline]
    fn fold<B, F: FnMut(B, Self::Item) -> B>(mut self, init: B, mut f: F) -> B {
        let mut sum = init;
        loop {
            for slot in self.slots.by_ref() {
                if let Some(id) = live(slot) {
                    // SAFETY: live a moment ago, under the guard of `new`.
                    sum = f(sum, (id, unsafe { slot.value() }));
                }
            }
            if !self.next_slab() {
                return sum;
            }
        }
    }
}

impl<T: Send + Sync + 'static> FusedIterator for Iter<'_, T> {}

impl<T: Send + Sync + 'static> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("next_index", &self.next_index()).finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// The slab with the lowest key of a range. By invariant 4 of [`slab`](super::slab) it may be
    /// followed by who was pinned before the call, or had the lock, or the core of a dropped table.
    pub(super) fn next_slab(&self, from: u64, to: u64) -> Option<(u64, SlabPtr<T>)> {
        if from > to {
            return None;
        }
        let _guard = rcu::pin();
        // SAFETY: the guard.
        let (key, word) = unsafe { self.tree().next(from, to, Which::Present) }?;
        Some((key, slab_of(word)?))
    }

    /// The key of the last slab; 0 if there is none.
    pub(super) fn last_key(&self) -> u64 {
        let _guard = rcu::pin();
        // SAFETY: the guard.
        unsafe { self.tree().prev(LAST_KEY) }.map_or(0, |(key, _)| key)
    }

    /// # Safety
    ///
    /// The caller holds an RCU guard for `'g`.
    unsafe fn last_live<'g>(&self, index: u32) -> Option<(Id, &'g T)> {
        let mut from = u64::from(index);
        loop {
            // SAFETY: the caller's guard.
            let (key, word) = unsafe { self.tree().prev(from >> SLAB_BITS) }?;
            let slab: NonNull<_> = slab_of::<T>(word)?;
            // SAFETY: invariant 4 of `slab`: found under the caller's guard.
            let it = unsafe { slab.as_ref() };
            let last = from.min((key << SLAB_BITS) | (SLOTS as u64 - 1));
            for index in (key << SLAB_BITS..=last).rev() {
                let slot = it.slot(index as u32);
                // Ordering: Acquire pairs with the Release in `fill`; it carries the value.
                let state = slot.state.load(Ordering::Acquire);
                if Gone::read(state).is_none() {
                    // SAFETY: live a moment ago, under the caller's guard.
                    return Some((Id::from_live(state), unsafe { slot.value() }));
                }
            }
            from = (key << SLAB_BITS).checked_sub(1)?;
        }
    }
}
