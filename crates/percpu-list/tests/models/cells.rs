//! Walks beside removals: marks, pins, and cells that are used again.

use offlock_percpu::CpuId;
use offlock_sync::virtual_cpu::set_current;
use offlock_sync::{Arc, model};

use super::lists::{List, with};
use super::payload::{ONE, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("walk: removals see the marks", "cells::inv07_a_walk_meets_a_removal_on_the_same_cpu"),
    ("walk: removals see the marks", "cells::inv07_a_walk_meets_a_removal_on_another_cpu"),
    (
        "cell remove: no walk has marked the entry",
        "cells::inv07_a_walk_meets_a_removal_on_the_same_cpu",
    ),
    ("claim: after the last use by a walk", "cells::inv07_a_walk_meets_a_removal_on_the_same_cpu"),
    ("unpin: after the last use", "cells::inv07_a_walk_meets_a_removal_on_the_same_cpu"),
    ("walk: the entry is still marked", "cells::inv07_a_walk_meets_a_cell_that_is_reused"),
    ("occupied: before the value is read", "cells::inv07_a_walk_meets_the_next_entry_of_a_cell"),
    ("cell insert: the value is in its cell", "cells::inv07_a_walk_meets_the_next_entry_of_a_cell"),
    ("cell refill: the state is free", "cells::inv07_a_refill_meets_the_pin_of_a_stale_walk"),
    ("cell refill: held cells are not free", "cells::inv07_a_refill_beside_a_pinned_cell"),
    ("unlink: hold the cell first", "cells::inv07_a_pinned_cell_is_not_reused"),
    ("cell refill: after the last unpin", "cells::inv07_a_refill_beside_the_last_unpin"),
    ("finish: before the cell is reused", "cells::inv07_a_cell_is_reused_after_the_last_unpin"),
    ("cell refill: `remote` before `held`", "cells::inv07_a_refill_beside_a_pinned_cell"),
    (
        "cell remove: the value is out of its cell",
        "cells::inv03_a_cell_that_another_cpu_freed_is_reused",
    ),
    (
        "removal: the value is out of its cell",
        "cells::inv03_a_marked_cell_that_another_cpu_freed_is_reused",
    ),
];

/// The planted bugs that only loom finds: they need weak memory, or a check of plain accesses.
pub(super) const LOOM_ONLY: &[&str] = &[
    "walk: the entry is still marked", // a random schedule is too rare
    "claim: after the last use by a walk",
    "unpin: after the last use",
    "occupied: before the value is read",
    "cell insert: the value is in its cell",
    "cell refill: after the last unpin",
    "finish: before the cell is reused",
    "cell refill: `remote` before `held`",
    "cell remove: the value is out of its cell",
    "removal: the value is out of its cell",
];

/// Walks the list. Reads each value while other threads may remove it.
fn walk(list: &List) -> Vec<u64> {
    let found: Vec<_> = list.iter().collect();
    found.iter().map(|value| value.read()).collect()
}

fn walk_meets_removal(cpu: CpuId) {
    model(move || {
        let (list, [goes], drops) = with();
        let removes = spawn_on(cpu, move || drop(goes));
        set_current(ONE);
        assert!([&[0][..], &[]].contains(&&*walk(&list)));
        removes.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count(), list.stats().removals), (0, 1, 1));
    });
}

#[test]
fn inv07_a_walk_meets_a_removal_on_the_same_cpu() {
    walk_meets_removal(ZERO);
}

#[test]
fn inv07_a_walk_meets_a_removal_on_another_cpu() {
    walk_meets_removal(ONE);
}

/// The walk has marked the first entry. The second is in its cell when the walk pins it.
#[test]
fn inv07_a_walk_meets_a_cell_that_is_reused() {
    model(|| {
        let (list, [goes], drops) = with();
        let changes = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                let keeps = list.insert(drops.payload(1)).unwrap();
                let comes = list.insert(drops.payload(2)).unwrap();
                drop((comes, keeps));
            }
        });
        set_current(ONE);
        assert!(walk(&list).iter().all(|value| *value < 3));
        changes.join().unwrap();
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// The walk has found an entry, and restarted the sections. Then the cell gets the next entry, which
/// the walk reads.
#[test]
fn inv07_a_walk_meets_the_next_entry_of_a_cell() {
    thoroughly(|| {
        let (list, [goes], drops) = with();
        let changes = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                list.insert(drops.payload(1)).unwrap()
            }
        });
        set_current(ONE);
        assert!(walk(&list).iter().all(|value| *value < 2));
        drop(changes.join().unwrap());
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 2));
    });
}

/// The walk found an entry that another CPU has freed since, and pins its cell for a moment, while
/// the CPU of the block takes the cell back.
#[test]
fn inv07_a_refill_meets_the_pin_of_a_stale_walk() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let walks = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || assert!(walk(&list).iter().all(|value| *value < 3))
        });
        set_current(ONE);
        drop(goes);
        set_current(ZERO);
        let comes = list.insert(drops.payload(2)).unwrap();
        walks.join().unwrap();
        list.validate();
        drop((comes, stays));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// The value stays readable after the removal of its entry, although its block is full.
