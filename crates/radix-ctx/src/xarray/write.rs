//! Changes of an array: store, insert, erase, compare-exchange.

use std::ops::RangeBounds;
use std::ptr;

use percpu::AllocError;
use percpu::rcu::{Batch, Pinned};
use percpu::sync::WordGuard;

use super::array::{Out, Ref, XArray, bounds};
use super::counts::Counts;
use super::cycle::Cycle;
use super::entry::{Entry, RESERVED, is_none};
use super::error::{
    CompareExchangeError, CompareExchangeReason as Reason, InsertError, StoreError,
};
use crate::tree::{Edit, Filter, Slot, Word};

/// The number of entries that `erase_range` removes before it releases the lock for a moment. A guess.
const CHUNK: usize = 256;

/// A change of an array. The drop releases the lock and then retires removed nodes: fields are dropped in
/// this order.
pub(super) struct Locked<'a> {
    pub(super) cycle: WordGuard<'a, Cycle>,
    pub(super) edit: Edit<'a, false>,
    counts: &'a Counts,
}

impl Locked<'_> {
    /// Puts a word into a slot, counts the change, and returns the old word.
    pub(super) fn put(&self, slot: Slot<'_>, word: Word) -> Word {
        let old = self.edit.set(slot, word);
        if old.is_null() && !word.is_null() {
            self.edit.set_full(slot);
        }
        let is_entry = |word| i64::from(!is_none(word));
        let is_reserved = |word| i64::from(word == RESERVED);
        self.counts.add_entries(is_entry(word) - is_entry(old));
        if old == RESERVED || word == RESERVED {
            self.counts.add_reserved(is_reserved(word) - is_reserved(old));
        }
        old
    }

    /// Returns the word at `index`: null if there is neither an entry nor a reservation.
    pub(super) fn get(&self, index: u64) -> Word {
        self.edit.slot(index).map_or(ptr::null_mut(), |slot| self.edit.get(slot))
    }

    /// Checks the counters and the full bits. Panics with the first violation.
    pub(super) fn validate_counts(&self, counts: &Counts) {
        // SAFETY: the lock makes this thread the writer.
        let mut cursor = unsafe { self.edit.tree().cursor(0, u64::MAX, Filter::Present) };
        let (mut entries, mut reserved) = (0, 0);
        while let Some((index, word)) = cursor.next() {
            if word == RESERVED {
                reserved += 1
            } else {
                entries += 1
            }
            assert_ne!(self.edit.first_not_full(index, index), Some(index), "{index} is not free");
        }
        assert_eq!((entries, reserved), (counts.entries(), counts.reserved()));
    }
}

/// Converts a word that was removed from an array into the removed entry, if it was one.
///
/// # Safety
///
/// The word was removed from an array of `P`, and is converted once.
pub(super) unsafe fn out<P: Entry>(word: Word) -> Option<Out<P>> {
    if is_none(word) {
        return None;
    }
    // SAFETY: the word is an entry that was removed and is converted once.
    Some(unsafe { P::unlinked(word) })
}

