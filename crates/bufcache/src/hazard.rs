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

use std::cell::Cell;
use std::ptr::{self, NonNull};

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};
use offlock_sync::{check, fence, global, order, step, thread_id, thread_local};

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
        // Ordering: Release pairs with the Acquire in `mark_protected` and `is_protected`; the
        // scan that finds null comes after the reads of the bytes.
        self.0.store(ptr::null_mut(), order);
    }

    /// Returns the entry that this slot of a guard protects.
    ///
    /// # Panics
    ///
    /// Panics if the slot is null, which that of a guard is not.
    pub(crate) fn entry(&self) -> NonNull<Entry> {
        // Ordering: Relaxed; only this thread stores (invariant 2 of the records).
        NonNull::new(self.0.load(Ordering::Relaxed)).expect("the slot of a guard protects an entry")
    }
}

/// Returns whether a slot other than `mine` protects the entry. The caller has marked the entry and
/// called [`barrier`].
pub(crate) fn is_protected(at: &Entry, mine: Option<&Slot>) -> bool {
    let mine = mine.map_or(ptr::null(), ptr::from_ref);
    let order = order!(Acquire, "scan by a writer: the bytes were read before");
    // Ordering: Acquire pairs with the Release in `clear`; the caller's writes come after the reads
    // of the readers that have left.
    slots().any(|slot| ptr::eq(slot.0.load(order), at) && !ptr::eq(slot, mine))
}

/// Ends the protection of the entries at these addresses, by guards that the program forgot. The
/// caller drops their table, so that entries of another table may get the same addresses.
#[cfg(not(offlock_model))] // a model forgets no guard
pub(crate) fn end_of(entries: &std::ops::Range<*const Entry>) {
    for slot in slots() {
        // Ordering: Relaxed, all. No thread changes a slot that names an entry of a table without
        // users (invariant 2 of the records). The allocator carries the null to the users of the next
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
    // Ordering: Relaxed; only this thread stores (invariant 2 of the records).
    let names = |slot: &&Slot| ptr::eq(slot.0.load(Ordering::Relaxed), entry);
    mine().flat_map(|record| &record.slots).filter(names).count()
}

/// Sets `protected[i]` for each `entries[i]` that a slot protects, by one fence and one scan for all.
///
/// The caller has changed their words before, so that no new lookup uses them.
pub(crate) fn mark_protected<const N: usize>(entries: &[&Entry], protected: &mut [bool; N]) {
    step!("scan: the words are changed before", barrier());
    let acquire = order!(Acquire, "scan: the bytes were read before");
    for slot in slots() {
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
/// the entry live. Also returns the number of the slot's record, which is from 0 and unique among
/// records.
#[inline(always)]
pub(crate) fn protect(entry: &Entry) -> Result<(&'static Slot, u32), AllocError> {
    let found = free_slot()?;
    found.0.set(entry);
    Ok(found)
}

/// Returns a free slot of this thread, and the number of its record.
#[inline(always)]
fn free_slot() -> Result<(&'static Slot, u32), AllocError> {
    let of = |record: &'static Record| Some((record.free_slot()?, record.number));
    match MINE.with(Cell::get).and_then(of) {
        Some(found) => Ok(found),
        None => more_slots(),
    }
}

/// Protects an entry that a pin or a load of the caller keeps by a slot of this thread. Without a
/// fence: no evictor and no writer marks a word that has a pin or `IO`, and the change by which the
/// caller takes that away makes the slot visible.
pub(crate) fn protect_kept(entry: &Entry) -> Result<&'static Slot, AllocError> {
    let (slot, _) = free_slot()?;
    // Ordering: Relaxed; the Release in `Entry::unpin`, `publish` or `try_change` carries it to the
    // Acquire by which an evictor or a writer marks the word. Its scan follows.
    slot.0.store(ptr::from_ref(entry).cast_mut(), Ordering::Relaxed);
    Ok(slot)
}

/// Makes sure that the next [`protect`] of this thread does not allocate.
pub(crate) fn reserve() -> Result<(), AllocError> {
    free_slot().map(drop)
}

/// Returns a free slot of this thread's further records, or of a record claimed for it, and the
/// number of that record.
#[cold]
#[inline(never)]
fn more_slots() -> Result<(&'static Slot, u32), AllocError> {
    if let Some(found) = mine().find_map(|record| Some((record.free_slot()?, record.number))) {
        return Ok(found);
    }
    let new = claim()?;
    let first = MINE.with(|mine| mine.replace(Some(new)));
    let behind = first.map_or(ptr::null_mut(), |first| ptr::from_ref(first).cast_mut());
    // Ordering: Relaxed; only this thread, the owner, accesses it.
    new.more.store(behind, Ordering::Relaxed);
    release_at_end(new);
    let slot = new.free_slot().ok_or_else(AllocError::new)?;
    Ok((slot, new.number))
}

// The hazard slots of all threads: records, of which each belongs to one thread at a time.
//
// # Invariants
//
// 1. Records are pushed to a list and never removed or freed: a `&Record` is `'static`.
// 2. Only the thread that owns a record sets its slots, and only while they are null. The winner
//    of the exchange on `owner` owns the record until it stores 0 there. Another thread clears a
//    slot only if its guard was forgotten and the table of its entry is being dropped.
// 3. A thread releases a record only if all its slots are null.

/// Slots of a record: one cache line. Few in a model, which explores the load of each.
const SLOTS: usize = if cfg!(offlock_model) { 2 } else { 8 };

/// The slots of one thread.
#[derive(Debug)]
#[repr(C, align(128))]
struct Record {
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

impl Slot {
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
                let order = order!(Release, "release: the slots are null before");
                record.owner.store(0, order);
            }
        }
    }
}

