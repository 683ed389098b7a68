//! Slots against their scan, with nothing around them.

use std::sync::Arc;

use bufcache::bare::{Bare, BareGroup, BareOperation, BareWrites};
use offlock_sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use offlock_sync::{model, thread};

use super::world::thoroughly;

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("publish: the bytes are there before", "bare::inv03_a_block_that_is_found_has_its_bytes"),
    ("protect: the slot is set before the lookup", "bare::inv06_a_slot_against_a_scan"),
    ("scan: the words are changed before", "bare::inv06_a_slot_against_a_scan"),
    ("clear: the bytes were read before", "bare::inv06_a_slot_against_a_scan"),
    ("scan: the bytes were read before", "bare::inv06_a_slot_against_a_scan"),
    ("is_left: no pin before the scan", "bare::inv06_a_pin_becomes_a_slot"),
    ("unpin: the bytes were read before", "bare::inv06_a_pin_becomes_a_slot_before_an_eviction"),
    ("unpin: the bytes were read before", "bare::inv06_the_last_pin"),
    ("free: the key is hidden before", "bare::inv06_a_place_is_free_once_its_user_has_left"),
    (
        "free the first: the key is hidden before",
        "bare::inv06_the_first_place_of_a_bucket_is_free_once_its_user_has_left",
    ),
    ("take: the place was freed before", "bare::inv06_a_place_is_free_once_its_user_has_left"),
    ("look: the bytes are there before", "bare::inv03_a_block_that_is_found_has_its_bytes"),
    ("word: the load has ended before", "bare::inv03_a_thread_that_waits_under_its_pin"),
    ("try_pin: the bytes are there before", "bare::inv03_a_pin_of_a_block_that_was_loaded_again"),
    ("change: the bytes were read or written before", "bare::inv03_a_block_that_is_created"),
    ("change: the bytes were read or written before", "bare::inv15_a_write_against_a_write_back"),
    (
        "change: the bytes were read or written before",
        "bare::inv10_a_creator_against_an_invalidation",
    ),
    ("push: the record is built before", "bare::inv06_a_slot_against_a_scan"),
    ("records: each was built before", "bare::inv06_a_slot_against_a_scan"),
    ("release: the slots are null before", "bare::inv06_a_record_of_a_thread_that_has_ended"),
    ("claim_record: the slots were null before", "bare::inv06_a_record_of_a_thread_that_has_ended"),
    ("end: the operations come before the detach", "bare::inv23_the_last_operation"),
    ("refuse: the operations come before the detach", "bare::inv23_the_last_operation"),
    ("any: the operations come before the detach", "bare::inv23_an_operation_that_is_waited_for"),
    (
        "abandon: the device is abandoned before the look at the marks",
        "bare::inv19_the_last_handle_against_a_write_that_fails",
    ),
    (
        "is_abandoned: the mark is taken off before",
        "bare::inv19_the_last_handle_against_a_write_that_fails",
    ),
    ("sync: it has not failed", "bare::inv18_three_syncs_that_fail"),
    ("sync: nothing is lost since the caller wrote", "bare::inv20_a_sync_that_a_reset_overtakes"),
    ("forgive: the blocks are dirty before", "bare::inv24_the_end_of_a_reset"),
    ("reset: nothing is lost since it looked", "bare::inv18_a_failure_during_a_reset"),
    ("poisoned: the reset has dirtied its blocks", "bare::inv24_the_end_of_a_reset"),
];

/// Of those, what only a checker of weak memory can see.
pub(super) const LOOM_ONLY: &[&str] = &[
    "publish: the bytes are there before",
    "protect: the slot is set before the lookup",
    "scan: the words are changed before",
    "clear: the bytes were read before",
    "scan: the bytes were read before",
    "free: the key is hidden before",
    "free the first: the key is hidden before",
    "take: the place was freed before",
    "unpin: the bytes were read before",
    "look: the bytes are there before",
    "word: the load has ended before",
    "try_pin: the bytes are there before",
    "change: the bytes were read or written before",
    "push: the record is built before",
    "records: each was built before",
    "release: the slots are null before",
    "claim_record: the slots were null before",
    "end: the operations come before the detach",
    "refuse: the operations come before the detach",
    "any: the operations come before the detach",
    "abandon: the device is abandoned before the look at the marks",
    "is_abandoned: the mark is taken off before",
    "forgive: the blocks are dirty before",
    "poisoned: the reset has dirtied its blocks",
];

/// At least one of the two sees the other.
#[test]
fn inv06_a_slot_against_a_scan() {
    thoroughly(reads_against_an_evictor);
}

