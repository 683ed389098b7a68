//! The hazard slots of all threads: records, of which each belongs to one thread at a time.
//!
//! # Invariants
//!
//! 1. Records are pushed to a list and never removed or freed: a `&Record` is `'static`.
//! 2. Only the thread that owns a record sets its slots, and only while they are null. The winner
//!    of the exchange on `owner` owns the record until it stores 0 there. Another thread clears a
//!    slot only if its guard was forgotten and the table of its entry is being dropped.
//! 3. A thread releases a record only if all its slots are null.

use std::cell::Cell;
use std::ptr;

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use offlock_sync::{global, order, thread_id, thread_local};

use crate::word::Entry;

/// Slots of a record: one cache line. Few in a model, which explores the load of each.
const SLOTS: usize = if cfg!(offlock_model) { 2 } else { 8 };

/// The slots of one thread.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Record {
    pub(super) slots: [Slot; SLOTS],
    /// The thread that owns the record, or 0.
    owner: AtomicU64,
    /// The next record of the same thread. Only that thread accesses it.
    pub(super) more: AtomicPtr<Record>,
    /// The next record of the list of all. Not written after the record is published.
    next: *mut Record,
    /// The position in the list, from 0. Not written after the record is published.
    pub(super) number: u32,
}

/// Holds the address of an entry that its thread protects, or null.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Slot(pub(super) AtomicPtr<Entry>);

// SAFETY: the raw pointer `next` is to a record that is never freed (invariant 1), in any thread.
unsafe impl Send for Record {}
// SAFETY: `next` and `number` are not written once the record is shared; all else is atomics.
unsafe impl Sync for Record {}

global! {
    static HEAD: AtomicPtr<Record> = AtomicPtr::new(ptr::null_mut());
}

impl Slot {
    #[inline(always)]
    fn is_free(&self) -> bool {
        // Ordering: Relaxed; only this thread stores (invariant 2).
        self.0.load(Ordering::Relaxed).is_null()
    }
}

impl Record {
    #[inline(always)]
    pub(super) fn free_slot(&'static self) -> Option<&'static Slot> {
        self.slots.iter().find(|slot| slot.is_free())
    }

    pub(super) fn more(&self) -> Option<&'static Record> {
        // SAFETY: null, or a record, which is never freed (invariant 1).
        // Ordering: Relaxed; only this thread stores.
        unsafe { self.more.load(Ordering::Relaxed).as_ref() }
    }

    /// Releases this record and those that `more` leads to.
    ///
    /// A record whose guard lives on or was forgotten stays owned for ever (invariant 3).
    pub(super) fn release(&'static self) {
        let mut at = Some(self);
        while let Some(record) = at {
            at = record.more();
            // Ordering: Relaxed; the Release below carries it to the next owner.
            record.more.store(ptr::null_mut(), Ordering::Relaxed);
            if record.slots.iter().all(Slot::is_free) {
                // Ordering: Release pairs with the Acquire in `claim`; it carries the null slots.
                let order = order!(Release, "release: the slots are null before");
                record.owner.store(0, order);
            }
        }
    }
}

/// Returns all records of the process.
pub(super) fn records() -> impl Iterator<Item = &'static Record> {
    // Ordering: Acquire pairs with the Release in `claim`; it carries the records.
    let mut at = HEAD.load(order!(Acquire, "records: each was built before"));
    std::iter::from_fn(move || {
        // SAFETY: null, or a record that `claim` published, which is never freed (invariant 1).
        let record = unsafe { at.as_ref() }?;
        at = record.next;
        Some(record)
    })
}

/// Makes this thread the owner of a released record, or of a new one.
pub(super) fn claim() -> Result<&'static Record, AllocError> {
    let me = thread_id();
    // Ordering: Acquire pairs with the Release in `release`; it carries the null slots and `more`.
    // Relaxed on failure and in the load: the record is another thread's, so nothing of it is used.
    let acquire = order!(Acquire, "claim_record: the slots were null before");
    let free = |record: &&Record| {
        record.owner.load(Ordering::Relaxed) == 0
            && record.owner.compare_exchange(0, me, acquire, Ordering::Relaxed).is_ok()
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
    let new = Box::into_raw(offlock_sync::alloc::try_box(record).map_err(|_| AllocError::new())?);
    // Ordering: Acquire pairs with the Release of the exchange below; it carries the number of the
    // head. No model checks it, because a model does not see the accesses of a plain field.
    let mut head = HEAD.load(Ordering::Acquire);
    loop {
        // SAFETY: null, or a published record, which is never freed (invariant 1).
        let number = unsafe { head.as_ref() }.map_or(0, |head| head.number + 1);
        // SAFETY: from `Box::into_raw`, and not published yet, so no other reference exists.
        let record = unsafe { &mut *new };
        (record.next, record.number) = (head, number);
        // Ordering: SeqCst pairs with the fence in `hazard::barrier`: a scan that must see a slot
        // finds the record of that slot. As a Release it pairs with the Acquire in `records`, above
        // and on failure; it carries the record. No model checks the failure, as above.
        let order = order!(SeqCst, "push: the record is built before");
        match HEAD.compare_exchange(head, new, order, Ordering::Acquire) {
            // SAFETY: just published, so it is not written any more, and never freed (invariant 1).
            Ok(_) => return Ok(unsafe { &*new }),
            Err(found) => head = found,
        }
    }
}

#[cfg(not(offlock_model))]
thread_local! {
    // The record that this thread claimed last. It needs no drop, so that destructors of the
    // thread's other variables can read it.
    pub(super) static MINE: Cell<Option<&'static Record>> = const { Cell::new(None) };
}

// The checkers' macro does not accept `const`.
#[cfg(offlock_model)]
thread_local! {
    pub(super) static MINE: Cell<Option<&'static Record>> = Cell::new(None);
}
