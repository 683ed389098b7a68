//! How contexts come in.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use percpu::sync::atomic::Ordering;

use super::core::Core;
use super::ctx_table::CtxTable;
use super::error::{InsertError, InsertRefused};
use super::id::Id;
use super::vacancy::Claim;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Inserts a context at the lowest vacant index, and returns its id.
    ///
    /// An index is vacant when nobody uses its last context any more: after a removal that takes a
    /// grace period, and until the last [`CtxRef`](super::CtxRef) is gone.
    /// [`flush`](Self::flush) waits for the first.
    ///
    /// Blocks shortly on the table's lock. Allocates if no slab has a vacant slot, and if many of
    /// them only have removed contexts reclaims those first.
    ///
    /// # Errors
    ///
    /// [`InsertError`] gives the value back, and says why; nothing was changed. What is wrong is
    /// looked for in this order: the weight, the quota, the indexes, memory.
    ///
    /// [`inserter`](Self::inserter) is for other indexes and weights, and their combinations.
    #[inline]
    pub fn insert(&self, value: T) -> Result<Id, InsertError<T>> {
        self.insert_weighted(value, 1)
    }

    /// [`insert`](Self::insert) of a context that weighs `weight`, for a table with
    /// [`max_weight`](super::Builder::max_weight); other tables do not look at it.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    #[inline]
    pub fn insert_weighted(&self, value: T, weight: u64) -> Result<Id, InsertError<T>> {
        match self.core().admit(0, u32::MAX, weight) {
            Ok(claim) => Ok(claim.fill(value, weight)),
            Err(reason) => Err(InsertError::new(value, reason)),
        }
    }

    /// [`insert`](Self::insert) of what `make` makes of the id, which names nothing before `make`
    /// returns. If it panics nothing was inserted.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert); `make` was not called, and comes back.
    pub fn insert_with<F: FnOnce(Id) -> T>(&self, make: F) -> Result<Id, InsertError<F>> {
        self.inserter().insert_with(make)
    }

    /// [`insert`](Self::insert) at the lowest vacant index of a range.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert); [`InsertRefused::NoRange`] for a range without an index that the
    /// table may use. An empty one is refused before all else, one above
    /// [`max_index`](super::Builder::max_index) after the quota.
    pub fn insert_in(
        &self,
        indexes: impl RangeBounds<u32>,
        value: T,
    ) -> Result<Id, InsertError<T>> {
        self.inserter().within(indexes).insert(value)
    }

    /// [`insert`](Self::insert) at the lowest vacant index above that of the last cyclic insert, or
    /// from 0 on if there is none: indexes come again as late as possible.
    ///
    /// The index alone tells of a wrap: it is not above that of the call before. Calls of several
    /// threads take turns, so that each begins where another has ended.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    pub fn insert_cyclic(&self, value: T) -> Result<Id, InsertError<T>> {
        self.inserter().cyclic().insert(value)
    }

    /// [`insert`](Self::insert), which waits where only removed contexts are in the way.
    ///
    /// Blocks for grace periods, and until a reference is gone if it must.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert); [`InsertRefused::Deadlock`] if it would have to wait, and this
    /// thread holds an RCU guard or is dropping a context of this table.
    pub fn insert_wait(&self, value: T) -> Result<Id, InsertError<T>> {
        self.inserter().wait().insert(value)
    }

    /// Takes an id for a context that is yet to come. Counts for the quota, with weight 1.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    pub fn reserve(&self) -> Result<Reservation<'_, T>, InsertError<()>> {
        self.inserter().reserve()
    }

    /// Makes room for `contexts` more, so that as many inserts at the lowest vacant index allocate
    /// nothing, as long as nobody else inserts.
    ///
    /// # Errors
    ///
    /// What an insert would have said; the room that was made stays.
    pub fn try_reserve(&self, contexts: u32) -> Result<(), InsertRefused> {
        self.core().make_room(contexts)
    }

    /// The index that the next [`insert`](Self::insert) would use, if nobody else inserts; `None` if
    /// none is vacant.
    pub fn next_free(&self) -> Option<u32> {
        self.core().next_free()
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// A vacant slot, and a place in the quota.
    #[inline]
    pub(super) fn admit(
        &self,
        first: u32,
        last: u32,
        weight: u64,
    ) -> Result<Claim<'_, T>, InsertRefused> {
        self.quota.take(weight)?;
        self.claim(first, last).inspect_err(|_| self.quota.give_back(weight))
    }
}

/// The first and the last index of a range; nothing if it is empty.
pub(super) fn inclusive(range: &impl RangeBounds<u32>) -> Option<(u32, u32)> {
    let first = match range.start_bound() {
        Bound::Included(&first) => first,
        Bound::Excluded(&before) => before.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let last = match range.end_bound() {
        Bound::Included(&last) => last,
        Bound::Excluded(&after) => after.checked_sub(1)?,
        Bound::Unbounded => u32::MAX,
    };
    (first <= last).then_some((first, last))
}

/// An id that names nothing yet: [`commit`](Self::commit) gives it a context, a drop gives it back.
/// From [`CtxTable::reserve`].
#[must_use = "a reservation that is dropped is given back"]
pub struct Reservation<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    /// `None` once committed.
    claim: Option<Claim<'a, T>>,
    weight: u64,
}

impl<'a, T: Send + Sync + 'static> Reservation<'a, T> {
    /// Of a claim that counts for the quota.
    pub(super) fn new(core: &'a Core<T>, claim: Claim<'a, T>, weight: u64) -> Self {
        // Ordering: Relaxed; a statistic.
        core.counters.reserved.fetch_add(1, Ordering::Relaxed);
        Self { core, claim: Some(claim), weight }
    }
}

impl<T: Send + Sync + 'static> Reservation<'_, T> {
    /// What the context will be named. Lookups say [`NotFound`](super::LookupError::NotFound) until
    /// then.
    #[must_use]
    pub fn id(&self) -> Id {
        self.claim.as_ref().expect("there until it is committed").id()
    }

    /// Gives the id its context. Wait-free; cannot fail.
    pub fn commit(mut self, value: T) -> Id {
        let claim = self.claim.take().expect("there until it is committed");
        let id = claim.fill(value, self.weight);
        // Ordering: Relaxed; a statistic.
        self.core.counters.reserved.fetch_sub(1, Ordering::Relaxed);
        id
    }
}

impl<T: Send + Sync + 'static> Drop for Reservation<'_, T> {
    fn drop(&mut self) {
        if self.claim.take().is_some() {
            // Ordering: Relaxed; a statistic.
            self.core.counters.reserved.fetch_sub(1, Ordering::Relaxed);
            self.core.quota.give_back(self.weight);
        }
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Reservation<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reservation").field(&self.claim.as_ref().map(Claim::id)).finish()
    }
}
