//! Reservations: indexes that are taken and have no entry yet.

use std::ops::RangeBounds;
use std::ptr;

use super::array::{XArray, bounds};
use super::entry::{Entry, RESERVED};
use super::error::{AllocateError, CommitError, InsertError, ReserveError};

/// An index that is reserved for a later entry. Returned by [`XArray::reserve`] and
/// [`XArray::reserve_lowest`].
///
/// [`commit`](Self::commit) puts an entry there. The drop releases the index. [`keep`](Self::keep) leaves
/// the index reserved without a guard.
///
/// [`XArray::store`] refuses a reserved index, and the `erase` functions ignore it. [`XArray::commit`] and
/// [`XArray::release`] are for indexes without a guard, after `keep`. They do not check this: for the index
/// of a `Reservation` they would end the reservation.
///
/// ```
/// use radix_ctx::rcu::Owned;
/// use radix_ctx::XArray;
///
/// let names = XArray::<Owned<String>>::new();
/// let slot = names.reserve_lowest(1..)?;
/// let name = Owned::new(format!("session {}", slot.index()));
/// slot.commit(name)?;
/// assert!(names.contains(1));
///
/// drop(names.reserve(2)?);
/// assert_eq!(names.next_free(1..), Some(2));
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use = "dropping the reservation releases the index"]
#[derive(Debug)]
pub struct Reservation<'a, P: Entry> {
    array: &'a XArray<P>,
    index: u64,
}

impl<P: Entry> Reservation<'_, P> {
    /// Returns the reserved index.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Puts `entry` at the reserved index. Blocks shortly on the lock. Never allocates.
    ///
    /// # Errors
    ///
    /// [`CommitError`] returns `entry` if another call has ended the reservation by its index.
    pub fn commit(self, entry: P) -> Result<(), CommitError<P>> {
        self.array.commit(self.index, entry)?;
        std::mem::forget(self);
        Ok(())
    }

    /// Leaves the index reserved, and returns it. [`XArray::commit`] or [`XArray::release`] ends the
    /// reservation later.
    pub fn keep(self) -> u64 {
        let index = self.index;
        std::mem::forget(self);
        index
    }
}

impl<P: Entry> Drop for Reservation<'_, P> {
    /// Releases the index, unless another call has ended the reservation.
    fn drop(&mut self) {
        self.array.release(self.index);
    }
}

impl<P: Entry> XArray<P> {
    /// Reserves `index`, which must have neither an entry nor a reservation.
    ///
    /// A reserved index reads as absent, but the array is not empty, and `insert`, `alloc` and `store` do
    /// not use the index. Blocks shortly on the lock. Allocates if the index needs new nodes.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; the array has not changed.
    pub fn reserve(&self, index: u64) -> Result<Reservation<'_, P>, ReserveError> {
        let locked = self.lock();
        match locked.get(index) {
            there if there.is_null() => {}
            RESERVED => return Err(ReserveError::Reserved),
            _ => return Err(ReserveError::Present),
        }
        let slot = locked.edit.make_slot(index).map_err(|_| ReserveError::NoMemory)?;
        locked.put(slot, RESERVED);
        Ok(Reservation { array: self, index })
    }

    /// Reserves the lowest free index of `range`.
    ///
    /// Blocks shortly on the lock. Allocates if the index needs new nodes.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; the array has not changed.
    pub fn reserve_lowest(
        &self,
        range: impl RangeBounds<u64>,
    ) -> Result<Reservation<'_, P>, ReserveError> {
        let (from, to) = bounds(range).ok_or(ReserveError::Exhausted)?;
        let locked = self.lock();
        let index = locked.edit.first_not_full(from, to).ok_or(ReserveError::Exhausted)?;
        let slot = locked.edit.make_slot(index).map_err(|_| ReserveError::NoMemory)?;
        locked.put(slot, RESERVED);
        Ok(Reservation { array: self, index })
    }

    /// Puts `entry` at an index that was reserved and [kept](Reservation::keep). For the index of a
    /// [`Reservation`], this call would end the reservation.
    ///
    /// Blocks shortly on the lock. Never allocates.
    ///
    /// # Errors
    ///
    /// [`CommitError`] returns `entry` if the index is not reserved; the array has not changed.
    pub fn commit(&self, index: u64, entry: P) -> Result<(), CommitError<P>> {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return Err(CommitError::Lost(entry)) };
        if locked.edit.get(slot) != RESERVED {
            return Err(CommitError::Lost(entry));
        }
        locked.put(slot, entry.into_word());
        Ok(())
    }

    /// Releases an index that was reserved and [kept](Reservation::keep), and returns true. Returns false
    /// if the index is not reserved; an entry there stays. For the index of a [`Reservation`], this call
    /// would end the reservation.
    ///
    /// Blocks shortly on the lock. Never allocates.
    pub fn release(&self, index: u64) -> bool {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return false };
        let is_reserved = locked.edit.get(slot) == RESERVED;
        if is_reserved {
            locked.put(slot, ptr::null_mut());
        }
        is_reserved
    }

    /// Inserts the entry that `make` returns for `index`. The index is reserved while `make` runs, without
    /// the lock. If `make` panics, the index is released.
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns `make` if it was not called, because the index is in use or there is no
    /// memory. It returns `None` if another call has ended the reservation while `make` ran; the new entry
    /// is dropped then.
    pub fn insert_with<F: FnOnce(u64) -> P>(
        &self,
        index: u64,
        make: F,
    ) -> Result<(), InsertError<Option<F>>> {
        let reservation = match self.reserve(index) {
            Ok(reservation) => reservation,
            Err(ReserveError::Reserved) => return Err(InsertError::Reserved(Some(make))),
            Err(ReserveError::NoMemory) => return Err(InsertError::NoMemory(Some(make))),
            Err(_) => return Err(InsertError::Present(Some(make))),
        };
        let entry = make(index);
        reservation.commit(entry).map_err(|error| InsertError::from(error).map(|_| None))
    }

    /// Inserts the entry that `make` returns for the lowest free index of `range`, and returns the index.
    /// The index is reserved while `make` runs, without the lock. If `make` panics, the index is released.
    ///
    /// ```
    /// use radix_ctx::rcu::Owned;
    /// use radix_ctx::XArray;
    ///
    /// let names = XArray::new();
    /// let id = names.alloc_with(100.., |id| Owned::new(format!("session {id}"))).unwrap();
    /// assert_eq!(names.with(id, String::clone), Some("session 100".into()));
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocateError`] returns `make` if it was not called. It returns `None` if another call has ended the
    /// reservation while `make` ran; the new entry is dropped then.
    pub fn alloc_with<F: FnOnce(u64) -> P>(
        &self,
        range: impl RangeBounds<u64>,
        make: F,
    ) -> Result<u64, AllocateError<Option<F>>> {
        let reservation = match self.reserve_lowest(range) {
            Ok(reservation) => reservation,
            Err(ReserveError::NoMemory) => return Err(AllocateError::NoMemory(Some(make))),
            Err(_) => return Err(AllocateError::Exhausted(Some(make))),
        };
        let index = reservation.index();
        let entry = make(index);
        match reservation.commit(entry) {
            Ok(()) => Ok(index),
            Err(CommitError::Lost(_)) => Err(AllocateError::Lost(None)),
        }
    }
}
