//! Entries and slots, the end of a device, and its syncs, without the locks of a cache. For a checker these
//! locks are fences, and hide a fence that is missing.

use std::convert::Infallible;
use std::sync::Arc;

use offlock_sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{model, thread};

use super::world::{beside, race, thoroughly};
use crate::dirty::{AttachOptions, Group, Writes};
use crate::frames::Frame;
use crate::hazard;
use crate::policy::mark;
use crate::source::InFlight;
use crate::wait::block_on;
use crate::word::{BACK, Entry, EntryWord, Key, STALE, WRITE};

/// The entry of one block, and the bytes of the block.
struct Bare {
    entry: Entry,
    bytes: UnsafeCell<u64>,
}

// SAFETY: `bytes` is the only field that is not `Sync`. It is written by the method that has claimed
// the free entry or has taken it apart, after it found no pin and no slot; it is read behind a pin or
// a slot. A model reports an access that breaks this.
unsafe impl Sync for Bare {}

impl Bare {
    /// Returns an entry whose block may be read.
    fn new() -> Self {
        let bare = Self::loading();
        bare.load(7);
        bare
    }

    /// Returns an entry whose block is being loaded.
    fn loading() -> Self {
        let bare = Self { entry: Entry::new(), bytes: UnsafeCell::new(0) };
        bare.begin_load();
        bare
    }

    /// Takes the free entry for the block.
    fn begin_load(&self) {
        assert!(self.entry.take(Self::key(), EntryWord::loading(Frame(0))));
    }

    /// Ends the load of the block with `bytes`.
    fn load(&self, bytes: u64) {
        // SAFETY: no other thread accesses the bytes before they are published.
        self.bytes.with_mut(|at| unsafe { at.write(bytes) });
        self.entry.publish();
    }

    /// Ends the load of the block by the creation of a block with `bytes`.
    fn create(&self, bytes: u64) {
        let slot = hazard::protect_kept(&self.entry).unwrap();
        self.entry.change(WRITE, 0);
        self.entry.publish_locked();
        // SAFETY: the mark `WRITE` keeps readers away, and the slot keeps the entry.
        self.bytes.with_mut(|at| unsafe { at.write(bytes) });
        self.entry.change(0, WRITE);
        slot.clear();
    }

    /// Uses the entry of an evicted block, hides the block and frees the entry. `is_first` says whether
    /// the entry is the first one of its bucket.
    fn give_back(&self, is_first: bool) {
        // SAFETY: this thread has the entry until it is free; the checker says so if not.
        self.bytes.with_mut(|at| unsafe { at.write(8) });
        self.entry.hide();
        self.entry.free(is_first);
    }

    /// Takes the entry for another block, and uses it. Returns false if the entry is not free yet.
    fn take_over(&self) -> bool {
        let taken = self.entry.take(Key::new(1, 8), EntryWord::loading(Frame(1)));
        if taken {
            // SAFETY: as in `give_back`.
            self.bytes.with_mut(|at| unsafe { at.write(9) });
        }
        taken
    }

    fn key() -> Key {
        Key::new(1, 0)
    }

    /// Reads the bytes under a hazard slot like a hit. Returns `None` if the block may not be read.
    fn read(&self) -> Option<u64> {
        let (slot, _) = hazard::protect(&self.entry).ok()?;
        let there = self.entry.look(Self::key()).is_some_and(EntryWord::is_readable);
        // SAFETY: the slot keeps the entry as it is.
        let bytes = there.then(|| self.bytes.with(|at| unsafe { at.read() }));
        slot.clear();
        bytes
    }

