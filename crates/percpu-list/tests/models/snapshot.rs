//! A snapshot shows one instant.

use offlock_sync::virtual_cpu::set_current;
use offlock_sync::{Arc, is_planted, model};

use super::lists::{List, with};
use super::payload::{ONE, ZERO, spawn_on, yield_often};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_the_first_of_two_adds_is_seen_first"),
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_a_removal_before_an_add_is_seen"),
    ("cell remove: there is no snapshot", "snapshot::inv06_a_snapshot_does_not_change"),
    ("snapshot: no section is under way", "snapshot::inv06_a_snapshot_does_not_change"),
    ("cell insert: the list is open", "snapshot::inv06_a_snapshot_does_not_grow"),
];

/// Returns the values at one instant.
fn seen(list: &List) -> Vec<u64> {
    let mut seen: Vec<u64> = if is_planted("snapshot-is-taken-slot-by-slot") {
        list.iter().map(|found| found.read()).inspect(|_| yield_often()).collect()
    } else {
        let snapshot = list.lock_all().unwrap();
        let seen: Vec<u64> = snapshot.iter().map(|value| value.read()).collect();
        assert_eq!(seen.len(), snapshot.len());
        seen
    };
    seen.sort_unstable();
    seen
}

/// The thread adds 1 on CPU 0, where 0 is, and then 2 on CPU 1.
#[test]
fn inv06_the_first_of_two_adds_is_seen_first() {
    model(|| {
        let (list, [stays], drops) = with();
        set_current(ONE);
        drop(list.insert(drops.payload(3)).unwrap()); // leaves a block in slot 1
        set_current(ZERO);
        let adds = spawn_on(ZERO, {
            let list = Arc::clone(&list);
            move || {
                let first = list.insert(drops.payload(1)).unwrap();
                set_current(ONE);
                [first, list.insert(drops.payload(2)).unwrap()]
            }
        });
        let seen = seen(&list);
        assert!([&[0][..], &[0, 1], &[0, 1, 2]].contains(&&*seen), "{seen:?}");
        drop((stays, adds.join().unwrap()));
    });
}

/// The thread removes 0 from slot 0, and then adds 1 in slot 1, where 2 is.
#[test]
fn inv06_a_removal_before_an_add_is_seen() {
    model(|| {
        let (list, [entry], drops) = with();
        set_current(ONE);
        let stays = list.insert(drops.payload(2)).unwrap();
        set_current(ZERO);
        let adds = spawn_on(ONE, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(entry);
                list.insert(drops.payload(1)).unwrap()
            }
        });
        let seen = seen(&list);
        assert!([&[0, 2][..], &[2], &[1, 2]].contains(&&*seen), "{seen:?}");
        drop((adds.join().unwrap(), stays));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// Reads the list twice under a snapshot.
pub(super) fn read_twice(list: &List) {
    let snapshot = list.lock_all().unwrap();
    let read = || {
        let mut seen = 0;
        snapshot.for_each(|value| seen += 1 + value.read());
        yield_often();
        seen
    };
    assert_eq!(read(), read(), "a snapshot changed");
}

#[test]
fn inv06_a_snapshot_does_not_change() {
    model(|| {
        let (list, [goes], drops) = with();
        let removes = spawn_on(ZERO, move || drop(goes));
        read_twice(&list);
        removes.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn inv06_a_snapshot_does_not_grow() {
    model(|| {
        let (list, [stays], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || list.insert(drops.payload(1)).unwrap()
        });
        read_twice(&list);
        drop((adds.join().unwrap(), stays));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}

/// An entry that is dropped under a snapshot is removed at its end, after a walk of another thread
/// may have found it.
#[test]
fn inv13_an_entry_dropped_under_a_snapshot_is_dropped_once() {
    model(|| {
        let (list, [entry], drops) = with();
        let walks = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || list.iter().for_each(|found| assert_eq!(found.read(), 0))
        });
        let snapshot = list.lock_all().unwrap();
        drop(entry);
        drop(snapshot);
        walks.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}
