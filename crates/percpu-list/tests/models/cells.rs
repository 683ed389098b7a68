//! The list on cells: additions, removals, walks and snapshots, in every interleaving.

use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, model};
use percpu_list::cells::{Cells, Entry};

use super::payload::{Drops, ONE, Payload, ZERO, spawn_on};

/// Each planted bug, with a model that must fail if the bug is active.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("walk: removals see the marks", "cells::a_walk_meets_a_removal_on_the_same_cpu"),
    ("walk: removals see the marks", "cells::a_walk_meets_a_removal_on_another_cpu"),
    ("cell remove: no walk has marked the entry", "cells::a_walk_meets_a_removal_on_the_same_cpu"),
    ("walk: the entry is still marked", "cells::a_walk_meets_a_cell_that_is_reused"),
    ("removal: clear the mark of the entry", "cells::a_walk_meets_a_cell_that_is_reused"),
    ("cell refill: held cells are not free", "cells::a_pinned_cell_is_not_reused"),
    ("unlink: hold the cell first", "cells::a_pinned_cell_is_not_reused"),
    ("unlink: no drain came first", "cells::a_drain_meets_the_drop_of_the_entry"),
    ("cell remove: there is no snapshot", "cells::a_snapshot_does_not_change"),
    ("snapshot: no section is under way", "cells::a_snapshot_does_not_change"),
];

type List = Arc<Cells<Payload>>;

fn with<const N: usize>() -> (List, [Entry<Payload>; N], Drops) {
    let (list, drops) = (Arc::new(Cells::new()), Drops::new());
    let entries = std::array::from_fn(|n| Entry::insert(&list, drops.payload(n as u64)).unwrap());
    (list, entries, drops)
}

/// Walks the list. Reads each value while other threads may remove it.
fn walk(list: &List) -> Vec<u64> {
    let found: Vec<_> = list.iter().collect();
    found.iter().map(|value| value.read()).collect()
}

fn walk_meets_removal(cpu: percpu::CpuId) {
    model(move || {
        let (list, [goes], drops) = with();
        let removes = spawn_on(cpu, move || drop(goes));
        set_current(ONE);
        assert!([&[0][..], &[]].contains(&&*walk(&list)));
        removes.join().unwrap();
        assert_eq!((list.len(), drops.count(), list.stats().removals), (0, 1, 1));
    });
}

#[test]
fn a_walk_meets_a_removal_on_the_same_cpu() {
    walk_meets_removal(ZERO);
}

#[test]
fn a_walk_meets_a_removal_on_another_cpu() {
    walk_meets_removal(ONE);
}

/// The walk has marked the first entry. The second is in its cell when the walk pins it.
#[test]
fn a_walk_meets_a_cell_that_is_reused() {
    model(|| {
        let (list, [goes], drops) = with();
        let changes = spawn_on(ZERO, {
            let (list, drops) = (Arc::clone(&list), drops.clone());
            move || {
                drop(goes);
                let keeps = Entry::insert(&list, drops.payload(1)).unwrap();
                let comes = Entry::insert(&list, drops.payload(2)).unwrap();
                drop((comes, keeps));
            }
        });
        set_current(ONE);
        assert!(walk(&list).iter().all(|value| *value < 3));
        changes.join().unwrap();
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

/// The value stays readable after the removal of its entry, although its block is full.
#[test]
fn a_pinned_cell_is_not_reused() {
    model(|| {
        let (list, [goes, stays], drops) = with(); // fills the first block
        let found: Vec<_> = list.iter().collect();
        let removes = spawn_on(ONE, move || drop(goes));
        let comes = Entry::insert(&list, drops.payload(2)).unwrap();
        let values: Vec<u64> = found.iter().map(|value| value.read()).collect();
        assert_eq!((values, comes.read()), (vec![0, 1], 2));
        drop(found);
        removes.join().unwrap();
        drop((comes, stays));
        assert_eq!((list.len(), drops.count()), (0, 3));
    });
}

#[test]
fn a_drain_meets_the_drop_of_the_entry() {
    model(|| {
        let (list, [entry], drops) = with();
        let drains = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || list.iter().filter(|found| list.unlink(found).unwrap()).count()
        });
        drop(entry);
        assert!(drains.join().unwrap() <= 1);
        assert_eq!((list.len(), drops.count(), list.stats().removals), (0, 1, 1));
    });
}

#[test]
fn a_snapshot_does_not_change() {
    model(|| {
        let (list, [goes], drops) = with();
        let removes = spawn_on(ZERO, move || drop(goes));
        let snapshot = list.lock_all().unwrap();
        let mut seen = [0; 2];
        for seen in &mut seen {
            snapshot.for_each(|value| *seen += 1 + value.read());
        }
        assert_eq!(seen[0], seen[1]);
        drop(snapshot);
        removes.join().unwrap();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}
