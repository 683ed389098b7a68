//! Tables without memory, and the memory that tables free. The allocator counts, and can refuse.
#![cfg(not(offlock_model))]

#[path = "api/support.rs"]
#[expect(dead_code, reason = "the tests of one process use the rest")]
mod support;

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use offlock_percpu::rcu;
use radix_ctx::{
    AllocError, CtxRef, CtxTable, GetRefError, Id, InsertRefused, LookupError, TableStats,
};
use testkit::alloc::{ThreadAllocator, admitted_left, process_bytes, refuse_after};
use testkit::canary::{Canary, Census};

use support::{OnDrop, drain};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// Lets one test of this file run at a time, because each counts the bytes of the process. The first use of
/// percpu is not counted.
fn alone() -> MutexGuard<'static, ()> {
    let turn = support::alone();
    let _ = offlock_percpu::capabilities();
    turn
}

/// Calls `f` while its first allocation fails, then its second, and so on until it succeeds. `f` returns
/// whether it failed. `check` checks that the call changed nothing.
fn fails_cleanly(mut f: impl FnMut() -> bool, mut check: impl FnMut(usize)) {
    let mut refused = 0;
    while refuse_after(refused, &mut f) {
        check(refused);
        refused += 1;
        assert!(refused < 100);
    }
    assert!(refused > 0, "the case does not allocate");
}

/// The visible state of a table.
#[derive(Debug, PartialEq)]
struct Snapshot {
    live: Vec<(Id, u64)>,
    stats: TableStats,
}

fn snapshot(table: &CtxTable<Canary>) -> Snapshot {
    table.validate();
    let guard = rcu::pin();
    Snapshot {
        live: table.iter(&guard).map(|(id, context)| (id, context.read())).collect(),
        stats: table.stats(),
    }
}

/// Tables whose next context needs a new slab: the first slab, another one, or one with new nodes above it.
fn tables() -> impl Iterator<Item = (CtxTable<Canary>, Census)> {
    [0, 64, 128, 4096].into_iter().map(|full| {
        let count = Census::new();
        let table = CtxTable::builder().max_contexts(10_000).build();
        for value in 0..full {
            table.insert(Canary::new(value, &count)).unwrap();
        }
        (table, count)
    })
}

type Case = fn(&CtxTable<Canary>, Canary) -> Result<Id, (InsertRefused, Canary)>;

const INSERTS: [Case; 2] = [
    |table, value| table.insert(value).map_err(|error| (error.reason, error.value)),
    |table, value| {
        let inserted = table.insert_ref(value).map(|context| CtxRef::id(&context));
        inserted.map_err(|error| (error.reason, error.value))
    },
];

#[test]
fn inv09_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    let _alone = alone();
    for insert in INSERTS {
        for (table, count) in tables() {
            let before = snapshot(&table);
            let values = count.alive();
            let mut value = Some(Canary::new(99, &count));
            let inserted = Cell::new(None);
            let try_it = || match insert(&table, value.take().unwrap()) {
                Ok(id) => {
                    inserted.set(Some(id));
                    false
                }
                Err((reason, back)) => {
                    assert_eq!(reason, InsertRefused::Alloc(AllocError::new()));
                    value = Some(back);
                    true
                }
            };
            fails_cleanly(try_it, |refused| {
                let mut now = snapshot(&table);
                // The lists of dead slots are made once and stay, as does an empty slab.
                let TableStats { slabs, nodes, height, bytes, .. } = before.stats;
                (now.stats.slabs, now.stats.nodes) = (slabs, nodes);
                (now.stats.height, now.stats.bytes) = (height, bytes);
                assert_eq!(now, before, "after {refused} allocations");
            });
            let id = inserted.get().unwrap();
            assert_eq!(table.with(id, Canary::read), Ok(99));
            assert_eq!(count.alive(), values + 1);
            drop(table);
            assert_eq!(count.alive(), 0);
        }
    }
}

