//! Inserts with options.

use std::fmt;
use std::ops::RangeBounds;

use percpu::sync::atomic::Ordering;

use super::core::Core;
use super::ctx_table::CtxTable;
use super::error::{InsertError, InsertRefused};
use super::id::Id;
use super::insert::{Reservation, inclusive};
use super::vacancy::Claim;

/// An insert with options: a range of indexes, a weight, a cyclic search, a wait. Returned by
/// [`CtxTable::inserter`]; can be used repeatedly.
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_weight(100).build()?;
/// let heavy = table.inserter().weight(60).within(10..);
/// let id = heavy.insert("first").unwrap();
/// assert_eq!(id.index(), 10);
/// assert_eq!(heavy.insert("second").unwrap_err().reason, InsertRefused::Quota);
/// table.inserter().weight(40).reserve().unwrap().commit("third");
/// # Ok::<(), radix_ctx::AllocError>(())
/// ```
#[must_use = "nothing is inserted yet"]
pub struct Inserter<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    /// `None` is the empty range.
    range: Option<(u32, u32)>,
    weight: u64,
    cyclic: bool,
    wait: bool,
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Returns an insert with options. Without options it does what [`insert`](Self::insert) does.
    pub fn inserter(&self) -> Inserter<'_, T> {
        let range = Some((0, u32::MAX));
        Inserter { core: self.core(), range, weight: 1, cyclic: false, wait: false }
    }
}

impl<'a, T: Send + Sync + 'static> Inserter<'a, T> {
    /// Sets the weight of the context, for a table with [`max_weight`](super::Builder::max_weight); other
    /// tables ignore it. The default is 1.
    pub fn weight(mut self, weight: u64) -> Self {
        self.weight = weight;
        self
    }

    /// Uses only indexes of this range.
    pub fn within(mut self, indexes: impl RangeBounds<u32>) -> Self {
        self.range = inclusive(&indexes);
        self
    }

    /// Uses the lowest vacant index above that of the table's last cyclic insert, or the lowest of the
    /// range if there is none: see [`insert_cyclic`](CtxTable::insert_cyclic).
    pub fn cyclic(mut self) -> Self {
        self.cyclic = true;
        self
    }

    /// If no index is vacant, waits while the table has removed contexts that are still used, at any
    /// index: for grace periods, and until a reference is dropped if necessary. Does not wait for the
    /// limits of the table.
    pub fn wait(mut self) -> Self {
        self.wait = true;
        self
    }

    /// Inserts a context, and returns its id.
    ///
    /// Blocks shortly on the table's lock, and with [`wait`](Self::wait) for a vacant index. Allocates like
    /// [`insert`](CtxTable::insert).
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns the value and the reason; the call changed nothing. The checks have this
    /// order: an empty range, the weight, the limits, a range above the indexes of the table, a closed
    /// table, the indexes, memory. [`InsertRefused::Deadlock`] if it would have to wait and the calling thread holds an RCU guard or is dropping a context of this table.
    pub fn insert(&self, value: T) -> Result<Id, InsertError<T>> {
        match self.admit() {
            Ok(claim) => Ok(claim.fill(value, self.weight)),
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
        match self.reserve() {
            Ok(reservation) => {
                let id = reservation.id();
                Ok(reservation.commit(make(id)))
            }
            Err(refused) => Err(refused.map(|()| make)),
        }
    }

    /// Reserves an id for a later context. The reservation counts for the limits.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert).
    pub fn reserve(&self) -> Result<Reservation<'a, T>, InsertError<()>> {
        let claim = self.admit().map_err(|reason| InsertError::new((), reason))?;
        Ok(Reservation::new(self.core, claim, self.weight))
    }

    /// Counts a context for the limits and claims a vacant slot, after a wait if necessary.
    fn admit(&self) -> Result<Claim<'a, T>, InsertRefused> {
        let (first, last) = self.range.ok_or(InsertRefused::NoRange)?;
        loop {
            match self.admit_now(first, last) {
                Err(InsertRefused::Exhausted { pending }) if self.wait && pending != 0 => {}
                done => return done,
            }
            match self.core.flush() {
                Ok(0) => self.core.wait_for_vacancy(first, last),
                Ok(_) => {}
                Err(_) => return Err(InsertRefused::Deadlock),
            }
        }
    }

    fn admit_now(&self, first: u32, last: u32) -> Result<Claim<'a, T>, InsertRefused> {
        let core = self.core;
        if self.cyclic {
            core.quota.take(self.weight)?;
            let found = core.claim_next(first, last);
            return found.inspect_err(|_| core.quota.give_back(self.weight));
        }
        core.admit(first, last, self.weight)
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Blocks until an index of the range is vacant or a flush may make one vacant, or until no reference
    /// keeps a removed context.
    fn wait_for_vacancy(&self, first: u32, last: u32) {
        self.waiters.wait(None, || {
            // Ordering: Relaxed; the fences of `Waiters` order it.
            let unused = self.counters.referenced.load(Ordering::Relaxed) == 0;
            (unused || self.has_vacancy(first, last)).then_some(())
        });
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Inserter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Inserter");
        fields.field("range", &self.range).field("weight", &self.weight);
        fields.field("cyclic", &self.cyclic).field("wait", &self.wait).finish_non_exhaustive()
    }
}
