//! Hazard slots: a reader stores the address of an entry in a slot of its thread, which keeps the
//! buffer from eviction and from writers.
//!
//! ```text
//!   reader                              evictor
//!   slot = entry                        word |= EVICT            (compare-exchange)
//!   fence                               fence
//!   word: still live?                   does a slot name it?
//!     yes: read                           no: take it apart
//!     no: slot = null, look again         yes: word &= !EVICT
//!   ...
//!   slot = null        (Release)
//! ```
//!
//! With a fence on both sides, at least one of the two sees the other. All caches of the process
//! share the slots, because an entry's address is unique in the process. A thread has a record of
//! eight slots in a cache line of its own, and claims another record when it holds more guards.
//!
//! # Invariants
//!
//! 1. Records are pushed to a list and never removed or freed: a `&Record` is `'static`.
//! 2. Only the thread that owns a record sets its slots, and only while they are null. The winner
//!    of the exchange on `owner` owns the record until it stores 0 there.
//! 3. A thread releases a record only if all its slots are null.
//!
//! The algorithm is that of hazard pointers (Michael, 2004), with entries of a table in the role of
//! nodes. An entry is not freed while its table lives, and a table lives as long as its guards.

mod exit;

use std::cell::Cell;
use std::ptr::{self, NonNull};

use percpu::AllocError;
use percpu::fence::{heavy, light};
use percpu::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use percpu::sync::{check, fence, global, order, step, thread_id, thread_local};

use crate::word::Entry;

/// Slots of a record: one cache line. Few in a model, which explores the load of each.
const SLOTS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 8 };

/// The slots of one thread.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Record {
    slots: [Slot; SLOTS],
    /// The thread that owns the record, or 0.
    owner: AtomicU64,
    /// The next record of the same thread. Only that thread accesses it.
    more: AtomicPtr<Record>,
    /// The next record of the list of all. Not written after the record is published.
    next: *mut Record,
    /// The position in the list, from 0. Not written after the record is published.
    number: u32,
}

/// Holds the address of an entry that its thread protects, or null.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Slot(AtomicPtr<Entry>);

// SAFETY: the raw pointer `next` is to a record that is never freed (invariant 1), in any thread.
unsafe impl Send for Record {}
// SAFETY: `next` and `number` are not written once the record is shared; all else is atomics.
unsafe impl Sync for Record {}

global! {
    static HEAD: AtomicPtr<Record> = AtomicPtr::new(ptr::null_mut());
}

/// The pair of fences by which a reader sees the evictor's mark or the evictor sees the reader's
/// slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// A SeqCst fence in readers and in evictors.
    Fences,
    /// A compiler fence in readers. The evictor interrupts all CPUs that run a thread of this
    /// process.
    Membarrier,
}

impl Order {
    /// The fence of the evictor, between its mark on the word and the scan of the slots.
    pub(crate) fn barrier(self) {
        match self {
            // Ordering: SeqCst pairs with the exchange in `Slot::set`: if that is first, the scan
            // sees the slot; if not, `Entry::look` finds the mark.
            Self::Fences => fence(Ordering::SeqCst),
            // Ordering: pairs with the light fence in `Slot::set`: if that is first, the scan sees
            // the slot; if not, `Entry::look` finds the mark.
            Self::Membarrier => heavy(),
        }
    }
}