impl<P: Entry> XArray<P> {
    pub(super) fn lock(&self) -> Locked<'_> {
        let cycle = self.lock.lock();
        // SAFETY: `lock` locks all changes of the tree, and is released when the edit ends.
        let edit = unsafe { self.tree.edit() };
        Locked { cycle, edit, counts: &self.counts }
    }

    /// Stores `entry` at `index`, and returns the entry that it replaces. The new entry keeps the marks of
    /// the old one.
    ///
    /// Blocks shortly on the lock. Allocates if the index needs new nodes.
    ///
    /// ```
    /// use radix_ctx::xarray::{Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// assert_eq!(array.store(3, 1.into())?, None);
    /// assert_eq!(array.store(3, 2.into())?, Some(1.into()));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] returns `entry`; the array has not changed.
    pub fn store(&self, index: u64, entry: P) -> Result<Option<Out<P>>, StoreError<P>> {
        let locked = self.lock();
        let Ok(slot) = locked.edit.make_slot(index) else {
            return Err(StoreError::NoMemory(entry));
        };
        if locked.edit.get(slot) == RESERVED {
            return Err(StoreError::Reserved(entry));
        }
        let old = locked.put(slot, entry.into_word());
        // SAFETY: `put` removed the word, which is converted here only.
        Ok(unsafe { out::<P>(old) })
    }

    /// Inserts `entry` at `index`, which must have neither an entry nor a reservation.
    ///
    /// Blocks shortly on the lock. Allocates if the index needs new nodes.
    ///
    /// ```
    /// use radix_ctx::xarray::{InsertError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// array.insert(3, 1.into())?;
    /// assert_eq!(array.insert(3, 2.into()), Err(InsertError::Present(2.into())));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns `entry`; the array has not changed.
    pub fn insert(&self, index: u64, entry: P) -> Result<(), InsertError<P>> {
        let locked = self.lock();
        match locked.get(index) {
            there if there.is_null() => {}
            RESERVED => return Err(InsertError::Reserved(entry)),
            _ => return Err(InsertError::Present(entry)),
        }
        let Ok(slot) = locked.edit.make_slot(index) else {
            return Err(InsertError::NoMemory(entry));
        };
        locked.put(slot, entry.into_word());
        Ok(())
    }

    /// Removes the entry at `index` and its marks, and returns the entry. A reservation stays.
    ///
    /// Blocks shortly on the lock. Never allocates.
    pub fn erase(&self, index: u64) -> Option<Out<P>> {
        let locked = self.lock();
        let slot = locked.edit.slot(index)?;
        if is_none(locked.edit.get(slot)) {
            return None;
        }
        let old = locked.put(slot, ptr::null_mut());
        // SAFETY: `put` removed the word, which is converted here only.
        unsafe { out::<P>(old) }
    }

    /// Replaces the entry at `index` by `new` if it is the `expected` one, and returns the old entry.
    ///
    /// For a `new` of `None` the entry is removed. An `expected` of `None` means neither an entry nor a
    /// reservation. Boxes and references are compared by address, values by number. The address of a
    /// reference from [`load`](XArray::load) cannot belong to another box meanwhile, because its guard keeps
    /// the box alive. Blocks shortly on the lock. Allocates if the index needs new nodes.
    ///
    /// ```
    /// use radix_ctx::rcu::{self, Owned};
    /// use radix_ctx::XArray;
    ///
    /// let array = XArray::new();
    /// array.store(3, Owned::new("old"))?;
    /// let guard = rcu::pin();
    /// let seen = array.load(3, &guard);
    /// assert!(array.compare_exchange(3, None, Some(Owned::new("first")), &guard).is_err());
    /// assert!(array.compare_exchange(3, seen, Some(Owned::new("new")), &guard).is_ok());
    /// assert_eq!(array.load(3, &guard), Some(&"new"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CompareExchangeError`] returns `new` and the current entry; the array has not changed.
    pub fn compare_exchange<'g>(
        &'g self,
        index: u64,
        expected: Option<Ref<'_, P>>,
        new: Option<P>,
        guard: &'g impl Pinned,
    ) -> Result<Option<Out<P>>, CompareExchangeError<'g, P>> {
        let _ = guard;
        let refuse = |new, reason| Err(CompareExchangeError { new, reason });
        let locked = self.lock();
        let there = locked.get(index);
        let is_match = match &expected {
            None => there.is_null(),
            // SAFETY: the word is an entry, which stays in the array while this thread holds the lock.
            Some(expected) => !is_none(there) && unsafe { P::is(there, expected) },
        };
        if !is_match && there == RESERVED && expected.is_none() {
            return refuse(new, Reason::Reserved);
        }
        if !is_match {
            // SAFETY: the word is an entry that is in the array now, so `guard`, which is older, keeps it.
            let current = (!is_none(there)).then(|| unsafe { P::borrow(there) });
            return refuse(new, Reason::Mismatch(current));
        }
        let slot = match &new {
            Some(_) => locked.edit.make_slot(index),
            None if there.is_null() => return Ok(None),
            None => locked.edit.slot(index).ok_or(AllocError::new()),
        };
        let Ok(slot) = slot else { return refuse(new, Reason::NoMemory) };
        let old = locked.put(slot, new.map_or(ptr::null_mut(), P::into_word));
        // SAFETY: `put` removed the word, which is converted here only.
        Ok(unsafe { out::<P>(old) })
    }

    /// Removes all entries of `range`, and returns their number. They are dropped after a grace period.
    /// Reservations stay.
    ///
    /// The removal is not atomic: the lock is released from time to time, and an entry that is stored
    /// behind the current position stays. Blocks shortly on the lock. Never allocates.
    pub fn erase_range(&self, range: impl RangeBounds<u64>) -> u64 {
        let Some((mut from, to)) = bounds(range) else { return 0 };
        let mut erased = 0;
        loop {
            // Declared before `locked`, so that the entries are retired after the lock is released.
            let mut entries = Batch::new();
            let locked = self.lock();
            let mut last = None;
            for _ in 0..CHUNK {
                // SAFETY: the lock makes this thread the writer.
                let next = unsafe { self.tree.next(from, to, Filter::Present) };
                let Some((index, word)) = next else { return erased };
                if word != RESERVED {
                    let Some(slot) = locked.edit.slot(index) else { unreachable!("it is present") };
                    let old = locked.put(slot, ptr::null_mut());
                    // SAFETY: `put` removed the word, which is converted here only.
                    if let Some(out) = unsafe { out::<P>(old) } {
                        P::retire(out, &mut entries);
                        erased += 1;
                    }
                }
                last = Some(index);
                if index == to {
                    return erased;
                }
                from = index + 1;
            }
            debug_assert!(last.is_some());
        }
    }

    /// Removes all entries: [`erase_range`](XArray::erase_range) of the whole array.
    pub fn clear(&self) -> u64 {
        self.erase_range(..)
    }

    /// Allocates nodes for all indexes of `range`. A store in the range then allocates nothing until the
    /// array has used up these nodes, for this range or another one.
    ///
    /// Blocks on the lock and allocates under it: at most 9.2 bytes per index of the range.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoMemory`]; the array has not changed.
    pub fn try_reserve(&self, range: impl RangeBounds<u64>) -> Result<(), StoreError<()>> {
        let Some((from, to)) = bounds(range) else { return Ok(()) };
        let locked = self.lock();
        let nodes = locked.edit.nodes_wanted(from, to);
        locked.edit.fill_pool(nodes).map_err(|_| StoreError::NoMemory(()))
    }

    /// Frees the nodes that [`try_reserve`](XArray::try_reserve) made and no store has used. Blocks shortly
    /// on the lock.
    pub fn shrink_to_fit(&self) {
        self.lock().edit.empty_pool();
    }
}
