//! Store, insert, erase, compare-exchange: a short lock each.

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
use crate::tree::{Edit, Slot, Which, Word};

/// Entries that `erase_range` takes out before it unlocks for a moment. A guess.
const CHUNK: usize = 256;

/// A change under way. The lock goes first (fields drop in this order), then dead nodes are retired.
pub(super) struct Locked<'a> {
    pub(super) cycle: WordGuard<'a, Cycle>,
    pub(super) edit: Edit<'a, false>,
    counts: &'a Counts,
}

impl Locked<'_> {
    /// Puts a word into a slot, and counts.
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

    /// The word at `index`, null if it is absent.
    pub(super) fn get(&self, index: u64) -> Word {
        self.edit.slot(index).map_or(ptr::null_mut(), |slot| self.edit.get(slot))
    }

    pub(super) fn validate_counts(&self, counts: &Counts) {
        // SAFETY: the writer's.
        let mut cursor = unsafe { self.edit.tree().cursor(0, u64::MAX, Which::Present) };
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

/// What was in a slot.
///
/// # Safety
///
/// The word was just taken out of an array of `P`, by who calls this once.
pub(super) unsafe fn out<P: Entry>(word: Word) -> Option<Out<P>> {
    if is_none(word) {
        return None;
    }
    // SAFETY: an entry's word, and the caller's.
    Some(unsafe { P::unlinked(word) })
}

impl<P: Entry> XArray<P> {
    pub(super) fn lock(&self) -> Locked<'_> {
        let cycle = self.lock.lock();
        // SAFETY: the lock is over the tree, and goes when the edit does.
        let edit = unsafe { self.tree.edit() };
        Locked { cycle, edit, counts: &self.counts }
    }

    /// Puts `entry` at `index`, and returns what was there.
    ///
    /// Keeps the marks of an entry there. Blocks for the lock; allocates if the index is new.
    ///
    /// # Errors
    ///
    /// [`StoreError`] gives `entry` back; nothing has changed.
    ///
    /// # Examples
    ///
    /// ```
    /// use radix_ctx::xarray::{Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// assert_eq!(array.store(3, 1.into())?, None);
    /// assert_eq!(array.store(3, 2.into())?, Some(1.into()));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn store(&self, index: u64, entry: P) -> Result<Option<Out<P>>, StoreError<P>> {
        let locked = self.lock();
        let Ok(slot) = locked.edit.make_slot(index) else {
            return Err(StoreError::NoMemory(entry));
        };
        if locked.edit.get(slot) == RESERVED {
            return Err(StoreError::Reserved(entry));
        }
        let old = locked.put(slot, entry.into_word());
        // SAFETY: just taken out, here.
        Ok(unsafe { out::<P>(old) })
    }

    /// Puts `entry` at `index`, where there must be neither an entry nor a reservation.
    ///
    /// Blocks for the lock; allocates if the index is new.
    ///
    /// # Errors
    ///
    /// [`InsertError`] gives `entry` back; nothing has changed.
    ///
    /// # Examples
    ///
    /// ```
    /// use radix_ctx::xarray::{InsertError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// array.insert(3, 1.into())?;
    /// assert_eq!(array.insert(3, 2.into()), Err(InsertError::Present(2.into())));
    /// # Ok::<(), std::io::Error>(())
    /// ```
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

    /// Takes the entry at `index` out, with its marks. A reserved index stays so.
    ///
    /// Blocks for the lock. Never allocates.
    pub fn erase(&self, index: u64) -> Option<Out<P>> {
        let locked = self.lock();
        let slot = locked.edit.slot(index)?;
        if is_none(locked.edit.get(slot)) {
            return None;
        }
        let old = locked.put(slot, ptr::null_mut());
        // SAFETY: just taken out, here.
        unsafe { out::<P>(old) }
    }

    /// Puts `new` at `index` (or takes out what is there, if `new` is `None`) if `expected` is there,
    /// and returns it.
    ///
    /// An entry is told by its identity: the address of a `T`, the number of a `Value`. `None` expects
    /// neither an entry nor a reservation. Blocks for the lock; allocates if the index is new.
    ///
    /// # Errors
    ///
    /// [`CompareExchangeError`] gives `new` back, and says what is there instead; nothing has changed.
    ///
    /// # Examples
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
            // SAFETY: an entry's word, which is in the array as long as the lock is held.
            Some(expected) => !is_none(there) && unsafe { P::is(there, expected) },
        };
        if !is_match && there == RESERVED && expected.is_none() {
            return refuse(new, Reason::Reserved);
        }
        if !is_match {
            // SAFETY: an entry's word, in the array now, after the guard began.
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
        // SAFETY: just taken out, here.
        Ok(unsafe { out::<P>(old) })
    }

    /// Takes out all entries of `range`, and returns how many there were; they are dropped when no
    /// reader can have them. Reserved indices stay so.
    ///
    /// Not at once: the lock is given back now and then, and what comes behind stays. Blocks for the
    /// lock. Never allocates.
    pub fn erase_range(&self, range: impl RangeBounds<u64>) -> u64 {
        let Some((mut from, to)) = bounds(range) else { return 0 };
        let mut erased = 0;
        loop {
            // Retired after the lock is given back: dropped last.
            let mut entries = Batch::new();
            let locked = self.lock();
            let mut last = None;
            for _ in 0..CHUNK {
                // SAFETY: the writer's.
                let next = unsafe { self.tree.next(from, to, Which::Present) };
                let Some((index, word)) = next else { return erased };
                if word != RESERVED {
                    let Some(slot) = locked.edit.slot(index) else { unreachable!("it is present") };
                    let old = locked.put(slot, ptr::null_mut());
                    // SAFETY: just taken out, here.
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

    /// [`erase_range`](XArray::erase_range) of all.
    pub fn clear(&self) -> u64 {
        self.erase_range(..)
    }

    /// Has memory ready for all of `range`: what is stored there then allocates no node, until as many
    /// nodes were made, here or elsewhere in the array.
    ///
    /// Blocks for the lock, and allocates under it: up to 9.2 bytes per index of the range.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; nothing has changed.
    pub fn try_reserve(&self, range: impl RangeBounds<u64>) -> Result<(), StoreError<()>> {
        let Some((from, to)) = bounds(range) else { return Ok(()) };
        let locked = self.lock();
        let nodes = locked.edit.nodes_wanted(from, to);
        locked.edit.keep_nodes(nodes).map_err(|_| StoreError::NoMemory(()))
    }

    /// Gives back what [`try_reserve`](XArray::try_reserve) has ready and nobody used. Blocks for the
    /// lock.
    pub fn shrink_to_fit(&self) {
        self.lock().edit.free_kept_nodes();
    }
}