    /// Reads the bytes under a pin and drops the pin. After the last pin it uses the entry, like the
    /// thread that frees the block of a failed load.
    fn leave(&self) {
        // SAFETY: the pin keeps the entry as it is.
        self.bytes.with(|at| unsafe { at.read() });
        if self.entry.unpin().pins() == 0 {
            // SAFETY: the other pins are dropped.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
    }

    /// Protects the block by both slots of a record. Returns false if a slot cannot be had.
    fn protect_twice(&self) -> bool {
        let slots = [(); 2].map(|()| hazard::protect(&self.entry));
        slots.iter().flatten().for_each(|(slot, _)| slot.clear());
        slots.iter().all(Result::is_ok)
    }

    /// Pins the entry, as a thread that waits for a load does.
    fn pin(&self) {
        assert!(self.entry.try_pin(self.entry.word()).is_ok());
    }

    /// Pins the block if it may be read and has not changed since the look at its word. Returns the
    /// bytes.
    fn pin_and_read(&self) -> Option<u64> {
        let seen = self.entry.word();
        let pinned = seen.is_readable() && self.entry.try_pin(seen).is_ok();
        pinned.then(|| {
            // SAFETY: the pin keeps the entry as it is.
            let bytes = self.bytes.with(|at| unsafe { at.read() });
            self.entry.unpin();
            bytes
        })
    }

    /// Turns a waiter's pin into a hazard slot and returns the bytes read under it.
    fn wake(&self) -> u64 {
        let slot = hazard::protect_kept(&self.entry).unwrap();
        self.entry.unpin();
        #[cfg(offlock_shuttle)]
        (0..8).for_each(|_| thread::yield_now()); // shuttle sees a schedule, not a race
        // SAFETY: the slot keeps the entry as it is.
        let bytes = self.bytes.with(|at| unsafe { at.read() });
        slot.clear();
        bytes
    }

    /// Invalidates the entry. Returns whether it could be freed.
    fn invalidate(&self) -> bool {
        self.entry.change(STALE, 0);
        let left = hazard::is_left(&self.entry);
        if left {
            // SAFETY: `is_left` has found no slot that names the entry, and no reader takes it since `STALE`.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
        left
    }

    /// Evicts the block. Returns false if a slot protects it.
    fn evict(&self) -> bool {
        if !mark(&self.entry) {
            return false;
        }
        let mut protected = [false];
        hazard::mark_protected(&[&self.entry], &mut protected);
        if protected == [false] {
            // SAFETY: the scan has found no slot that names the entry, and no reader takes it since the mark.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
        protected == [false]
    }
}

/// The syncs and durable writes of a device that reports lost writes once.
struct BareWrites(Writes);

impl BareWrites {
    /// Returns a device that has lost nothing.
    fn new() -> Self {
        Self(Writes::new(1, AttachOptions::new()))
    }

    /// Syncs like `Shared::sync_device`. `device` returns false to report a loss.
    fn sync(&self, device: impl FnOnce() -> bool) -> bool {
        self.write_and_sync(|| (), device)
    }

    /// Writes and syncs like `Shared::sync`.
    fn write_and_sync(&self, write: impl FnOnce(), device: impl FnOnce() -> bool) -> bool {
        let losses = self.0.group.losses();
        write();
        let sync = async { self.0.poisoned().is_none() && self.has_succeeded(device) };
        block_on(self.0.group.join(losses, sync, || ()))
    }

    /// Resets the device like `Shared::reset`. Calls `look` until no loss is reported meanwhile.
    fn reset(&self, mut look: impl FnMut()) {
        _ = block_on(self.0.forgive_after(async || Ok::<(), Infallible>(look())));
    }

    /// Returns whether a sync has failed since the last reset.
    fn is_poisoned(&self) -> bool {
        self.0.poisoned().is_some()
    }

    /// Writes like `Shared::write_window` for a durable write. `device` returns false to report a loss.
    fn write_durable(&self, device: impl FnOnce() -> bool) -> bool {
        let writing = self.0.group.begin_write();
        let has_succeeded = self.has_succeeded(device);
        block_on(writing.end()) && has_succeeded
    }

    fn has_succeeded(&self, device: impl FnOnce() -> bool) -> bool {
        let has_succeeded = device();
        if !has_succeeded {
            self.0.poison(libc::EIO);
        }
        has_succeeded
    }
}

/// At least one of the two sees the other.
#[test]
fn inv06_a_slot_against_a_scan() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let reads = |bare: Arc<Bare>| assert!([None, Some(7)].contains(&bare.read()));
        let (evicted, ()) = race(&bare, |bare| bare.evict(), reads);
        assert!(!evicted || bare.read().is_none());
    });
}

