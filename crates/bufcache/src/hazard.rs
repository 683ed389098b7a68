//! Which entries threads are looking at: a slot names one, and that is pin and shared lock at once.
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
//! With a fence on both sides at least one of the two sees the other. The slots are the process's, not
//! a cache's: an entry's address says which it is. A thread has eight in a line of its own, and takes
//! another eight when it holds more guards.
//!
//! # Invariants
//!
//! 1. Records are pushed and never removed or freed: a `&Record` is `'static`.
//! 2. A slot is set only by the thread whose record it is (the winner of the exchange on `owner`, until
//!    it stores 0 there), and only while it is null.
//! 3. A record is given back only with all its slots null.
//!
//! The algorithm is that of hazard pointers (Michael, 2004), with places of a table in the role of
//! nodes: those are never freed while the table lives, which is as long as a guard.

mod exit;

use std::cell::Cell;
use std::ptr::{self, NonNull};

use percpu::AllocError;
use percpu::fence::{heavy, light};
use percpu::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use percpu::sync::{check, fence, global, mutant, order, step, thread_id, thread_local};

use crate::cache::linger;
use crate::word::Entry;

/// Slots of a record: a cache line. A model looks at all of them.
const SLOTS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 8 };

/// Slots of one thread.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Record {
    slots: [Slot; SLOTS],
    /// The thread that has the record, or 0.
    owner: AtomicU64,
    /// Its thread's other records: touched by that thread only.
    more: AtomicPtr<Record>,
    /// Never written after the record was published, both.
    next: *mut Record,
    number: u32,
}

/// Names an entry that its thread looks at, or none.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Slot(AtomicPtr<Entry>);

// SAFETY: all that is shared is atomics; `next` is written before the record is published.
unsafe impl Send for Record {}
// SAFETY: as above.
unsafe impl Sync for Record {}

global! {
    static HEAD: AtomicPtr<Record> = AtomicPtr::new(ptr::null_mut());
}

/// What keeps readers and evictors of one cache in order: the fence of either side, which carries the
/// slot to the evictor or the mark to the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// A fence on both sides.
    Fences,
    /// None in readers, and in evictors an interruption of all CPUs that run a thread of this process.
    Membarrier,
}

impl Order {
    /// The evictor's.
    pub(crate) fn barrier(self) {
        match self {
            // Ordering: SeqCst pairs with the exchange in `Slot::set`: if that comes first, the slot is
            // seen; if not, `Entry::look` finds the mark.
            Self::Fences => fence(Ordering::SeqCst),
            // Pairs with the light fence in `Slot::set`, to the same end.
            Self::Membarrier => heavy(),
        }
    }
}

impl Slot {
    /// Names `entry`, with the fence of a reader. To be followed by a look at the entry, unless a pin
    /// keeps it.
    #[inline(always)]
    fn set(&self, entry: &Entry, order: Order) {
        let entry = ptr::from_ref(entry).cast_mut();
        if order == Order::Membarrier {
            // Ordering: Relaxed; the fence orders it before `Entry::look`, and it carries nothing.
            self.0.store(entry, Ordering::Relaxed);
            step!("protect: the slot is set before the lookup", light());
        } else if cfg!(any(offlock_loom, offlock_shuttle)) {
            // The checkers know no order of all sequentially consistent accesses; fences they know.
            self.0.store(entry, Ordering::Release);
            fence!(SeqCst, "protect: the slot is set before the lookup");
        } else {
            // Ordering: SeqCst pairs with the fence of who looks for it: that comes before this, and then
            // `Entry::look` finds the mark, or the slot is seen.
            self.0.swap(entry, Ordering::SeqCst);
        }
    }

    /// Looks no more.
    #[inline(always)]
    pub(crate) fn clear(&self) {
        let order = order!(Release, "clear: the bytes were read before");
        // Ordering: Release pairs with the Acquire in `mark_named`; it carries what was read.
        self.0.store(ptr::null_mut(), order);
    }

    /// What it names, for the guard whose slot it is.
    pub(crate) fn entry(&self) -> NonNull<Entry> {
        // Ordering: Relaxed; the thread's own store.
        NonNull::new(self.0.load(Ordering::Relaxed)).expect("the slot of a guard names an entry")
    }

    #[inline(always)]
    fn is_free(&self) -> bool {
        // Ordering: Relaxed; the thread's own stores.
        self.0.load(Ordering::Relaxed).is_null()
    }
}

impl Record {
    #[inline(always)]
    fn free_slot(&'static self) -> Option<&'static Slot> {
        self.slots.iter().find(|slot| slot.is_free())
    }

    fn more(&self) -> Option<&'static Record> {
        // SAFETY: null, or a record, never freed (invariant 1).
        // Ordering: Relaxed; the thread's own.
        unsafe { self.more.load(Ordering::Relaxed).as_ref() }
    }

    /// Gives it back, and those behind it, unless a guard lives on (or was forgotten): then it
    /// stays taken for ever.
    fn release(&'static self) {
        let mut at = Some(self);
        while let Some(record) = at {
            at = record.more();
            // Ordering: Relaxed; the thread's own.
            record.more.store(ptr::null_mut(), Ordering::Relaxed);
            if record.slots.iter().all(Slot::is_free) {
                // Ordering: Release pairs with the Acquire in `claim`; it carries the null slots.
                record.owner.store(0, Ordering::Release);
            }
        }
    }
}