#[test]
fn inv07_a_pinned_cell_is_not_reused() {
    model(|| {
        let (list, [goes, stays], drops) = with(); // fills the first block
        let found: Vec<_> = list.iter().collect();
        let removes = spawn_on(ONE, move || drop(goes));
        let comes = list.insert(drops.payload(2)).unwrap();
        let mut values: Vec<u64> = found.iter().map(|value| value.read()).collect();
        values.sort_unstable();
        assert_eq!((values, comes.read()), (vec![0, 1], 2));
        drop(found);
        removes.join().unwrap();
        drop((comes, stays));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// The last reference to a value ends on another CPU, and its cell is used again.
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

/// Another CPU has freed a cell of the block, so the block is refilled while an entry leaves its list
/// and stays pinned. Both cells that are free now are taken.
#[test]
fn inv07_a_refill_beside_a_pinned_cell() {
    model(|| {
        let (list, [goes, other], drops) = with();
        let found = goes.share();
        set_current(ONE);
        drop(other);
        set_current(ZERO);
        let removes = spawn_on(ONE, move || drop(goes));
        let come = [2, 3].map(|value| list.insert(drops.payload(value)).unwrap());
        assert_eq!((found.read(), come[0].read(), come[1].read()), (0, 2, 3));
        removes.join().unwrap();
        drop((found, come));
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 4));
    });
}

/// The same, while the last pin of an entry that is off its list ends.
#[test]
fn inv07_a_refill_beside_the_last_unpin() {
    model(|| {
        let (list, [goes, other], drops) = with();
        let found = goes.share();
        drop(goes);
        set_current(ONE);
        drop(other);
        set_current(ZERO);
        let ends = spawn_on(ONE, move || {
            assert_eq!(found.read(), 0);
            drop(found);
        });
        let come = [2, 3].map(|value| list.insert(drops.payload(value)).unwrap());
        assert_eq!((come[0].read(), come[1].read()), (2, 3));
        ends.join().unwrap();
        drop(come);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 4));
    });
}

/// Another CPU frees a cell by a section, and the CPU of the block uses it again.
#[test]
fn inv03_a_cell_that_another_cpu_freed_is_reused() {
    reuse_of_a_freed_cell(false);
}

/// The same with an entry that a walk has marked, which is removed by atomic operations.
#[test]
fn inv03_a_marked_cell_that_another_cpu_freed_is_reused() {
    reuse_of_a_freed_cell(true);
}

fn reuse_of_a_freed_cell(marked: bool) {
    model(move || {
        let (list, [goes, stays], drops) = with();
        if marked {
            drop(goes.share());
        }
        let removes = spawn_on(ONE, move || {
            assert_eq!(goes.read(), 0);
            drop(goes);
        });
        let comes = list.insert(drops.payload(2)).unwrap();
        assert_eq!((comes.read(), stays.read()), (2, 1));
        removes.join().unwrap();
        list.validate();
        let stats = list.stats();
        assert_eq!((list.len(), stats.removals, stats.cpu_hits), (2, 1, 0));
        drop((comes, stays));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// A marked entry is removed, and a walk marks the next entry in its cell.
#[test]
fn inv07_a_mark_is_that_of_the_entry_in_the_cell() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        drop(goes.share());
        let next = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                let comes = list.insert(drops.payload(2)).unwrap();
                let found: Vec<_> = list.iter().collect();
                drop(comes);
                assert!(found.iter().all(|value| value.read() < 3));
            }
        });
        set_current(ONE);
        drop(goes);
        next.join().unwrap();
        list.validate();
        drop(stays);
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// A removal by a reference does not remove the next entry in that cell.
#[test]
fn inv04_a_reference_removes_no_later_entry() {
    model(|| {
        let (list, [entry], drops) = with();
        let found = entry.share();
        let removes = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || list.remove(&found).unwrap()
        });
        drop(entry);
        let again = list.insert(drops.payload(1)).unwrap();
        removes.join().unwrap();
        assert!(again.is_linked());
        list.validate();
        let stats = list.stats();
        assert_eq!((stats.adds, stats.removals, drops.count()), (2, 1, 1));
        drop(again);
    });
}

/// During the walk a cell is filled again and the slot grows. The walk ends, and sees the entry that
/// stays once.
#[test]
fn inv07_an_entry_that_stays_is_seen_once_beside_changes() {
    model(|| {
        let (list, [goes, stays], drops) = with();
        let there = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                [2, 3].map(|value| list.insert(drops.payload(value)).unwrap())
            }
        });
        let mut seen = [0; 4];
        for found in list.iter() {
            seen[found.read() as usize] += 1;
        }
        assert!(seen[1] == 1 && seen.iter().all(|&times| times <= 1), "{seen:?}");
        drop(there.join().unwrap());
        drop(stays);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 4));
    });
}