/// A check of the pins and the slots finds one of the two. The slot is a plain store: the release of
/// the pin carries it.
#[test]
fn inv06_a_pin_becomes_a_slot() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        bare.pin();
        race(&bare, |bare| bare.invalidate(), |bare| assert_eq!(bare.wake(), 7));
    });
}

/// The next block takes the place after the last use for the one before. The two blocks have
/// different homes, so no lock orders the uses.
#[test]
fn inv06_a_place_is_free_once_its_user_has_left() {
    thoroughly(|| taken_from_its_user(false));
}

/// The same with the entry that has the bucket's `OVERFLOW`.
#[test]
fn inv06_the_first_place_of_a_bucket_is_free_once_its_user_has_left() {
    thoroughly(|| taken_from_its_user(true));
}

fn taken_from_its_user(is_first: bool) {
    let bare = Arc::new(Bare::new());
    let takes = |bare: Arc<Bare>| (0..2).any(|_| bare.take_over());
    let ((), taken) = race(&bare, |bare| bare.give_back(is_first), takes);
    assert!(taken || bare.take_over(), "the place is not free");
}

/// The last of two threads that waited for a load that failed comes after the other.
#[test]
fn inv06_the_last_pin() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        (0..2).for_each(|_| bare.pin());
        race(&bare, |bare| bare.leave(), |bare| bare.leave());
    });
}

/// The slot of the creator is a plain store, which the changes of the word carry to the scan.
#[test]
fn inv10_a_creator_against_an_invalidation() {
    thoroughly(|| {
        let bare = Arc::new(Bare::loading());
        race(&bare, |bare| bare.invalidate(), |bare| bare.create(9));
    });
}

/// The block is evicted and loaded again between the look at its word and the pin, and its word is
/// what it was.
#[test]
fn inv03_a_pin_of_a_block_that_was_loaded_again() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let loads = |bare: Arc<Bare>| {
            if bare.evict() {
                bare.give_back(false);
                bare.begin_load();
                bare.load(9);
            }
        };
        let (read, ()) = race(&bare, |bare| bare.pin_and_read(), loads);
        assert!([None, Some(7), Some(9)].contains(&read));
    });
}

/// A thread gets the record of one that has ended, of which each slot is null then.
#[test]
fn inv06_a_record_of_a_thread_that_has_ended() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let threads = [(); 2].map(|()| beside(&bare, |bare| assert!(bare.protect_twice())));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// The operations of a device, of which one is in flight.
fn operation() -> InFlight {
    let device = InFlight::new();
    assert!(device.begin());
    device
}

/// The thread that detaches a device comes after its last operation and after what ended the device.
#[test]
fn inv23_the_last_operation() {
    thoroughly(|| {
        let all = Arc::new((operation(), AtomicBool::new(false), AtomicBool::new(false)));
        let refuses = |all: &Arc<(InFlight, AtomicBool, AtomicBool)>| {
            all.2.store(true, Relaxed);
            let detaches = all.0.refuse();
            assert!(!detaches || all.1.load(Relaxed));
            detaches
        };
        let (here, other) = race(&all, refuses, |all| {
            all.1.store(true, Relaxed);
            let detaches = all.0.end();
            assert!(!detaches || all.2.load(Relaxed));
            detaches
        });
        assert_ne!(here, other);
    });
}

#[test]
fn inv23_an_operation_that_is_waited_for() {
    thoroughly(|| {
        let both = Arc::new((operation(), AtomicBool::new(false)));
        let looks = |both: &Arc<(InFlight, AtomicBool)>| both.0.any() || both.1.load(Relaxed);
        let (is_over, ()) = race(&both, looks, |both| {
            both.1.store(true, Relaxed);
            assert!(!both.0.end());
        });
        assert!(is_over);
    });
}