fn records() -> impl Iterator<Item = &'static Record> {
    // Ordering: Acquire pairs with the Release in `claim`; it carries the records.
    let mut at = HEAD.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or published by `claim` and never freed (invariant 1).
        let record = unsafe { at.as_ref() }?;
        at = record.next;
        Some(record)
    })
}

/// A record of this thread's own: one that a thread gave back, or a new one.
fn claim() -> Result<&'static Record, AllocError> {
    let me = thread_id();
    // Ordering: Acquire pairs with the Release in `release`; it carries the slots. Relaxed on failure,
    // and before it: the record is another's.
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
    // Ordering: Relaxed; the exchange below tells whether it is still the head.
    let mut head = HEAD.load(Ordering::Relaxed);
    loop {
        // SAFETY: null, or published and never freed (invariant 1).
        let number = unsafe { head.as_ref() }.map_or(0, |head| head.number + 1);
        // SAFETY: not published yet, so it is ours alone.
        let record = unsafe { &mut *new };
        (record.next, record.number) = (head, number);
        // Ordering: SeqCst: an evictor whose fence comes behind the naming of a slot finds the record of
        // that slot. As a Release it pairs with the Acquire in `records`, and carries the record. Relaxed
        // on failure: the head found is not followed.
        match HEAD.compare_exchange(head, new, Ordering::SeqCst, Ordering::Relaxed) {
            // SAFETY: just published, and never freed (invariant 1).
            Ok(_) => return Ok(unsafe { &*new }),
            Err(found) => head = found,
        }
    }
}

/// Whether a slot other than `mine` names the entry. After [`Order::barrier`].
pub(crate) fn is_named_by_others(at: &Entry, mine: &Slot) -> bool {
    let order = if mutant("write-scan-relaxed") { Ordering::Relaxed } else { Ordering::Acquire };
    // Ordering: Acquire pairs with the Release in `clear`; it carries the reads of who has left.
    records()
        .flat_map(|record| &record.slots)
        .any(|slot| !ptr::eq(slot, mine) && ptr::eq(slot.0.load(order), at))
}

/// How many of this thread's slots name the entry.
pub(crate) fn named_by_me(entry: &Entry) -> usize {
    let mut count = 0;
    let mut at = MINE.with(Cell::get);
    while let Some(record) = at {
        // Ordering: Relaxed; the thread's own stores.
        let names = |slot: &&Slot| ptr::eq(slot.0.load(Ordering::Relaxed), entry);
        count += record.slots.iter().filter(names).count();
        at = record.more();
    }
    count
}

/// Marks those of `entries` that a thread's slot names: one fence and one walk for all of them. The
/// caller has changed their words, so that nobody comes to them any more.
pub(crate) fn mark_named<const N: usize>(entries: &[&Entry], named: &mut [bool; N], order: Order) {
    step!("scan: the words are changed before", order.barrier());
    let acquire = order!(Acquire, "scan: the bytes were read before");
    for slot in records().flat_map(|record| &record.slots) {
        // Ordering: Acquire pairs with the Release in `clear`; it carries the reads of who has left.
        let at = slot.0.load(acquire);
        if at.is_null() {
            continue;
        }
        for (entry, named) in entries.iter().zip(named.iter_mut()) {
            *named |= ptr::eq(at, *entry);
        }
    }
}

/// Whether nobody looks at an entry any more that nobody comes to.
pub(crate) fn is_left(entry: &Entry, order: Order) -> bool {
    // The pins are looked at on both sides of the slots: whoever waited for the load names it first and
    // unpins then, and a guard that becomes a pin pins first and clears its slot then.
    let mut left = check!("is_left: no pin before the scan", entry.word().pins() == 0);
    if mutant("is_left: no pin after the scan") {
        linger(200);
    }
    let mut named = [false];
    mark_named(&[entry], &mut named, order);
    left = left && check!("is_left: no slot names the entry", named == [false]);
    left && check!("is_left: no pin after the scan", entry.word().pins() == 0)
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    // Nothing to drop, so that it can be read at any point of the thread's exit.
    static MINE: Cell<Option<&'static Record>> = const { Cell::new(None) };
}

// The checkers' macro knows no `const`.
#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static MINE: Cell<Option<&'static Record>> = Cell::new(None);
}

/// A slot of this thread's that names `entry`, and keeps it once a look has found
/// it alive.
///
/// # Errors
///
/// [`AllocError`]: this thread has no slot left, and there was no memory for more.
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

/// The number of the record that this thread took last, which has it alone: from 0, and no two have the
/// same. None where it never named anything.
#[inline(always)]
pub(crate) fn number() -> Option<u32> {
    MINE.with(Cell::get).map(|record| record.number)
}

/// Sees to it that [`name`] finds a slot without memory.
pub(crate) fn reserve() -> Result<(), AllocError> {
    match MINE.with(Cell::get).and_then(|record| record.free_slot()) {
        Some(_) => Ok(()),
        None => more_slots().map(drop),
    }
}

/// This thread's first guard, or its ninth at a time.
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
    // Ordering: Relaxed; the thread's own.
    let first = MINE.with(|mine| mine.replace(Some(new)));
    let behind = first.map_or(ptr::null_mut(), |first| ptr::from_ref(first).cast_mut());
    new.more.store(behind, Ordering::Relaxed);
    exit::release_at_end(new);
    new.free_slot().ok_or_else(AllocError::new)
}
