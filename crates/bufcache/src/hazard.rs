//! Hazard slots: a reader stores the address of an entry in a slot of its thread, which keeps the
//! buffer from eviction and from writers.
//!
//! ```text
//!   reader                              evictor
//!   slot = entry                        word |= EVICT            (compare-exchange)
//!   fence                               fence
//!   word: still live?                   does a slot protect it?
//!     yes: read                           no: take it apart
//!     no: slot = null, look again         yes: word &= !EVICT
//!   ...
//!   slot = null        (Release)
//! ```
//!
//! With a fence on both sides, at least one of the two sees the other. All caches of the process
//! share the slots, because an entry's address is unique among the tables that live. The drop of a
//! table clears the slots of guards that were forgotten. A thread has a record of
//! eight slots in a cache line of its own, and claims another record when it holds more guards.
//!
//! The algorithm is that of hazard pointers (Michael, 2004), with entries of a table in the role of
//! nodes. An entry is not freed while its table lives, and a table lives as long as its guards.

mod exit;
mod records;

use std::cell::Cell;
use std::ptr::{self, NonNull};

use offlock_percpu::AllocError;
use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::{check, fence, order, step};

pub(crate) use self::records::Slot;
use self::records::{MINE, Record, claim, records};
use crate::word::Entry;

/// The fence of the evictor, between its mark on the word and the scan of the slots: the reader sees
/// the mark, or the evictor sees the reader's slot.
pub(crate) fn barrier() {
    // Ordering: SeqCst pairs with the exchange in `Slot::set`: if that is first, the scan sees the
    // slot; if not, `Entry::look` finds the mark.
    fence(Ordering::SeqCst);
}

impl Slot {
    /// Stores the address of `entry`, with the fence of a reader. The caller then calls
    /// [`Entry::look`], unless a pin keeps the entry.
    #[inline(always)]
    fn set(&self, entry: &Entry) {
        let entry = ptr::from_ref(entry).cast_mut();
        if cfg!(offlock_model) {
            // The checkers do not model the single order of SeqCst accesses, but they model fences.
            // Ordering: Release, as in the SeqCst exchange below; the fence pairs with that in
            // `barrier`.
            self.0.store(entry, Ordering::Release);
            fence!(SeqCst, "protect: the slot is set before the lookup");
        } else {
            // Ordering: SeqCst pairs with the SeqCst fence in `barrier`: if that is first,
            // `Entry::look` finds the mark; if not, the scan sees the slot.
            self.0.swap(entry, Ordering::SeqCst);
        }
    }

    /// Ends the protection.
    #[inline(always)]
    pub(crate) fn clear(&self) {
        let order = order!(Release, "clear: the bytes were read before");
        // Ordering: Release pairs with the Acquire in `mark_protected` and `is_protected_by_others`; the
        // scan that finds null comes after the reads of the bytes.
        self.0.store(ptr::null_mut(), order);
    }

    /// Returns the entry that this slot of a guard protects.
    ///
    /// # Panics
    ///
    /// Panics if the slot is null, which that of a guard is not.
    pub(crate) fn entry(&self) -> NonNull<Entry> {
        // Ordering: Relaxed; only this thread stores (invariant 2 of `records`).
        NonNull::new(self.0.load(Ordering::Relaxed)).expect("the slot of a guard protects an entry")
    }
}

/// Returns whether a slot other than `mine` protects the entry. The caller has marked the entry and
/// called [`barrier`].
pub(crate) fn is_protected_by_others(at: &Entry, mine: &Slot) -> bool {
    let order = order!(Acquire, "scan by a writer: the bytes were read before");
    // Ordering: Acquire pairs with the Release in `clear`; the caller's writes come after the reads
    // of the readers that have left.
    records()
        .flat_map(|record| &record.slots)
        .any(|slot| !ptr::eq(slot, mine) && ptr::eq(slot.0.load(order), at))
}

/// Ends the protection of the entries at these addresses, by guards that the program forgot. The
/// caller drops their table, so that entries of another table may get the same addresses.
#[cfg(not(offlock_model))] // a model forgets no guard
pub(crate) fn end_of(entries: &std::ops::Range<*const Entry>) {
    for slot in records().flat_map(|record| &record.slots) {
        // Ordering: Relaxed, all. No thread changes a slot that names an entry of a table without
        // users (invariant 2 of `records`). The allocator carries the null to the users of the next
        // table at this address.
        let at = slot.0.load(Ordering::Relaxed);
        if entries.contains(&at.cast_const()) {
            let (null, relaxed) = (ptr::null_mut(), Ordering::Relaxed);
            let _ = slot.0.compare_exchange(at, null, relaxed, relaxed);
        }
    }
}

/// Returns how many of this thread's slots protect the entry.
pub(crate) fn protected_by_me(entry: &Entry) -> usize {
    let mut count = 0;
    let mut at = MINE.with(Cell::get);
    while let Some(record) = at {
        // Ordering: Relaxed; only this thread stores (invariant 2 of `records`).
        let names = |slot: &&Slot| ptr::eq(slot.0.load(Ordering::Relaxed), entry);
        count += record.slots.iter().filter(names).count();
        at = record.more();
    }
    count
}