/// One of the two drops the block. Or else it stays dirty for ever.
#[test]
fn inv19_the_last_handle_against_a_write_that_fails() {
    thoroughly(|| {
        let both = Arc::new((operation(), Entry::new()));
        both.1.change(BACK, 0);
        let abandons = |both: &Arc<(InFlight, Entry)>| {
            both.0.abandon();
            !both.1.word().has(BACK)
        };
        let (drops, fails) = race(&both, abandons, |both| {
            both.1.change(0, BACK);
            both.0.is_abandoned()
        });
        assert!(drops || fails);
    });
}

/// The device loses a write and reports that to another sync, after which a reset ends the poisoning.
#[test]
fn inv20_a_sync_that_a_reset_overtakes() {
    const NOT_THERE: u64 = 0;
    const WRITTEN: u64 = 1;
    const DURABLE: u64 = 2;
    thoroughly(|| {
        let both = Arc::new((BareWrites::new(), AtomicU64::new(NOT_THERE)));
        let change =
            |block: &AtomicU64, now| block.compare_exchange(WRITTEN, now, Relaxed, Relaxed);
        let resets = beside(&both, move |both| {
            both.0.sync(|| {
                let _ = change(&both.1, NOT_THERE); // unless it is durable
                false
            });
            both.0.reset(|| ());
        });
        let (device, block) = &*both;
        let write = || block.store(WRITTEN, Relaxed);
        let synced = device.write_and_sync(write, || {
            let _ = change(block, DURABLE);
            true
        });
        assert!(!synced || block.load(Relaxed) == DURABLE, "it was given up");
        resets.join().unwrap();
    });
}

/// A thread that finds the poisoning ended finds the blocks that the reset has made dirty, without a lock.
#[test]
fn inv24_the_end_of_a_reset() {
    thoroughly(|| {
        let both = Arc::new((BareWrites::new(), AtomicBool::new(false)));
        assert!(!both.0.sync(|| false) && both.0.is_poisoned());
        let looks = |both: &Arc<(BareWrites, AtomicBool)>| {
            assert!(both.0.is_poisoned() || both.1.load(Relaxed));
        };
        race(&both, looks, |both| both.0.reset(|| both.1.store(true, Relaxed)));
    });
}

/// A write that the device loses is noted after the first failure. Either the reset has seen it, or the
/// device stays poisoned.
#[test]
fn inv18_a_failure_during_a_reset() {
    thoroughly(|| {
        let both = Arc::new((BareWrites::new(), AtomicBool::new(false)));
        let (device, noted) = &*both;
        assert!(!device.sync(|| false));
        let writes = beside(&both, |both| {
            both.1.store(true, Relaxed);
            both.0.write_durable(|| false);
        });
        let mut is_seen = false;
        device.reset(|| is_seen = noted.load(Relaxed));
        writes.join().unwrap();
        assert!(is_seen || device.is_poisoned(), "the loss is reported nowhere");
    });
}

/// One caller begins the sync for the two that wait, and fails for both.
#[test]
fn inv18_three_syncs_that_fail() {
    model(|| {
        let group = Arc::new(Group::new());
        let sync = |group: Arc<Group>| {
            let fails = async {
                thread::yield_now();
                false
            };
            assert!(!block_on(group.join(group.losses(), fails, || ())));
        };
        let others = [(); 2].map(|()| beside(&group, sync));
        sync(group);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// The device tells one of the two that it has lost an earlier write. The sync vouches for that
/// write, so it fails also where the durable write was told.
#[test]
fn inv18_a_sync_beside_a_durable_write_that_fails() {
    thoroughly(|| {
        let both = Arc::new((BareWrites::new(), AtomicBool::new(true)));
        let durable = beside(&both, |both| both.0.write_durable(|| !both.1.swap(false, Relaxed)));
        assert!(!both.0.sync(|| !both.1.swap(false, Relaxed)), "the loss is not told");
        durable.join().unwrap();
    });
}
