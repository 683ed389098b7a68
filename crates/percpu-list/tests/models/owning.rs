//! Entries that several threads add, remove, drain and drop at the same time.

use offlock_sync::{Arc, model};
use percpu_list::{Entry, PerCpuList, Refused};

use super::payload::{Drops, ONE, Payload, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("release: no other count is left", "owning::inv04_a_removal_meets_the_drop_of_the_entry"),
    (
        "last count: after the uses by other threads",
        "owning::inv04_a_removal_meets_the_drop_of_the_entry",
    ),
    (
        "release: after this thread's last use",
        "owning::inv04_a_removal_meets_the_drop_of_the_entry",
    ),
    ("first entry: publish the shard", "owning::a_slots_first_entry_is_seen_finished"),
    (
        "first entry: use the other thread's shard",
        "owning::two_first_entries_of_a_slot_share_a_shard",
    ),
    ("close: wait for the adds that have begun", "owning::nothing_is_added_once_close_returned"),
    ("length: removals before adds", "owning::inv10_a_list_with_an_entry_is_never_empty"),
];

/// The planted bugs that only loom finds.
///
/// A `close` that does not wait only fails if an add that follows the drain loads a stale `closed`,
/// and shuttle returns no stale values. And a random schedule rarely runs a whole add and removal
/// between the two loads of a length.
pub(super) const LOOM_ONLY: &[&str] = &[
    "last count: after the uses by other threads",
    "release: after this thread's last use",
    "first entry: publish the shard",
    "first entry: use the other thread's shard",
    "close: wait for the adds that have begun",
    "length: removals before adds",
];

pub(super) type List = PerCpuList<Payload>;
pub(super) type Shared = Entry<Arc<List>>;

/// Creates a list with `N` entries in slot 0, whose values are 0, 1 and so on.
pub(super) fn with<const N: usize>() -> (Arc<List>, [Shared; N], Drops) {
    let (list, drops) = (Arc::new(List::new()), Drops::new());
    let entries = std::array::from_fn(|n| {
        List::insert_arc(&list, drops.payload(n as u64)).unwrap() // the main thread is on CPU 0
    });
    (list, entries, drops)
}

/// Drains the list, reads every value and returns their number.
pub(super) fn drain(list: &List) -> usize {
    list.drain().map(|found| assert!(found.unwrap().read() < 2)).count()
}

#[test]
fn inv04_a_removal_meets_a_drain() {
    model(|| {
        let (list, [entry], drops) = with();
        let drains = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || drain(&list)
        });
        let removed = entry.remove().unwrap();
        assert_eq!(usize::from(removed) + drains.join().unwrap(), 1);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn inv04_two_drains_share_the_entries() {
    model(|| {
        let (list, [first, second], drops) = with();
        let drains = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || drain(&list)
        });
        let taken = drain(&list);
        assert_eq!(taken + drains.join().unwrap(), 2);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 0));
        assert!(!first.remove().unwrap() && !second.is_linked());
        drop(second);
        assert_eq!(drops.count(), 2);
    });
}

/// A reference and the drop of the entry remove the same value. The last of them drops it.
#[test]
fn inv04_a_removal_meets_the_drop_of_the_entry() {
    thoroughly(|| {
        let (list, [entry], drops) = with();
        let found = entry.share();
        let removes = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                let removed = list.remove(&found).unwrap();
                assert_eq!(found.read(), 0);
                removed
            }
        });
        assert_eq!(entry.read(), 0);
        drop(entry);
        removes.join().unwrap();
        list.validate();
        let stats = list.stats();
        assert_eq!((stats.adds, stats.removals, drops.count()), (1, 1, 1));
    });
}

/// A reference from a walk is read after the entry and the list were dropped.
#[test]
fn inv07_a_reference_outlives_entry_and_list() {
    thoroughly(|| {
        let (list, [entry], drops) = with();
        let walks = spawn_on(ONE, move || {
            let found = list.iter().next();
            drop(list);
            found.map_or(0, |found| found.unwrap().read())
        });
        drop(entry);
        assert_eq!(walks.join().unwrap(), 0);
        assert_eq!(drops.count(), 1);
    });
}

/// The drop of either entry may be the last, which drops the list.
#[test]
fn inv13_the_last_entry_drops_the_list() {
    thoroughly(|| {
        let (list, [first, second], drops) = with();
        drop(list);
        let there = spawn_on(ONE, move || drop(first));
        drop(second);
        there.join().unwrap();
        assert_eq!(drops.count(), 2);
    });
}

/// A value that was added before the close is drained. A value that comes later is returned.
#[test]
fn nothing_is_added_once_close_returned() {
    model(|| {
        let (list, [], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || match List::insert_arc(&list, drops.payload(1)) {
                Ok(entry) => Some(entry),
                Err(error) => {
                    assert_eq!((error.reason, error.value.read()), (Refused::Closed, 1));
                    None
                }
            }
        });
        list.close().unwrap();
        let drained = drain(&list);
        let added = adds.join().unwrap();
        assert_eq!(drained, usize::from(added.is_some()));
        assert!(list.is_empty());
        drop(added);
        assert_eq!(drops.count(), 1);
    });
}

/// A thread that reads a slot during the first add there finds no shard, or a complete one. The
/// spawned thread is the reader, because it runs last in loom's first run, and loom derives the
/// other runs from what it finds there.
#[test]
fn a_slots_first_entry_is_seen_finished() {
    model(|| {
        let (list, [], drops) = with();
        let reader = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                assert!(list.len() <= 1);
                list.lock_all().unwrap().for_each(|found| assert_eq!(found.read(), 1));
            }
        });
        drop(List::insert_arc(&list, drops.payload(1)).unwrap());
        reader.join().unwrap();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn two_first_entries_of_a_slot_share_a_shard() {
    model(|| {
        let (list, [], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || List::insert_arc(&list, drops.payload(1)).unwrap()
        });
        let entry = List::insert_arc(&list, drops.payload(0)).unwrap();
        let entries = [entry, adds.join().unwrap()];
        list.validate();
        assert_eq!((list.len(), list.stats().adds), (2, 2));
        drop(entries);
        assert_eq!(drops.count(), 2);
    });
}

/// Another entry is added and removed while one stays. The length is never 0, and there are never
/// more hits than removals.
#[test]
fn inv10_a_list_with_an_entry_is_never_empty() {
    thoroughly(|| {
        let (list, [stays], drops) = with();
        let changes = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || drop(List::insert_arc(&list, drops.payload(1)).unwrap())
        });
        assert!(!list.is_empty());
        let stats = list.stats();
        assert!(stats.cpu_hits <= stats.removals && stats.removals < stats.adds);
        changes.join().unwrap();
        drop(stays);
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}
