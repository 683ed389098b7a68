//! Reserved indices: taken, but without an entry.

use std::ops::RangeBounds;
use std::ptr;

use super::array::{XArray, bounds};
use super::entry::{Entry, RESERVED};
use super::error::{AllocateError, CommitError, InsertError, ReserveError};

/// An index that nobody else gets. Filled by [`commit`](Reservation::commit), released by a drop.
///
/// Nothing else ends it: [`store`](XArray::store) is refused, and [`erase`](XArray::erase) and
/// [`erase_range`](XArray::erase_range) leave it alone. But [`XArray::release`] and [`XArray::commit`],
/// which are for the indices that [`keep`](Reservation::keep) leaves, are told an index and take the
/// caller's word for it: one with a guard is not to be given to them.
///
/// # Examples
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
#[must_use = "dropping it releases the index"]
#[derive(Debug)]
pub struct Reservation<'a, P: Entry> {
    array: &'a XArray<P>,
    index: u64,
}

impl<P: Entry> Reservation<'_, P> {
    /// The index.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Puts `entry` there. Blocks for the lock. Never allocates.
    ///
    /// # Errors
    ///
    /// [`CommitError`] gives `entry` back. The reservation is released, if it is still there.
    pub fn commit(self, entry: P) -> Result<(), CommitError<P>> {
        self.array.commit(self.index, entry)?;
        std::mem::forget(self);
        Ok(())
    }

    /// Leaves the index reserved, until it is filled by [`XArray::commit`] or let go by
    /// [`XArray::release`]. Returns it.
    pub fn keep(self) -> u64 {
        let index = self.index;
        std::mem::forget(self);
        index
    }
}

impl<P: Entry> Drop for Reservation<'_, P> {
    /// Releases the index, unless it was filled meanwhile.
    fn drop(&mut self) {
        self.array.release(self.index);
    }
}

impl<P: Entry> XArray<P> {
    /// Reserves `index`, where there must be neither an entry nor a reservation.
    ///
    /// Until it is committed or released it reads as absent, but the array is not empty, and neither
    /// [`insert`](XArray::insert) nor [`alloc`](XArray::alloc) nor [`store`](XArray::store) takes it.
    /// Blocks for the lock; allocates if the index is new.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; nothing has changed.
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
    /// Blocks for the lock; allocates if the index is new.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; nothing has changed.
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

    /// Puts `entry` at an index that was reserved and [kept](Reservation::keep). Of one that still has
    /// its [`Reservation`], it would take the place.
    ///
    /// Blocks for the lock. Never allocates.
    ///
    /// # Errors
    ///
    /// [`CommitError`] gives `entry` back; nothing has changed.
    pub fn commit(&self, index: u64, entry: P) -> Result<(), CommitError<P>> {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return Err(CommitError::Lost(entry)) };
        if locked.edit.get(slot) != RESERVED {
            return Err(CommitError::Lost(entry));
        }
        locked.put(slot, entry.into_word());
        Ok(())
    }

    /// Lets an index go that was reserved and [kept](Reservation::keep). Of one that still has its
    /// [`Reservation`], it would let others have it. Returns false, and does nothing, if it is not
    /// reserved: an entry there stays.
    ///
    /// Blocks for the lock. Never allocates.
    pub fn release(&self, index: u64) -> bool {
        let locked = self.lock();
        let Some(slot) = locked.edit.slot(index) else { return false };
        let is_reserved = locked.edit.get(slot) == RESERVED;
        if is_reserved {
            locked.put(slot, ptr::null_mut());
        }
        is_reserved
    }

    /// [`insert`](XArray::insert)s what `f` makes of the index, which is reserved meanwhile. `f` runs
    /// without the lock, and not at all if the index is taken; if it panics the index is released.
    ///
    /// # Errors
    ///
    /// [`InsertError`] gives `f` back, as it was not called. What it made is dropped where somebody ended
    /// the reservation by its index meanwhile: then `None` comes back.
    pub fn insert_with<F: FnOnce(u64) -> P>(
        &self,
        index: u64,
        f: F,
    ) -> Result<(), InsertError<Option<F>>> {
        let reservation = match self.reserve(index) {
            Ok(reservation) => reservation,
            Err(ReserveError::Reserved) => return Err(InsertError::Reserved(Some(f))),
            Err(ReserveError::NoMemory) => return Err(InsertError::NoMemory(Some(f))),
            Err(_) => return Err(InsertError::Present(Some(f))),
        };
        let entry = f(index);
        reservation.commit(entry).map_err(|error| InsertError::from(error).map(|_| None))
    }

    /// [`alloc`](XArray::alloc)s an index for what `f` makes of it, without the lock, as
    /// [`insert_with`](XArray::insert_with) does.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] gives `f` back if it was not called.
    ///
    /// # Examples
    ///
    /// ```
    /// use radix_ctx::rcu::Owned;
    /// use radix_ctx::XArray;
    ///
    /// let names = XArray::new();
    /// let id = names.alloc_with(100.., |id| Owned::new(format!("session {id}"))).unwrap();
    /// assert_eq!(names.with(id, String::clone), Some("session 100".into()));
    /// ```
    pub fn alloc_with<F: FnOnce(u64) -> P>(
        &self,
        range: impl RangeBounds<u64>,
        f: F,
    ) -> Result<u64, AllocateError<Option<F>>> {
        let reservation = match self.reserve_lowest(range) {
            Ok(reservation) => reservation,
            Err(ReserveError::NoMemory) => return Err(AllocateError::NoMemory(Some(f))),
            Err(_) => return Err(AllocateError::Exhausted(Some(f))),
        };
        let index = reservation.index();
        let entry = f(index);
        match reservation.commit(entry) {
            Ok(()) => Ok(index),
            Err(CommitError::Lost(_)) => Err(AllocateError::Lost(None)),
        }
    }
}
