//! Drops of the program that run inside a call of a table: they may use RCU and the table.

use std::cell::Cell;
use std::sync::{Arc, Weak};

use offlock_percpu::rcu::{self, Atomic, Owned};
use radix_ctx::{CtxTable, WaitError};

use crate::support::{OnDrop, alone};

thread_local! {
    /// The violations that probes have found on this thread. Probes on other threads see the guards of
    /// other tests, so they count nothing.
    static FOUND: Cell<Option<usize>> = const { Cell::new(None) };
}

/// An RCU object whose drop checks what a table holds at that moment.
struct Probe(Weak<CtxTable<usize>>);

impl Drop for Probe {
    fn drop(&mut self) {
        let Some(found) = FOUND.get() else { return };
        let refused = self.0.upgrade().is_some_and(|table| table.flush() == Err(WaitError::InDrop));
        FOUND.set(Some(found + usize::from(rcu::is_pinned() || refused)));
    }
}

/// Retires a probe before each of `rounds` calls of `round`, whose own retirements drop some of them. Checks that
/// no drop ran under a guard, or was refused a wait.
fn is_unhindered(table: &Weak<CtxTable<usize>>, rounds: usize, mut round: impl FnMut()) {
    let shared = Atomic::new(Probe(Weak::clone(table)));
    FOUND.set(Some(0));
    for _ in 0..rounds {
        shared.store(Owned::new(Probe(Weak::clone(table))));
        round();
    }
    assert_eq!(FOUND.take(), Some(0));
}

/// The drop of a table queues the callback that frees its core.
#[test]
fn inv18_the_drop_of_a_table_runs_drops_without_a_guard() {
    let _alone = alone();
    is_unhindered(&Weak::new(), 5_000, || drop(CtxTable::<usize>::new()));
}

/// The last reference to a context vacates its slot, which releases an empty slab.
#[test]
fn inv18_the_last_reference_runs_drops_without_a_guard() {
    let _alone = alone();
    let table = CtxTable::new();
    is_unhindered(&Weak::new(), 1_500, || {
        let held: Vec<_> = (0..129).map(|n| table.insert_ref(n).unwrap()).collect();
        assert_eq!(table.begin_remove_all().count(), 129);
        table.flush().unwrap();
        drop(held);
    });
}

/// A reclaim releases empty slabs. The drops of other objects that this causes are not drops of contexts.
#[test]
fn inv18_a_drop_of_another_object_may_wait_for_the_table() {
    let _alone = alone();
    let table = Arc::new(CtxTable::new());
    is_unhindered(&Arc::downgrade(&table), 1_500, || {
        (0..129).for_each(|n| _ = table.insert(n).unwrap());
        table.remove_all().unwrap();
    });
}

/// A reclaim of many slabs makes their slots vacant in batches. Drops run between two batches.
#[test]
fn the_counts_of_a_table_agree_between_two_batches_of_a_reclaim() {
    const SLABS: usize = 40;
    let _alone = alone();
    let table = Arc::new(CtxTable::new());
    let check = || {
        let table: Weak<CtxTable<OnDrop>> = Arc::downgrade(&table);
        OnDrop::call(move || _ = table.upgrade().inspect(|table| table.validate()))
    };
    let ids: Vec<_> = (0..64 * SLABS).map(|_| table.insert(check()).unwrap()).collect();
    let guard = rcu::pin(); // no removal reclaims
    for id in ids.into_iter().step_by(64) {
        table.remove(id).unwrap();
    }
    drop(guard);
    assert_eq!(table.flush(), Ok(SLABS));
}