/// Returns the records of this thread.
fn mine() -> impl Iterator<Item = &'static Record> {
    std::iter::successors(MINE.with(Cell::get), |record| record.more())
}

/// Returns the slots of all threads.
fn slots() -> impl Iterator<Item = &'static Slot> {
    records().flat_map(|record| &record.slots)
}

/// Returns all records of the process.
fn records() -> impl Iterator<Item = &'static Record> {
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
fn claim() -> Result<&'static Record, AllocError> {
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
    static MINE: Cell<Option<&'static Record>> = const { Cell::new(None) };
}

// The checkers' macro does not accept `const`.
#[cfg(offlock_model)]
thread_local! {
    static MINE: Cell<Option<&'static Record>> = Cell::new(None);
}

// Releases the hazard records of a thread when it ends, after all that may still use them.
//
// The destructors of a thread's variables may use a cache. A destructor of a `pthread` key
// releases the records, because the C library runs it after those of the variables. It runs again,
// up to four times, if a destructor sets the key again. In a model, the destructor of a variable
// releases them.

#[cfg(not(offlock_model))]
fn release_at_end(new: &'static Record) {
    use offlock_sync::native::OnceLock;

    /// Releases the records that `MINE` leads to, unless an earlier call has done so.
    unsafe extern "C" fn end(_: *mut libc::c_void) {
        if let Some(record) = MINE.take() {
            record.release();
        }
    }
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: `key` is valid for a write, and `end` ignores its argument.
        let error = unsafe { libc::pthread_key_create(&raw mut key, Some(end)) };
        (error == 0).then_some(key)
    });
    if let Some(key) = *key {
        // If there is no memory for the value, the thread's records stay owned for ever.
        // SAFETY: the key was created and is never deleted; the value is not dereferenced.
        let _ = unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(new).cast()) };
    }
}

#[cfg(offlock_model)]
fn release_at_end(new: &'static Record) {
    use std::cell::Cell;

    use offlock_sync::thread_local;

    struct Exit(Cell<Option<&'static Record>>);

    impl Drop for Exit {
        fn drop(&mut self) {
            let Some(record) = self.0.take() else { return };
            // `MINE` may be gone already; then nothing reads it.
            let _ = MINE.try_with(|mine| mine.set(None));
            record.release();
        }
    }

    thread_local! {
        static EXIT: Exit = Exit(Cell::new(None));
    }
    let _ = EXIT.try_with(|exit| exit.0.set(Some(new)));
}

#[cfg(all(test, not(offlock_model)))]
mod exit_tests {
    use std::thread;

    use super::{protect, records};
    use crate::word::Entry;

    /// Protects an entry when its thread ends.
    struct Late;

    impl Drop for Late {
        fn drop(&mut self) {
            let entry = Entry::new();
            protect(&entry).unwrap().0.clear();
        }
    }

    #[test]
    fn a_thread_that_looks_at_an_entry_as_it_ends_gives_its_record_back() {
        thread_local! {
            static FIRST: Late = const { Late };
            static LAST: Late = const { Late };
        }
        for first in [true, false] {
            let before = records().count();
            for _ in 0..200 {
                let thread = thread::spawn(move || {
                    // Destructors run in the order of the first uses, or in reverse.
                    FIRST.with(|_| ());
                    let entry = Entry::new();
                    if first {
                        protect(&entry).unwrap().0.clear();
                    }
                    LAST.with(|_| ());
                });
                thread.join().unwrap();
            }
            let more = records().count() - before;
            assert!(more < 100, "{more} records for 200 threads, one at a time");
        }
    }
}