fn reads_against_an_evictor() {
    let bare = Arc::new(Bare::new());
    let reads = thread::spawn({
        let bare = Arc::clone(&bare);
        move || assert!([None, Some(7)].contains(&bare.read()))
    });
    let evicted = bare.evict();
    reads.join().unwrap();
    assert!(!evicted || bare.read().is_none());
}

/// A check of the pins and the slots finds one of the two.
#[test]
fn inv06_a_pin_becomes_a_slot() {
    thoroughly(wakes_against_a_reclaim);
}

fn wakes_against_a_reclaim() {
    let bare = Arc::new(Bare::new());
    bare.pin();
    let wakes = thread::spawn({
        let bare = Arc::clone(&bare);
        move || assert_eq!(bare.wake(), 7)
    });
    bare.invalidate();
    wakes.join().unwrap();
}

/// A thread that waited for a load sets its slot by a plain store: the release of its pin carries
/// the slot to the evictor.
#[test]
fn inv06_a_pin_becomes_a_slot_before_an_eviction() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        bare.pin();
        let wakes = thread::spawn({
            let bare = Arc::clone(&bare);
            move || assert_eq!(bare.wake(), 7)
        });
        bare.evict();
        wakes.join().unwrap();
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
    let takes = thread::spawn({
        let bare = Arc::clone(&bare);
        move || (0..2).any(|_| bare.take_over())
    });
    bare.give_back(is_first);
    let taken = takes.join().unwrap();
    assert!(taken || bare.take_over(), "the place is not free");
}

#[test]
fn inv03_a_block_that_is_found_has_its_bytes() {
    thoroughly(|| {
        let bare = Arc::new(Bare::empty());
        let loads = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.claim(|| 9)
        });
        assert!(bare.read().is_none_or(|read| read == 9));
        loads.join().unwrap();
    });
}

#[test]
fn inv03_a_block_that_is_created() {
    thoroughly(|| {
        let bare = Arc::new(Bare::loading());
        let creates = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.create(9)
        });
        assert!(bare.read().is_none_or(|read| read == 9));
        creates.join().unwrap();
    });
}

/// Each finds the word as it was before the other marked it.
#[test]
fn inv15_a_write_against_a_write_back() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let writes = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.write(9)
        });
        assert!([None, Some(7), Some(9)].contains(&bare.write_back()));
        writes.join().unwrap();
    });
}

/// The last of two threads that waited for a load that failed comes after the other.
#[test]
fn inv06_the_last_pin() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        (0..2).for_each(|_| bare.pin());
        let leaves = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.leave()
        });
        bare.leave();
        leaves.join().unwrap();
    });
}

/// The slot of the creator is a plain store, which the changes of the word carry to the scan.
#[test]
fn inv10_a_creator_against_an_invalidation() {
    thoroughly(|| {
        let bare = Arc::new(Bare::loading());
        let creates = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.create(9)
        });
        bare.invalidate();
        creates.join().unwrap();
    });
}

#[test]
fn inv03_a_thread_that_waits_under_its_pin() {
    thoroughly(|| {
        let bare = Arc::new(Bare::loading());
        let loads = thread::spawn({
            let bare = Arc::clone(&bare);
            move || bare.load(9)
        });
        assert_eq!(bare.wait(), 9);
        loads.join().unwrap();
    });
}

/// The block is evicted and loaded again between the look at its word and the pin, and its word is
/// what it was.
#[test]
fn inv03_a_pin_of_a_block_that_was_loaded_again() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let loads = thread::spawn({
            let bare = Arc::clone(&bare);
            move || {
                if bare.evict() {
                    bare.give_back(false);
                    bare.claim(|| 9);
                }
            }
        });
        assert!([None, Some(7), Some(9)].contains(&bare.pin_and_read()));
        loads.join().unwrap();
    });
}

/// A thread gets the record of one that has ended, of which each slot is null then.
#[test]
fn inv06_a_record_of_a_thread_that_has_ended() {
    thoroughly(|| {
        let bare = Arc::new(Bare::new());
        let [reads, other] = [(); 2].map(|()| {
            let bare = Arc::clone(&bare);
            thread::spawn(move || assert!(bare.protect_twice()))
        });
        reads.join().unwrap();
        other.join().unwrap();
    });
}

