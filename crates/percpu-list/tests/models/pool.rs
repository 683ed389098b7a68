//! Pooled nodes, while other threads have references to their earlier values.

use offlock_sync::{Arc, model};

use super::owning::{List, with};
use super::payload::{ONE, ZERO, spawn_on, yield_often};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("pool: no other count is left", "pool::inv07_a_referenced_node_is_not_reused"),
    ("pool: no other count is left", "pool::inv04_a_reference_removes_no_later_entry"),
    ("pool: no other count is left", "pool::inv07_a_walk_meets_a_node_that_is_reused"),
    ("pool: pop the node off the stack", "pool::a_pooled_node_goes_to_one_of_two"),
    ("last count: after the uses by other threads", "pool::inv07_a_referenced_node_is_not_reused"),
];

/// A reference keeps its value after the entry was removed and another was added in the slot.
#[test]
fn inv07_a_referenced_node_is_not_reused() {
    model(|| {
        let (list, [entry], drops) = with();
        let found = entry.share();
        let reads = spawn_on(ONE, move || {
            yield_often();
            assert_eq!(found.read(), 0);
        });
        drop(entry);
        let again = List::insert_arc(&list, drops.payload(1)).unwrap();
        assert_eq!(again.read(), 1);
        reads.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (1, 1));
        drop(again);
        assert_eq!(drops.count(), 2);
    });
}

/// A removal by a reference does not remove the next entry at that index.
#[test]
fn inv04_a_reference_removes_no_later_entry() {
    model(|| {
        let (list, [entry], drops) = with();
        let found = entry.share();
        let removes = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                yield_often();
                list.remove(&found).unwrap()
            }
        });
        drop(entry);
        let again = List::insert_arc(&list, drops.payload(1)).unwrap();
        removes.join().unwrap();
        assert!(again.is_linked());
        list.validate();
        let stats = list.stats();
        assert_eq!((stats.adds, stats.removals, drops.count()), (2, 1, 1));
        drop(again);
    });
}

/// A value that a walk has returned does not change.
#[test]
fn inv07_a_walk_meets_a_node_that_is_reused() {
    model(|| {
        let (list, [goes], drops) = with();
        let there = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                List::insert_arc(&list, drops.payload(1)).unwrap()
            }
        });
        let mut seen = [0; 2];
        for found in list.iter() {
            let found = found.unwrap();
            let value = found.read();
            yield_often();
            assert_eq!(found.read(), value);
            seen[value as usize] += 1;
        }
        assert!(seen.iter().all(|&times| times <= 1), "{seen:?}");
        drop(there.join().unwrap());
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}

/// The other add saw a node before it had the lock, and finds the pool empty under it.
#[test]
fn a_pooled_node_goes_to_one_of_two() {
    model(|| {
        let (list, [first], drops) = with();
        drop(first);
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || List::insert_arc(&list, drops.payload(1)).unwrap()
        });
        let entry = List::insert_arc(&list, drops.payload(0)).unwrap();
        let other = adds.join().unwrap();
        list.validate();
        assert_eq!((entry.read(), other.read(), list.len()), (0, 1, 2));
        drop((entry, other));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// The pool has room for one node, and the other is freed. Later adds get a node without a value.
#[test]
fn inv03_two_removals_on_two_cpus_lock_the_same_slot() {
    model(|| {
        let (list, [first, second], drops) = with();
        let leaves = spawn_on(ONE, move || drop(first));
        drop(second);
        let entry = List::insert_arc(&list, drops.payload(2)).unwrap();
        leaves.join().unwrap();
        assert_eq!((entry.read(), list.len(), drops.count()), (2, 1, 2));
        let other = List::insert_arc(&list, drops.payload(3)).unwrap();
        assert_eq!((entry.read(), other.read()), (2, 3));
        list.validate();
        drop((entry, other));
        drop(list);
        assert_eq!(drops.count(), 4);
    });
}
