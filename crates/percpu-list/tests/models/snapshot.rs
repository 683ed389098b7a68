//! The instant that a snapshot shows.

use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, is_planted, model};

use super::owning::{List, with};
use super::payload::{ONE, ZERO, dawdle, spawn_on};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_what_was_added_first_is_seen_first"),
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_what_was_removed_before_an_add_is_gone"),
    (
        "snapshot: no deferred removal is left",
        "snapshot::inv06_what_was_deferred_before_an_add_is_gone",
    ),
];

/// The values, at one instant.
fn seen(list: &List) -> Vec<u64> {
    if is_planted("snapshot-is-taken-slot-by-slot") {
        return list.iter().map(|found| found.unwrap().read()).inspect(|_| dawdle()).collect();
    }
    let snapshot = list.lock_all().unwrap();
    let seen: Vec<u64> = snapshot.iter().map(|value| value.read()).collect();
    assert_eq!(seen.len(), snapshot.len());
    seen
}

/// 1 is added on CPU 0 beside 0, and then 2 on CPU 1.
#[test]
fn inv06_what_was_added_first_is_seen_first() {
    model(|| {
        let (list, [stays], drops) = with();
        let adds = spawn_on(ZERO, {
            let list = Arc::clone(&list);
            move || {
                let first = List::insert_arc(&list, drops.payload(1)).unwrap();
                set_current(ONE);
                [first, List::insert_arc(&list, drops.payload(2)).unwrap()]
            }
        });
        let seen = seen(&list);
        assert!([&[0][..], &[0, 1], &[0, 1, 2]].contains(&&*seen), "{seen:?}");
        drop((stays, adds.join().unwrap()));
    });
}

/// 0 is removed from slot 0, and then 1 added in slot 1.
#[test]
fn inv06_what_was_removed_before_an_add_is_gone() {
    removed_before_an_add(false);
}

#[test]
fn inv06_what_was_deferred_before_an_add_is_gone() {
    removed_before_an_add(true);
}

fn removed_before_an_add(defers: bool) {
    model(move || {
        let (list, [entry], drops) = with();
        let adds = spawn_on(ONE, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                if defers {
                    entry.defer_remove();
                } else {
                    drop(entry);
                }
                List::insert_arc(&list, drops.payload(1)).unwrap()
            }
        });
        let seen = seen(&list);
        assert!([&[0][..], &[], &[1]].contains(&&*seen), "{seen:?}");
        drop(adds.join().unwrap());
        list.flush().unwrap();
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}
