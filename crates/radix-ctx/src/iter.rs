//! Iteration over the live contexts, ascending by index.

use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::{fmt, slice};

use offlock_percpu::rcu::Guard;
use offlock_sync::order;

use crate::core::Core;
use crate::id::Id;
use crate::slab::{LAST_KEY, NotLive, SLAB_BITS, Slot, slab_of};
use crate::table::CtxTable;
use crate::tree::Cursor;

/// The end of an iteration: there is no index from here on.
const END: u64 = (LAST_KEY + 1) << SLAB_BITS;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Iterates over the live contexts, ascending by index.
    pub fn iter<'g>(&'g self, guard: &'g Guard) -> Iter<'g, T> {
        self.iter_from(0, guard)
    }

    /// Iterates over the live contexts with this index or a higher one.
    pub(super) fn iter_from<'g>(&'g self, index: u32, guard: &'g Guard) -> Iter<'g, T> {
        let _ = guard;
        // SAFETY: `guard` is an RCU guard, borrowed for `'g`.
        unsafe { Iter::new(self.core(), index.into()) }
    }
}

/// An iterator over the live contexts, ascending by index. Returned by [`CtxTable::iter`].
///
/// Weakly consistent: a context that is live throughout is returned once. A context that is inserted or
/// removed meanwhile may be returned or not. Indexes only ascend. Each step is wait-free. Inserts and removals do not
/// wait for an iterator.
///
/// ```
/// use radix_ctx::{CtxTable, rcu};
///
/// let table = CtxTable::new();
/// for name in ["alice", "bob"] {
///     table.insert(name)?;
/// }
/// let guard = rcu::pin();
/// let names: Vec<_> = table.iter(&guard).map(|(_id, &name)| name).collect();
/// assert_eq!(names, ["alice", "bob"]);
/// # Ok::<(), radix_ctx::InsertError<&str>>(())
/// ```
pub struct Iter<'g, T: Send + Sync + 'static> {
    _core: PhantomData<&'g Core<T>>,
    slabs: Cursor<'g>,
    /// The slots of the current slab that are left.
    slots: slice::Iter<'g, Slot<T>>,
    /// The index after the last of `slots`.
    stop: u64,
}

impl<'g, T: Send + Sync + 'static> Iter<'g, T> {
    /// Makes an iterator over the indexes from `next` on.
    ///
    /// # Safety
    ///
    /// For `'g` the caller holds an RCU guard.
    unsafe fn new(core: &'g Core<T>, next: u64) -> Self {
        let slabs = core.slabs.tree().iter_from(next >> SLAB_BITS);
        Self { slabs, slots: [].iter(), stop: next, _core: PhantomData }
    }

    fn next_index_wide(&self) -> u64 {
        self.stop - self.slots.len() as u64
    }

    /// Returns the index at which the iteration continues under another guard, or `None` at the end.
    pub(super) fn next_index(&self) -> Option<u32> {
        let next = self.next_index_wide();
        (next < END).then_some(next as u32)
    }

    /// Moves to the next slab. Returns false at the end.
    fn next_slab(&mut self) -> bool {
        let next = self.next_index_wide();
        if next >= END {
            return false;
        }
        let found = self.slabs.next();
        let Some((key, slab)) = found.and_then(|(key, word)| Some((key, slab_of::<T>(word)?)))
        else {
            self.stop = END;
            return false;
        };
        let base = key << SLAB_BITS;
        let (first, last) = (next.max(base), (key + 1) << SLAB_BITS);
        // SAFETY: invariant 4 of `slab`: the slab was found under the guard of `new`, held for `'g`.
        let it: &'g _ = unsafe { slab.as_ref() };
        self.slots = it.slots()[(first - base) as usize..(last - base) as usize].iter();
        self.stop = last;
        true
    }
}

/// Returns the id of a live slot.
#[inline(always)]
fn live<T>(slot: &Slot<T>) -> Option<Id> {
    // Ordering: Acquire pairs with the Release in `Claim::publish`; it carries the value.
    let state = slot.state.load(order!(Acquire, "iterate: the context is complete"));
    NotLive::read(state).is_none().then(|| Id::from_live(state))
}

impl<'g, T: Send + Sync + 'static> Iterator for Iter<'g, T> {
    type Item = (Id, &'g T);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            for slot in self.slots.by_ref() {
                if let Some(id) = live(slot) {
                    // SAFETY: the context was live under the guard of `new`, held for `'g`.
                    return Some((id, unsafe { slot.value() }));
                }
            }
            if !self.next_slab() {
                return None;
            }
        }
    }

    /// A loop over slots within a loop over slabs: compiles to better code than repeated `next`.
    #[inline]
    fn fold<B, F: FnMut(B, Self::Item) -> B>(mut self, init: B, mut f: F) -> B {
        let mut sum = init;
        loop {
            for slot in self.slots.by_ref() {
                if let Some(id) = live(slot) {
                    // SAFETY: the context was live under the guard of `new`, held for `'g`.
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