/// Sets `protected[i]` for each `entries[i]` that a slot protects, by one fence and one scan for all.
///
/// The caller has changed their words before, so that no new lookup uses them.
pub(crate) fn mark_protected<const N: usize>(entries: &[&Entry], protected: &mut [bool; N]) {
    step!("scan: the words are changed before", barrier());
    let acquire = order!(Acquire, "scan: the bytes were read before");
    for slot in records().flat_map(|record| &record.slots) {
        // Ordering: Acquire pairs with the Release in `clear`; the caller's use of the frame comes
        // after the reads of the readers that have left.
        let at = slot.0.load(acquire);
        if at.is_null() {
            continue;
        }
        for (entry, protected) in entries.iter().zip(protected.iter_mut()) {
            *protected |= ptr::eq(at, *entry);
        }
    }
}

/// Returns whether no hazard slot protects the entry and no pin holds it. The entry must be hidden
/// from lookups already.
pub(crate) fn is_left(entry: &Entry) -> bool {
    // The pins are read before and after the slots. A thread that waited for the load sets its slot
    // before it unpins, and a guard that becomes a pin pins before it clears its slot.
    let mut left = check!("is_left: no pin before the scan", entry.word().pins() == 0);
    let mut protected = [false];
    mark_protected(&[entry], &mut protected);
    left = left && check!("is_left: no slot names the entry", protected == [false]);
    left && check!("is_left: no pin after the scan", entry.word().pins() == 0)
}

/// Protects `entry` by a slot of this thread. The protection holds if [`Entry::look`] then finds
/// the entry live.
///
/// # Errors
///
/// [`AllocError`] if this thread has no free slot and there is no memory for another record.
#[inline(always)]
pub(crate) fn protect(entry: &Entry) -> Result<&'static Slot, AllocError> {
    protect_numbered(entry).map(|(slot, _)| slot)
}

/// As [`protect`], but also returns the number of the slot's record, which is from 0 and unique
/// among records.
#[inline(always)]
pub(crate) fn protect_numbered(entry: &Entry) -> Result<(&'static Slot, u32), AllocError> {
    let of = |record: &'static Record| Some((record.free_slot()?, record.number));
    let found = match MINE.with(Cell::get).and_then(of) {
        Some(found) => found,
        None => more_slots()?,
    };
    found.0.set(entry);
    Ok(found)
}

/// Protects an entry that a pin or a load of the caller keeps by a slot of this thread. Without a
/// fence: no evictor and no writer marks a word that has a pin or `IO`, and the change by which the
/// caller takes that away makes the slot visible.
///
/// # Errors
///
/// As [`protect`].
pub(crate) fn protect_kept(entry: &Entry) -> Result<&'static Slot, AllocError> {
    let mine = MINE.with(Cell::get);
    let slot = match mine.and_then(|record| record.free_slot()) {
        Some(slot) => slot,
        None => more_slots()?.0,
    };
    // Ordering: Relaxed; the Release in `Entry::unpin`, `publish` or `try_change` carries it to the
    // Acquire by which an evictor or a writer marks the word. Its scan follows.
    slot.0.store(ptr::from_ref(entry).cast_mut(), Ordering::Relaxed);
    Ok(slot)
}

/// Returns the number of the record that this thread claimed last: from 0, and unique among
/// records. `None` if the thread has never protected an entry.
#[inline(always)]
pub(crate) fn number() -> Option<u32> {
    MINE.with(Cell::get).map(|record| record.number)
}

/// Makes sure that the next [`protect`] of this thread does not allocate.
///
/// # Errors
///
/// [`AllocError`] if this thread has no free slot and there is no memory for another record.
pub(crate) fn reserve() -> Result<(), AllocError> {
    match MINE.with(Cell::get).and_then(|record| record.free_slot()) {
        Some(_) => Ok(()),
        None => more_slots().map(drop),
    }
}

/// Returns a free slot of this thread's further records, or of a record claimed for it, and the
/// number of that record.
#[cold]
#[inline(never)]
fn more_slots() -> Result<(&'static Slot, u32), AllocError> {
    let mut at = MINE.with(Cell::get);
    while let Some(record) = at {
        if let Some(slot) = record.free_slot() {
            return Ok((slot, record.number));
        }
        at = record.more();
    }
    let new = claim()?;
    let first = MINE.with(|mine| mine.replace(Some(new)));
    let behind = first.map_or(ptr::null_mut(), |first| ptr::from_ref(first).cast_mut());
    // Ordering: Relaxed; only this thread, the owner, accesses it.
    new.more.store(behind, Ordering::Relaxed);
    exit::release_at_end(new);
    let slot = new.free_slot().ok_or_else(AllocError::new)?;
    Ok((slot, new.number))
}
