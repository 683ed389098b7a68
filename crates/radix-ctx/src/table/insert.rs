//! Inserts and reservations.

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
    /// The index of a removed context becomes vacant when its readers have left, after a grace period,
    /// and its last [`CtxRef`](super::CtxRef) is dropped. [`flush`](Self::flush) waits for the readers.
    ///
    /// Blocks shortly on the table's lock. Allocates a slab if no slab has a vacant slot; if many slots
    /// are those of removed contexts, reclaims them first. [`inserter`](Self::inserter) is for other
    /// indexes and weights, and their combinations.
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns the value and the reason; the call changed nothing. The checks have this
    /// order: the weight, the limits, a closed table, the indexes, memory.
    #[inline]
    pub fn insert(&self, value: T) -> Result<Id, InsertError<T>> {
        self.insert_weighted(value, 1)
    }

    /// Inserts a context that counts `weight` for the limit of the table
    /// ([`max_weight`](super::Builder::max_weight)). A table without that limit ignores the weight.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    #[inline]
    pub fn insert_weighted(&self, value: T, weight: u64) -> Result<Id, InsertError<T>> {
        match self.core().admit(0, u32::MAX, weight) {
            Ok(claim) => Ok(claim.fill(value, weight)),
            Err(reason) => Err(InsertError::new(value, reason)),
        }
    }

    /// Inserts the context that `make` returns for its id. Lookups of the id fail until `make` has
    /// returned. If `make` panics, no context is inserted.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert); the error returns `make`, which was not called.
    pub fn insert_with<F: FnOnce(Id) -> T>(&self, make: F) -> Result<Id, InsertError<F>> {
        self.inserter().insert_with(make)
    }

    /// Inserts a context at the lowest vacant index of a range.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert), and [`InsertRefused::NoRange`] for a range without an index
    /// of the table. An empty range is refused before all other checks, a range above
    /// [`max_index`](super::Builder::max_index) after the check of the limits.
    pub fn insert_in(
        &self,
        indexes: impl RangeBounds<u32>,
        value: T,
    ) -> Result<Id, InsertError<T>> {
        self.inserter().within(indexes).insert(value)
    }

    /// Inserts a context at the lowest vacant index above the index of the last cyclic insert, or at the
    /// lowest vacant index if there is none. So an index is used again as late as possible.
    ///
    /// An index that is not above that of the previous call shows that the search wrapped. Each call
    /// begins where the last one of any thread has ended.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    pub fn insert_cyclic(&self, value: T) -> Result<Id, InsertError<T>> {
        self.inserter().cyclic().insert(value)
    }

    /// Inserts a context, and waits if only the indexes of removed contexts are left.
    ///
    /// Blocks for grace periods, and until a reference is dropped if necessary. A [`CtxRef`](super::CtxRef)
    /// that the calling thread holds is not noticed: the wait for it does not end. [`close`](Self::close)
    /// ends the wait.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert), and [`InsertRefused::Deadlock`] if it would have to wait and
    /// the calling thread holds an RCU guard or is dropping a context of this table.
    pub fn insert_wait(&self, value: T) -> Result<Id, InsertError<T>> {
        self.inserter().wait().insert(value)
    }

    /// Reserves an id for a later context. The reservation counts as a context of weight 1.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    pub fn reserve(&self) -> Result<Reservation<'_, T>, InsertError<()>> {
        self.inserter().reserve()
    }

    /// Refuses every insert and reservation from now on, with [`InsertRefused::Closed`]. There is no way
    /// back.
    ///
    /// Lookups, references and removals work as before. An insert on another thread that has its id
    /// already, and a [`Reservation`], still insert their contexts. Blocks shortly on the table's lock.
    ///
    /// ```
    /// use radix_ctx::{CtxTable, InsertRefused};
    ///
    /// let sessions = CtxTable::new();
    /// sessions.insert("alice")?;
    /// sessions.close();
    /// assert_eq!(sessions.insert("bob").unwrap_err().reason, InsertRefused::Closed);
    /// assert_eq!(sessions.remove_all()?, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&self) {
        self.core().close();
    }

    /// Returns whether [`close`](Self::close) was called. Blocks shortly on the table's lock.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().lock().closed
    }

    /// Allocates slabs for `contexts` more contexts. That many inserts at the lowest vacant index then
    /// allocate nothing, if no other thread inserts.
    ///
    /// # Errors
    ///
    /// [`InsertRefused::Exhausted`] or [`InsertRefused::Alloc`]. The table keeps the slabs that were made.
    pub fn try_reserve(&self, contexts: u32) -> Result<(), InsertRefused> {
        self.core().make_room(contexts)
    }

    /// Returns the index that the next [`insert`](Self::insert) would use if no other thread inserts, or
    /// `None` if no index is vacant or the table is closed.
    pub fn next_free(&self) -> Option<u32> {
        self.core().next_free()
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Counts a context for the limits and claims a vacant slot.
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

/// Returns the first and the last index of a range, or `None` if it is empty.
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

/// An id that is reserved for a later context. Returned by [`CtxTable::reserve`].
///
/// [`commit`](Self::commit) inserts the context. The drop makes the index vacant again.
///
/// ```
/// use radix_ctx::{CtxTable, LookupError};
///
/// let requests = CtxTable::new();
/// let reservation = requests.reserve()?;
/// let id = reservation.id(); // send it to a peer, then:
/// assert_eq!(requests.with(id, |_| ()), Err(LookupError::NotFound));
/// reservation.commit("the state of the request");
/// assert!(requests.contains(id));
/// # Ok::<(), radix_ctx::InsertError<()>>(())
/// ```
#[must_use = "dropping the reservation makes the index vacant again"]
pub struct Reservation<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    /// `None` after the commit.
    claim: Option<Claim<'a, T>>,
    weight: u64,
}

impl<'a, T: Send + Sync + 'static> Reservation<'a, T> {
    /// Makes the reservation of a claim that counts for the limits.
    pub(super) fn new(core: &'a Core<T>, claim: Claim<'a, T>, weight: u64) -> Self {
        // Ordering: Relaxed; a statistic.
        core.counters.reserved.fetch_add(1, Ordering::Relaxed);
        Self { core, claim: Some(claim), weight }
    }
}

impl<T: Send + Sync + 'static> Reservation<'_, T> {
    /// Returns the id of the context. Lookups return [`NotFound`](super::LookupError::NotFound) until the
    /// commit.
    #[must_use]
    pub fn id(&self) -> Id {
        self.claim.as_ref().expect("a reservation has a claim until its commit").id()
    }

    /// Inserts the context of the id. Wait-free; cannot fail.
    pub fn commit(mut self, value: T) -> Id {
        let claim = self.claim.take().expect("a reservation has a claim until its commit");
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