#[test]
fn inv13_a_refused_count_gives_no_reference() {
    let _alone = alone();
    for (table, count) in tables() {
        let id = table.insert(Canary::new(5, &count)).unwrap();
        let before = snapshot(&table);
        let got = Cell::new(None);
        let get = || match table.get_ref(id) {
            Ok(context) => {
                got.set(Some(context));
                false
            }
            Err(error) => {
                assert_eq!(error, GetRefError::Alloc(AllocError::new()));
                true
            }
        };
        fails_cleanly(get, |refused| assert_eq!(snapshot(&table), before, "after {refused}"));
        let context = got.take().unwrap();
        assert_eq!(context.read(), 5);
        refuse_after(0, || {
            drop(context.clone());
            drop(table.get_ref(id).unwrap());
            table.remove(id).unwrap();
        });
        drop(table);
        assert_eq!(count.alive(), 1, "the reference keeps the context");
        drop(context);
        assert_eq!(count.alive(), 0);
    }
}

/// Lookups, references, removals, reclaim, and inserts at indexes that have a slab allocate nothing.
#[test]
fn a_table_with_room_allocates_nothing() {
    let _alone = alone();
    let table = CtxTable::builder().max_contexts(10_000).build();
    let first = table.insert(0).unwrap();
    drop(table.get_ref(first).unwrap()); // makes the counts of the slab
    (0..127).for_each(|_| _ = table.insert(0).unwrap()); // makes another slab
    assert_eq!(table.retain(|id, _| id == first), 127);
    table.flush().unwrap(); // makes the memory of RCU
    let left = refuse_after(100, || {
        let guard = rcu::pin();
        assert_eq!((table.get(first, &guard), table.with(first, |n| *n)), (Ok(&0), Ok(0)));
        assert!(table.contains(first) && table.iter(&guard).count() == 1);
        drop(guard);
        let held = table.get_ref(first).unwrap();
        drop(held.clone());
        for round in 0..3_000 {
            table.remove(table.insert(round).unwrap()).unwrap();
            if round % 50 == 49 {
                table.flush().unwrap(); // so that the slabs are enough
            }
        }
        assert_eq!(table.stats().live, 1);
        let removal = table.remove(table.insert(0).unwrap()).unwrap();
        while !removal.is_done() {}
        assert_eq!(table.begin_remove_all().count(), 1);
        drop(held);
        table.flush().unwrap();
        assert!(table.is_empty());
        admitted_left()
    });
    assert_eq!(left, 100, "allocated");
}

/// An insert that fails gives its share of the limit back.
#[test]
fn inv15_every_failing_path_gives_its_share_back() {
    let _alone = alone();
    let count = Census::new();
    for insert in INSERTS {
        let table = CtxTable::builder().max_contexts(3).max_index(1).build();
        for _ in 0..5 {
            let refused = refuse_after(0, || insert(&table, Canary::new(0, &count)));
            assert!(matches!(refused, Err((InsertRefused::Alloc(_), _))));
        }
        let ids = [0, 1].map(|value| insert(&table, Canary::new(value, &count)).unwrap());
        for _ in 0..5 {
            let refused = insert(&table, Canary::new(0, &count)).unwrap_err().0;
            assert_eq!(refused, InsertRefused::Exhausted { pending: 0 });
        }
        ids.into_iter().for_each(|id| table.remove(id).unwrap().wait().unwrap());
    }
    assert_eq!(count.alive(), 0);
}

/// Also if only the counts of its reference cannot be allocated.
#[test]
fn inv15_an_insert_without_memory_for_the_counts_gives_its_share_back() {
    let _alone = alone();
    let table = CtxTable::builder().max_contexts(3).build();
    table.insert(0).unwrap(); // makes the slab
    for _ in 0..3 {
        let inserted = refuse_after(0, || table.insert_ref(1).map(drop));
        let refused = inserted.map_err(|error| (error.reason, error.value));
        assert_eq!(refused, Err((InsertRefused::Alloc(AllocError::new()), 1)));
    }
    (1..3).for_each(|value| assert!(table.insert(value).is_ok()));
    assert!(table.insert_ref(3).is_err(), "the limit");
}

