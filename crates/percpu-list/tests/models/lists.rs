//! Entries that several threads add, remove, drain and drop at the same time.

use offlock_sync::{Arc, model};
use percpu_list::{Entry, PerCpuList, Refused};

use super::payload::{Drops, ONE, Payload, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("unlink: no other removal came first", "lists::inv04_a_removal_meets_a_drain"),
    ("removal: after the last use by a walk", "lists::inv04_a_removal_meets_the_drop_of_the_entry"),
    ("blocks: before a block is read", "lists::a_slots_first_entry_is_seen_finished"),
    ("link: the block is complete", "lists::a_slots_first_entry_is_seen_finished"),
    ("close: no section is under way", "lists::inv08_nothing_is_added_once_close_returned"),
    ("cell insert: the list is open", "lists::inv08_nothing_is_added_once_close_returned"),
];

/// The planted bugs that only loom finds.
pub(super) const LOOM_ONLY: &[&str] = &[
    "removal: after the last use by a walk",
    "blocks: before a block is read",
    "link: the block is complete",
];

pub(super) type List = PerCpuList<Payload>;
pub(super) type Shared = Entry<Payload>;

/// Creates a list with `N` entries in slot 0, whose values are 0, 1 and so on.
pub(super) fn with<const N: usize>() -> (Arc<List>, [Shared; N], Drops) {
    let (list, drops) = (Arc::new(List::new()), Drops::new());
    let entries = std::array::from_fn(|n| {
        list.insert(drops.payload(n as u64)).unwrap() // the main thread is on CPU 0
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
        let stats = list.stats();
        assert_eq!((list.len(), stats.removals, drops.count()), (0, 1, 1));
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

/// A value that was added before the close is drained. A value that comes later is returned.
pub(super) fn close_meets_an_addition() {
    let (list, [], drops) = with();
    let adds = spawn_on(ZERO, {
        let (list, drops) = (Arc::clone(&list), drops.clone());
        move || match list.insert(drops.payload(1)) {
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
}

/// The first entry has made the block, so the addition is one section.
#[test]
fn inv08_nothing_is_added_once_close_returned() {
    model(|| {
        let (list, [stays], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || list.insert(drops.payload(1)).ok()
        });
        list.close().unwrap();
        let drained = drain(&list);
        let added = adds.join().unwrap();
        assert_eq!(drained, 1 + usize::from(added.is_some()));
        assert!(list.is_empty() && list.is_closed());
        drop((added, stays));
        assert_eq!(drops.count(), 2);
    });
}

/// A thread that reads a slot during the first addition there finds no block, or a complete one.
#[test]
fn a_slots_first_entry_is_seen_finished() {
    model(|| {
        let (list, [], drops) = with();
        let reader = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                assert!(list.len() <= 1);
                list.iter().for_each(|found| assert_eq!(found.read(), 1));
            }
        });
        drop(list.insert(drops.payload(1)).unwrap());
        reader.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn two_first_entries_of_a_slot_share_a_block() {
    model(|| {
        let (list, [], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || list.insert(drops.payload(1)).unwrap()
        });
        let entry = list.insert(drops.payload(0)).unwrap();
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
            move || drop(list.insert(drops.payload(1)).unwrap())
        });
        assert!(!list.is_empty());
        let stats = list.stats();
        assert!(stats.cpu_hits <= stats.removals && stats.removals <= stats.adds);
        changes.join().unwrap();
        drop(stays);
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}
