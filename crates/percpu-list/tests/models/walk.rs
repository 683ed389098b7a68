//! Walks that release the lock between entries.

use offlock_sync::{Arc, model};

use super::owning::{List, with};
use super::payload::{ONE, ZERO, spawn_on};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[(
    "remove: no walk is under way",
    "walk::inv11_an_entry_that_stays_is_seen_once_beside_a_removal",
)];

/// The first entry is removed after the walk has read it. The last entry must not move to its
/// index.
#[test]
fn inv11_an_entry_that_stays_is_seen_once_beside_a_removal() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let there = spawn_on(ONE, move || drop(goes));
        let seen: Vec<_> = list.iter().map(Result::unwrap).collect();
        there.join().unwrap();
        assert_eq!(seen.iter().filter(|found| found.read() == 1).count(), 1);
        assert!(seen.iter().filter(|found| found.read() == 0).count() <= 1);
        drop((seen, stays));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}

/// During the walk, a hole is filled and the array grows. The walk ends, and sees the entry that
/// stays once.
#[test]
fn inv07_an_entry_that_stays_is_seen_once_beside_changes() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let there = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                [2, 3].map(|value| List::insert_arc(&list, drops.payload(value)).unwrap())
            }
        });
        let mut seen = [0; 4];
        for found in list.iter() {
            seen[found.unwrap().read() as usize] += 1;
        }
        assert!(seen[1] == 1 && seen.iter().all(|&times| times <= 1), "{seen:?}");
        drop(there.join().unwrap());
        drop(stays);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 4));
    });
}

/// A walk is dropped early. Later removals close its holes.
#[test]
fn inv11_a_walk_is_left_beside_removals() {
    model(|| {
        let (list, [first, second, third], drops) = with();
        let there = spawn_on(ONE, move || drop(first));
        let mut walk = list.iter();
        let found = walk.next().map(|found| found.unwrap().read());
        assert!(found.is_some_and(|value| value < 3));
        drop(walk);
        drop(second);
        there.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (1, 2));
        drop(third);
    });
}
