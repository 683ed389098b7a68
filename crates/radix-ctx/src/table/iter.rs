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
use std::slice;

use percpu::rcu::Pinned;
use percpu::sync::atomic::Ordering;

use super::core::Core;
use super::ctx_table::CtxTable;
use super::id::Id;
use super::insert::inclusive;
use super::slab::{NotLive, SLAB_BITS, Slot};
use super::slab_tree::slab_of;
use crate::tree::Cursor;

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
        unsafe { self.core().slabs.last_live(index) }
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
        let slabs = unsafe { core.slabs.range(next >> SLAB_BITS, last >> SLAB_BITS) };
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
    NotLive::read(state).is_none().then(|| Id::from_live(state))
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
