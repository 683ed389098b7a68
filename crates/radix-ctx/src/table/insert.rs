//! Inserts.

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
    /// are those of removed contexts, reclaims them first, which runs their drops.
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns the value and the reason; the call changed nothing.
    #[inline]
    pub fn insert(&self, value: T) -> Result<Id, InsertError<T>> {
        match self.core().admit() {
            Ok(claim) => Ok(claim.fill(value)),
            Err(reason) => Err(InsertError { value, reason }),
        }
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Counts a context for the limit and claims a vacant slot.
    #[inline]
    pub(super) fn admit(&self) -> Result<Claim<'_, T>, InsertRefused> {
        self.quota.take().map_err(|limit| InsertRefused::Quota { limit })?;
        self.claim().inspect_err(|_| self.quota.give_back(1))
    }
}
