//! The end of a list, of its blocks and of the entries that outlive it.

use std::mem::forget;

use offlock_sync::virtual_cpu::without_sections;
use offlock_sync::{Arc, model};

use super::lists::{List, with};
use super::payload::{Drops, ONE, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("end: no section is under way", "ends::inv13_a_list_ends_beside_its_entry"),
    ("end: no cell is left", "ends::inv13_a_list_ends_beside_its_entry"),
    ("release: after the last use", "ends::inv13_the_last_entry_frees_the_list"),
    ("end: no change under a lock is under way", "ends::inv13_a_list_ends_beside_a_slow_removal"),
    ("removal: unlock before the entry ends", "ends::inv13_a_list_ends_beside_a_reference"),
    ("defer: after the last use by the entry", FORGOTTEN),
    ("defer: before the removal", FORGOTTEN),
    ("defer: the link is stored", FORGOTTEN),
    ("end: before a link is read", FORGOTTEN),
    ("deferred: before the value is dropped", FORGOTTEN),
    ("thaw: the owner last", FORGOTTEN),
    ("owner: the snapshot has ended", FORGOTTEN),
    ("trim: no thread counts", "ends::inv14_a_trim_meets_a_count"),
    ("counting: before the blocks are read", "ends::inv14_a_trim_meets_a_count"),
    ("trim: no pin is left", "ends::inv14_a_trim_meets_a_walk"),
];

const FORGOTTEN: &str = "ends::inv13_a_list_ends_beside_the_thread_of_a_forgotten_snapshot";

/// The planted bugs that only loom finds. Some leak the list or free it too early, which only
/// loom sees, or weaken an ordering. The last one needs a rare schedule.
pub(super) const LOOM_ONLY: &[&str] = &[
    "defer: after the last use by the entry",
    "defer: before the removal",
    "defer: the link is stored",
    "end: before a link is read",
    "deferred: before the value is dropped",
    "thaw: the owner last",
    "owner: the snapshot has ended",
    "end: no section is under way",
    "release: after the last use",
    "counting: before the blocks are read",
    "trim: no pin is left",
];

/// Returns a list that is not shared, with an entry of the slot of this CPU.
fn alone() -> (List, percpu_list::Entry<super::payload::Payload>, Drops) {
    let (list, drops) = (List::new(), Drops::new());
    let entry = list.insert(drops.payload(0)).unwrap();
    (list, entry, drops)
}

fn list_ends_beside_its_entry() {
    let (list, entry, drops) = alone();
    let there = spawn_on(ZERO, move || drop(entry));
    drop(list);
    there.join().unwrap();
    assert_eq!(drops.count(), 1);
}

#[test]
fn inv13_a_list_ends_beside_its_entry() {
    model(list_ends_beside_its_entry);
}

#[test]
fn inv13_a_list_ends_beside_a_slow_removal() {
    without_sections(|| model(list_ends_beside_its_entry));
}

/// The entry and a reference end on two threads, after the list or before.
#[test]
fn inv13_a_list_ends_beside_a_reference() {
    model(|| {
        let (list, entry, drops) = alone();
        let found = entry.share();
        let there = spawn_on(ONE, move || {
            assert_eq!(found.read(), 0);
            drop(found);
        });
        drop(list);
        assert_eq!(entry.read(), 0);
        drop(entry);
        there.join().unwrap();
        assert_eq!(drops.count(), 1);
    });
}

/// The end of either entry may be the last, which frees the list.
#[test]
fn inv13_the_last_entry_frees_the_list() {
    model(|| {
        let (list, first, drops) = alone();
        let second = list.insert(drops.payload(1)).unwrap();
        drop(list);
        let there = spawn_on(ONE, move || {
            assert_eq!(first.read(), 0);
            drop(first);
        });
        drop(second);
        there.join().unwrap();
        assert_eq!(drops.count(), 2);
    });
}

/// A thread has forgotten its snapshot, and drops entries of two blocks while another thread ends the list: it
/// leaves each to the end of the list, or removes it.
#[test]
fn inv13_a_list_ends_beside_the_thread_of_a_forgotten_snapshot() {
    model(|| {
        let (list, first, drops) = alone();
        let [second, third] = [1, 2].map(|value| list.insert(drops.payload(value)).unwrap());
        forget(list.lock_all().unwrap());
        let there = spawn_on(ONE, move || drop(list));
        for (value, entry) in [first, second, third].into_iter().enumerate() {
            assert_eq!(entry.read(), value as u64);
            drop(entry);
        }
        there.join().unwrap();
        assert_eq!(drops.count(), 3);
    });
}

/// A second block is empty. A trim frees it while another thread counts the entries.
#[test]
fn inv14_a_trim_meets_a_count() {
    model(|| {
        let (list, [first, second, third], drops) = with();
        drop(third);
        let counts = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || assert_eq!(list.len(), 2)
        });
        list.trim().unwrap();
        counts.join().unwrap();
        list.validate();
        drop((first, second));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// A walk has found an entry of the second block. The entry is removed and the block freed.
#[test]
fn inv14_a_trim_meets_a_walk() {
    thoroughly(|| {
        let (list, [first, second, third], drops) = with();
        let walks = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                let seen: Vec<u64> = list.iter().map(|found| found.read()).collect();
                assert!(seen.starts_with(&[0, 1]) && seen.len() <= 3, "{seen:?}");
            }
        });
        drop(third);
        list.trim().unwrap();
        walks.join().unwrap();
        list.validate();
        drop((first, second));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}
