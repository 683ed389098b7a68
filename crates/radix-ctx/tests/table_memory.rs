//! Tables without memory, and the memory that tables free. The allocator counts, and can refuse.
#![cfg(not(offlock_model))]

#[path = "api/support.rs"]
#[expect(dead_code, reason = "the tests of one process use the rest")]
mod support;

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use offlock_percpu::rcu;
use radix_ctx::{
    AllocError, CtxRef, CtxTable, GetRefError, Id, InsertError, InsertRefused, LookupError,
    TableStats,
};
use testkit::alloc::{
    Calls, ThreadAllocator, admitted_left, calls, process_bytes, refuse_after, until_admitted,
};
use testkit::canary::{Canary, Census};
use testkit::child::in_own_process;

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

type Insert = fn(&CtxTable<Canary>, Canary) -> Result<Id, InsertError<Canary>>;

const INSERTS: [Insert; 2] = [
    |table, value| table.insert(value),
    |table, value| table.insert_ref(value).map(|context| CtxRef::id(&context)),
];

/// Returns the value of an insert that was refused for want of memory.
fn value_back<T>(error: InsertError<T>) -> T {
    assert_eq!(error.reason, InsertRefused::Alloc(AllocError::new()));
    error.value
}

#[test]
fn inv09_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    let _alone = alone();
    for insert in INSERTS {
        for (table, count) in tables() {
            let (before, values) = (snapshot(&table), count.alive());
            let try_it = |value| insert(&table, value).map_err(value_back);
            let id = until_admitted(Canary::new(99, &count), try_it, |admitted| {
                let mut now = snapshot(&table);
                // The lists of dead slots are made once and stay, as does an empty slab.
                let TableStats { slabs, nodes, height, bytes, .. } = before.stats;
                (now.stats.slabs, now.stats.nodes) = (slabs, nodes);
                (now.stats.height, now.stats.bytes) = (height, bytes);
                assert_eq!(now, before, "after {admitted} allocations");
            });
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
        let refused = |error| assert_eq!(error, GetRefError::Alloc(AllocError::new()));
        let get = |()| table.get_ref(id).map_err(refused);
        let context = until_admitted((), get, |_| assert_eq!(snapshot(&table), before));
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

/// An insert that fails gives its share of the limit back: without memory for a slab, or for the counts of its
/// reference, and without an index.
#[test]
fn inv15_every_failing_path_gives_its_share_back() {
    let _alone = alone();
    let count = Census::new();
    let context = || Canary::new(0, &count);
    for insert in INSERTS {
        let table = CtxTable::builder().max_contexts(3).max_index(1).build();
        for _ in 0..5 {
            value_back(refuse_after(0, || insert(&table, context())).unwrap_err());
        }
        table.insert(context()).unwrap(); // makes the slab
        for _ in 0..5 {
            value_back(refuse_after(0, || table.insert_ref(context())).map(drop).unwrap_err());
        }
        insert(&table, context()).unwrap();
        for _ in 0..5 {
            let refused = insert(&table, context()).unwrap_err().reason;
            assert_eq!(refused, InsertRefused::Exhausted { pending: 0 });
        }
        assert_eq!(table.remove_all(), Ok(2));
    }
    assert_eq!(count.alive(), 0);
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

/// The first counted reference asks under the table's lock whether sections run. The first use of percpu is over
/// before.
#[test]
fn a_table_leaves_no_first_use_to_its_lock() {
    in_own_process("a_table_leaves_no_first_use_to_its_lock", || {
        drop(CtxTable::<u32>::new());
        let (found, made) = calls(offlock_percpu::capabilities);
        assert_eq!(made, Calls::NONE, "{found}");
    });
}