impl Slot {
    /// Stores the address of `entry`, with the fence of a reader. The caller then calls
    /// [`Entry::look`], unless a pin keeps the entry.
    #[inline(always)]
    fn set(&self, entry: &Entry, order: Order) {
        let entry = ptr::from_ref(entry).cast_mut();
        if order == Order::Membarrier {
            // Ordering: Relaxed; the light fence orders it before `Entry::look`. It pairs with the
            // heavy fence in `barrier` and carries nothing.
            self.0.store(entry, Ordering::Relaxed);
            step!("protect: the slot is set before the lookup", light());
        } else if cfg!(any(offlock_loom, offlock_shuttle)) {
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
        // Ordering: Release pairs with the Acquire in `mark_named` and `is_named_by_others`; the
        // scan that finds null comes after the reads of the bytes.
        self.0.store(ptr::null_mut(), order);
    }

    /// Returns the entry that this slot of a guard protects.
    ///
    /// # Panics
    ///
    /// Panics if the slot is null, which that of a guard is not.
    pub(crate) fn entry(&self) -> NonNull<Entry> {
        // Ordering: Relaxed; only this thread stores (invariant 2).
        NonNull::new(self.0.load(Ordering::Relaxed)).expect("the slot of a guard names an entry")
    }

    #[inline(always)]
    fn is_free(&self) -> bool {
        // Ordering: Relaxed; only this thread stores (invariant 2).
        self.0.load(Ordering::Relaxed).is_null()
    }
}

impl Record {
    #[inline(always)]
    fn free_slot(&'static self) -> Option<&'static Slot> {
        self.slots.iter().find(|slot| slot.is_free())
    }

    fn more(&self) -> Option<&'static Record> {
        // SAFETY: null, or a record, which is never freed (invariant 1).
        // Ordering: Relaxed; only this thread stores.
        unsafe { self.more.load(Ordering::Relaxed).as_ref() }
    }

    /// Releases this record and those that `more` leads to.
    ///
    /// A record whose guard lives on or was forgotten stays owned for ever (invariant 3).
    fn release(&'static self) {
        let mut at = Some(self);
        while let Some(record) = at {
            at = record.more();
            // Ordering: Relaxed; the Release below carries it to the next owner.
            record.more.store(ptr::null_mut(), Ordering::Relaxed);
            if record.slots.iter().all(Slot::is_free) {
                // Ordering: Release pairs with the Acquire in `claim`; it carries the null slots.
                record.owner.store(0, Ordering::Release);
            }
        }
    }
}

/// Returns all records of the process.
fn records() -> impl Iterator<Item = &'static Record> {
    // Ordering: Acquire pairs with the Release in `claim`; it carries the records.
    let mut at = HEAD.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or a record that `claim` published, which is never freed (invariant 1).
        let record = unsafe { at.as_ref() }?;
        at = record.next;
        Some(record)
    })
}

/// Makes this thread the owner of a released record, or of a new one.
fn claim() -> Result<&'static Record, AllocError> {
    let me = thread_id();
    // Ordering: Acquire pairs with the Release in `release`; it carries the null slots and `more`.
    // Relaxed on failure and in the load: the record is another thread's, so nothing of it is used.
    let free = |record: &&Record| {
        record.owner.load(Ordering::Relaxed) == 0
            && record.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    if let Some(record) = records().find(free) {
        return Ok(record);
    }
    let record = Record {
        slots: [(); SLOTS].map(|()| Slot(AtomicPtr::new(ptr::null_mut()))),
        owner: AtomicU64::new(me),
        more: AtomicPtr::new(ptr::null_mut()),
        next: ptr::null_mut(),
        number: 0,
    };
    let new = Box::into_raw(percpu::alloc::try_box(record).map_err(|_| AllocError::new())?);
    // Ordering: Acquire pairs with the Release of the exchange below; it carries the number of the
    // head.
    let mut head = HEAD.load(Ordering::Acquire);
    loop {
        // SAFETY: null, or a published record, which is never freed (invariant 1).
        let number = unsafe { head.as_ref() }.map_or(0, |head| head.number + 1);
        // SAFETY: from `Box::into_raw`, and not published yet, so no other reference exists.
        let record = unsafe { &mut *new };
        (record.next, record.number) = (head, number);
        // Ordering: SeqCst pairs with the fence in `Order::barrier`: a scan that must see a slot
        // finds the record of that slot. As a Release it pairs with the Acquire in `records`, above
        // and on failure; it carries the record.
        match HEAD.compare_exchange(head, new, Ordering::SeqCst, Ordering::Acquire) {
            // SAFETY: just published, so it is not written any more, and never freed (invariant 1).
            Ok(_) => return Ok(unsafe { &*new }),
            Err(found) => head = found,
        }
    }
}

/// Returns whether a slot other than `mine` names the entry. The caller has marked the entry and
/// called [`Order::barrier`].
pub(crate) fn is_named_by_others(at: &Entry, mine: &Slot) -> bool {
    let order = order!(Acquire, "scan by a writer: the bytes were read before");
    // Ordering: Acquire pairs with the Release in `clear`; the caller's writes come after the reads
    // of the readers that have left.
    records()
        .flat_map(|record| &record.slots)
        .any(|slot| !ptr::eq(slot, mine) && ptr::eq(slot.0.load(order), at))
}