/// The thread that detaches a device comes after its last operation and after what ended the device.
#[test]
fn inv23_the_last_operation() {
    thoroughly(|| {
        let device = Arc::new(BareOperation::new());
        let [worked, closed] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let ends = thread::spawn({
            let (device, worked, closed) =
                (Arc::clone(&device), Arc::clone(&worked), Arc::clone(&closed));
            move || {
                worked.store(true, Relaxed);
                let detaches = device.end();
                assert!(!detaches || closed.load(Relaxed));
                detaches
            }
        });
        closed.store(true, Relaxed);
        let detaches = device.refuse();
        assert!(!detaches || worked.load(Relaxed));
        assert_ne!(detaches, ends.join().unwrap());
    });
}

#[test]
fn inv23_an_operation_that_is_waited_for() {
    thoroughly(|| {
        let (device, worked) = (Arc::new(BareOperation::new()), Arc::new(AtomicBool::new(false)));
        let ends = thread::spawn({
            let (device, worked) = (Arc::clone(&device), Arc::clone(&worked));
            move || {
                worked.store(true, Relaxed);
                assert!(!device.end());
            }
        });
        assert!(device.is_in_flight() || worked.load(Relaxed));
        ends.join().unwrap();
    });
}

/// One of the two drops the block. Or else it stays dirty for ever.
#[test]
fn inv19_the_last_handle_against_a_write_that_fails() {
    thoroughly(|| {
        let device = Arc::new(BareOperation::new());
        let fails = thread::spawn({
            let device = Arc::clone(&device);
            move || device.fail()
        });
        let drops = device.abandon();
        assert!(fails.join().unwrap() || drops);
    });
}

/// The device loses a write and reports that to another sync, after which a reset ends the poisoning.
#[test]
fn inv20_a_sync_that_a_reset_overtakes() {
    const NOT_THERE: u64 = 0;
    const WRITTEN: u64 = 1;
    const DURABLE: u64 = 2;
    thoroughly(|| {
        let (device, block) = (Arc::new(BareWrites::new()), Arc::new(AtomicU64::new(NOT_THERE)));
        let change =
            |block: &AtomicU64, now| block.compare_exchange(WRITTEN, now, Relaxed, Relaxed);
        let resets = thread::spawn({
            let (device, block) = (Arc::clone(&device), Arc::clone(&block));
            move || {
                device.sync(|| {
                    let _ = change(&block, NOT_THERE); // unless it is durable
                    false
                });
                device.reset(|| ());
            }
        });
        let write = || block.store(WRITTEN, Relaxed);
        let synced = device.write_and_sync(write, || {
            let _ = change(&block, DURABLE);
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
        let (device, dirtied) = (Arc::new(BareWrites::new()), Arc::new(AtomicBool::new(false)));
        assert!(!device.sync(|| false) && device.is_poisoned());
        let resets = thread::spawn({
            let (device, dirtied) = (Arc::clone(&device), Arc::clone(&dirtied));
            move || device.reset(|| dirtied.store(true, Relaxed))
        });
        assert!(device.is_poisoned() || dirtied.load(Relaxed));
        resets.join().unwrap();
    });
}

/// A write that the device loses is noted after the first failure. Either the reset has seen it, or the
/// device stays poisoned.
#[test]
fn inv18_a_failure_during_a_reset() {
    thoroughly(|| {
        let (device, noted) = (Arc::new(BareWrites::new()), Arc::new(AtomicBool::new(false)));
        assert!(!device.sync(|| false));
        let writes = thread::spawn({
            let (device, noted) = (Arc::clone(&device), Arc::clone(&noted));
            move || {
                noted.store(true, Relaxed);
                device.write_durable(|| false);
            }
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
        let group = Arc::new(BareGroup::new());
        let sync = |group: Arc<BareGroup>| {
            let synced = group.join(|| {
                thread::yield_now();
                false
            });
            assert!(!synced);
        };
        let others = [(); 2].map(|()| {
            let group = Arc::clone(&group);
            thread::spawn(move || sync(group))
        });
        sync(group);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// The device tells one of the two that it has lost an earlier write. The sync vouches for that
/// write, so it fails also where the durable write was told.
#[test]
fn inv18_a_sync_beside_a_durable_write_that_fails() {
    thoroughly(|| {
        let (writes, lost) = (Arc::new(BareWrites::new()), Arc::new(AtomicBool::new(true)));
        let durable = thread::spawn({
            let (writes, lost) = (Arc::clone(&writes), Arc::clone(&lost));
            move || writes.write_durable(|| !lost.swap(false, Relaxed))
        });
        assert!(!writes.sync(|| !lost.swap(false, Relaxed)), "the loss is not told");
        durable.join().unwrap();
    });
}