/// All bytes are freed after a mass removal, and after the drop of the table and its last reference.
#[test]
fn inv11_all_bytes_are_back_after_mass_removal() {
    let _alone = alone();
    let round = |threads: usize| {
        let count = Census::new();
        let table = CtxTable::new();
        assert!(size_of_val(&table) <= 16 && table.stats().bytes <= 1024, "{}", table.stats());
        let ids: Vec<Id> =
            (0..50_000).map(|value| table.insert(Canary::new(value, &count)).unwrap()).collect();
        let held: Vec<CtxRef<_>> = ids[..10].iter().map(|id| table.get_ref(*id).unwrap()).collect();
        let full = table.stats();
        thread::scope(|scope| {
            let remove = |part: &[Id]| part.iter().for_each(|id| _ = table.remove(*id).unwrap());
            let parts = ids.chunks(ids.len().div_ceil(threads));
            let removers: Vec<_> = parts.map(|part| scope.spawn(move || remove(part))).collect();
            // The end of the scope does not wait until a thread has freed its own memory.
            removers.into_iter().for_each(|remover| remover.join().unwrap());
        });
        table.flush().unwrap();
        assert_eq!(count.alive(), 10);
        drain();
        let left = table.stats();
        assert!(left.slabs <= 2 && left.nodes == full.nodes, "{full}; {left}");
        assert!(ids.iter().all(|id| table.with(*id, |_| ()) == Err(LookupError::Stale)));
        // Uses the same indexes with other generations.
        let again: Vec<Id> =
            (0..1_000).map(|value| table.insert(Canary::new(value, &count)).unwrap()).collect();
        assert!(again.iter().all(|id| id.generation() > 1 || !ids.contains(id)));
        assert!(ids.iter().all(|id| !table.contains(*id)));
        drop(table);
        assert_eq!(count.alive(), 10);
        drop(held);
        assert_eq!(count.alive(), 0);
    };
    // Makes the memory that a process keeps, for one thread or for each of the most threads at a time.
    let all_there = std::sync::Barrier::new(8);
    thread::scope(|scope| {
        let pin = || {
            let _guard = rcu::pin();
            all_there.wait();
        };
        let pinned: Vec<_> = (0..8).map(|_| scope.spawn(pin)).collect();
        pinned.into_iter().for_each(|thread| thread.join().unwrap());
    });
    round(1);
    round(4);
    drain();
    for threads in [1, 4] {
        assert_frees_all(|| {
            round(threads);
            drain();
        });
    }
}

/// Checks that `round` frees the bytes that it allocates.
///
/// The threads of the test harness allocate and free at any time, which changes the bytes of the process
/// in about 1 of 100 rounds on busy processors. A leak of `round` changes them in each.
fn assert_frees_all(mut round: impl FnMut()) {
    let mut change = || {
        let before = process_bytes();
        round();
        process_bytes() - before
    };
    let changes = [change(), change(), change(), change()];
    assert!(changes.contains(&0), "{changes:?} bytes");
}

/// A context drops its table in the reclaim callback, which therefore ends the table. The drop of another
/// context panics in that end.
#[test]
fn inv11_all_bytes_are_back_after_a_panic_in_the_end_of_a_table() {
    let _alone = alone();
    let round = || {
        let place: Arc<Mutex<Option<CtxTable<OnDrop>>>> = Arc::default();
        let (table, panics) = (CtxTable::new(), Arc::new(AtomicI64::new(0)));
        let (its_table, its_panics) = (Arc::clone(&place), Arc::clone(&panics));
        let drops_table =
            move || drop(its_table.lock().unwrap().take().expect("a table in its place"));
        let first = table.insert(OnDrop::call(drops_table)).unwrap();
        let panics_too = move || {
            its_panics.fetch_add(1, Relaxed);
            resume_unwind(Box::new("a drop"));
        };
        table.insert(OnDrop::call(panics_too)).unwrap();
        let guard = rcu::pin();
        table.remove(first).unwrap();
        *place.lock().unwrap() = Some(table);
        drop(guard);
        drain();
        assert!(place.lock().unwrap().is_none() && panics.load(Relaxed) == 1);
    };
    round(); // makes the memory that a process keeps
    assert_frees_all(round);
}