/// Returns how many of this thread's slots name the entry.
pub(crate) fn named_by_me(entry: &Entry) -> usize {
    let mut count = 0;
    let mut at = MINE.with(Cell::get);
    while let Some(record) = at {
        // Ordering: Relaxed; only this thread stores (invariant 2).
        let names = |slot: &&Slot| ptr::eq(slot.0.load(Ordering::Relaxed), entry);
        count += record.slots.iter().filter(names).count();
        at = record.more();
    }
    count
}

/// Sets `named[i]` for each `entries[i]` that a slot names, by one fence and one scan for all.
///
/// The caller has changed their words before, so that no new lookup uses them.
pub(crate) fn mark_named<const N: usize>(entries: &[&Entry], named: &mut [bool; N], order: Order) {
    step!("scan: the words are changed before", order.barrier());
    let acquire = order!(Acquire, "scan: the bytes were read before");
    for slot in records().flat_map(|record| &record.slots) {
        // Ordering: Acquire pairs with the Release in `clear`; the caller's use of the frame comes
        // after the reads of the readers that have left.
        let at = slot.0.load(acquire);
        if at.is_null() {
            continue;
        }
        for (entry, named) in entries.iter().zip(named.iter_mut()) {
            *named |= ptr::eq(at, *entry);
        }
    }
}

/// Returns whether no hazard slot names the entry and no pin holds it. The entry must be hidden
/// from lookups already.
pub(crate) fn is_left(entry: &Entry, order: Order) -> bool {
    // The pins are read before and after the slots. A thread that waited for the load sets its slot
    // before it unpins, and a guard that becomes a pin pins before it clears its slot.
    let mut left = check!("is_left: no pin before the scan", entry.word().pins() == 0);
    let mut named = [false];
    mark_named(&[entry], &mut named, order);
    left = left && check!("is_left: no slot names the entry", named == [false]);
    left && check!("is_left: no pin after the scan", entry.word().pins() == 0)
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    // The record that this thread claimed last. It needs no drop, so that destructors of the
    // thread's other variables can read it.
    static MINE: Cell<Option<&'static Record>> = const { Cell::new(None) };
}

// The checkers' macro does not accept `const`.
#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static MINE: Cell<Option<&'static Record>> = Cell::new(None);
}

/// Protects `entry` by a slot of this thread. The protection holds if [`Entry::look`] then finds
/// the entry live.
///
/// # Errors
///
/// [`AllocError`] if this thread has no free slot and there is no memory for another record.
#[inline(always)]
pub(crate) fn name(entry: &Entry, order: Order) -> Result<&'static Slot, AllocError> {
    let mine = MINE.with(Cell::get);
    let slot = match mine.and_then(|record| record.free_slot()) {
        Some(slot) => slot,
        None => more_slots()?,
    };
    slot.set(entry, order);
    Ok(slot)
}

/// Returns the number of the record that this thread claimed last: from 0, and unique among
/// records. `None` if the thread has never protected an entry.
#[inline(always)]
pub(crate) fn number() -> Option<u32> {
    MINE.with(Cell::get).map(|record| record.number)
}

/// Makes sure that the next [`name`] of this thread does not allocate.
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

/// Returns a free slot of this thread's further records, or of a record claimed for it.
#[cold]
#[inline(never)]
fn more_slots() -> Result<&'static Slot, AllocError> {
    let mut at = MINE.with(Cell::get);
    while let Some(record) = at {
        if let Some(slot) = record.free_slot() {
            return Ok(slot);
        }
        at = record.more();
    }
    let new = claim()?;
    let first = MINE.with(|mine| mine.replace(Some(new)));
    let behind = first.map_or(ptr::null_mut(), |first| ptr::from_ref(first).cast_mut());
    // Ordering: Relaxed; only this thread, the owner, accesses it.
    new.more.store(behind, Ordering::Relaxed);
    exit::release_at_end(new);
    new.free_slot().ok_or_else(AllocError::new)
}
