//! Deferred removals, which the next thread that locks the slot performs.

use percpu::sync::Arc;

use super::owning::{List, drain, with};
use super::payload::{ONE, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    (
        "defer: the link and the last use are complete",
        "deferred::a_flush_meets_two_deferred_removals",
    ),
    ("flush: before the links are followed", "deferred::a_flush_meets_two_deferred_removals"),
    ("defer: no other push came first", "deferred::a_flush_meets_two_deferred_removals"),
];

/// The planted bugs that only loom finds.
pub(super) const LOOM_ONLY: &[&str] =
    &["defer: the link and the last use are complete", "flush: before the links are followed"];

/// Each value is dropped once.
#[test]
fn a_flush_meets_two_deferred_removals() {
    thoroughly(|| {
        let (list, [first, second], drops) = with();
        let there = spawn_on(ONE, move || {
            assert_eq!(second.read(), 1);
            second.defer_remove();
        });
        first.defer_remove();
        list.flush().unwrap();
        there.join().unwrap();
        list.flush().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count(), list.stats().removals), (0, 2, 2));
    });
}

/// The add flushes the removal if it is already deferred.
#[test]
fn an_add_meets_a_deferred_removal() {
    thoroughly(|| {
        let (list, [entry], drops) = with();
        let adds = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || List::insert_arc(&list, drops.payload(1)).unwrap()
        });
        entry.defer_remove();
        let added = adds.join().unwrap();
        list.flush().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (1, 1));
        drop(added);
        assert_eq!(drops.count(), 2);
    });
}

/// The value is dropped once, whether the drain returns it or not.
#[test]
fn inv04_a_drain_meets_a_deferred_removal() {
    thoroughly(|| {
        let (list, [entry], drops) = with();
        let there = spawn_on(ONE, move || entry.defer_remove());
        let taken = drain(&list);
        there.join().unwrap();
        assert_eq!(list.len(), 0);
        list.flush().unwrap();
        assert!(taken <= 1);
        assert_eq!((drops.count(), list.stats().removals), (1, 1));
    });
}

/// The list is dropped before any thread flushes the removals.
#[test]
fn inv13_a_list_drops_deferred_values() {
    thoroughly(|| {
        let (list, [first, second], drops) = with();
        let there = spawn_on(ONE, move || first.defer_remove());
        second.defer_remove();
        drop(list);
        there.join().unwrap();
        assert_eq!(drops.count(), 2);
    });
}
