//! The list without rseq sections: additions under the lock of a slot, removals by atomic operations.

use offlock_sync::Arc;
use offlock_sync::virtual_cpu::{take_id, without_sections};

use super::lists::{close_meets_an_addition, with};
use super::payload::{ONE, ZERO, spawn_on};
use super::snapshot::read_twice;

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("snapshot: no change under a lock is under way", "fallback::inv06_a_snapshot_does_not_change"),
    ("enter: there is no snapshot", "fallback::inv06_a_snapshot_does_not_change"),
    (
        "close: no addition under a lock is under way",
        "fallback::inv08_nothing_is_added_once_close_returned",
    ),
    ("insert: the value is in its cell", "fallback::inv07_a_walk_meets_an_addition"),
    ("occupied: before the value is read", "fallback::inv07_a_walk_meets_an_addition"),
    ("removal: the value is out of its cell", "fallback::inv03_a_freed_cell_is_reused"),
    ("learn: after the last unpin", "fallback::inv07_a_cell_is_reused_after_the_last_unpin"),
    ("learn: `remote` before `held`", "fallback::inv07_a_pinned_cell_is_not_reused"),
];

/// The planted bugs that only loom finds.
pub(super) const LOOM_ONLY: &[&str] = &[
    "insert: the value is in its cell",
    "learn: after the last unpin",
    "learn: `remote` before `held`",
];

/// Runs a model without sections.
fn model(f: impl Fn() + Send + Sync + 'static) {
    without_sections(|| offlock_sync::model(f));
}

#[test]
fn inv06_a_snapshot_does_not_change() {
    model(|| {
        let (list, [goes], drops) = with();
        let removes = spawn_on(ONE, move || drop(goes));
        read_twice(&list);
        removes.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn inv08_nothing_is_added_once_close_returned() {
    model(close_meets_an_addition);
}

#[test]
fn inv07_a_walk_meets_an_addition() {
    model(|| {
        let (list, [], drops) = with();
        let adds = spawn_on(ONE, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || list.insert(drops.payload(1)).unwrap()
        });
        list.iter().for_each(|found| assert_eq!(found.read(), 1));
        drop(adds.join().unwrap());
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn inv07_a_walk_meets_a_removal() {
    model(|| {
        let (list, [goes], drops) = with();
        let removes = spawn_on(ZERO, move || drop(goes));
        list.iter().for_each(|found| assert_eq!(found.read(), 0));
        removes.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

#[test]
fn inv03_a_freed_cell_is_reused() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let removes = spawn_on(ONE, move || drop(goes));
        let comes = list.insert(drops.payload(2)).unwrap();
        assert_eq!((comes.read(), stays.read()), (2, 1));
        removes.join().unwrap();
        list.validate();
        drop((comes, stays));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

#[test]
fn inv07_a_cell_is_reused_after_the_last_unpin() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let found = goes.share();
        drop(goes);
        let ends = spawn_on(ONE, move || {
            assert_eq!(found.read(), 0);
            drop(found);
        });
        let comes = list.insert(drops.payload(2)).unwrap();
        ends.join().unwrap();
        list.validate();
        drop((comes, stays));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

#[test]
fn inv07_a_pinned_cell_is_not_reused() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let found = goes.share();
        let removes = spawn_on(ONE, move || drop(goes));
        let comes = list.insert(drops.payload(2)).unwrap();
        assert_eq!((found.read(), comes.read()), (0, 2));
        drop(found);
        removes.join().unwrap();
        drop((comes, stays));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// One thread has sections, the other has none.
#[test]
fn inv03_a_thread_without_an_id_shares_the_list() {
    offlock_sync::model(|| {
        let (list, [goes], drops) = with();
        let there = spawn_on(ONE, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                take_id();
                let comes = list.insert(drops.payload(1)).unwrap();
                drop(goes);
                comes
            }
        });
        let here = list.insert(drops.payload(2)).unwrap();
        let there = there.join().unwrap();
        list.validate();
        assert_eq!((list.len(), list.stats().removals), (2, 1));
        drop((here, there));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}
