//! Tables without memory, and the memory that tables free. The allocator counts, and can refuse.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::thread;

use percpu::rcu;
use radix_ctx::{
    AllocError, CtxRef, CtxTable, GetRefError, Id, InsertRefused, LookupError, TableStats, Usage,
};
use testkit::alloc::{ThreadAllocator, admitted_left, process_bytes, refuse_after, thread_bytes};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// Lets one test of this file run at a time, because each counts the bytes of the process. The first use of
/// percpu is not counted.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = percpu::capabilities();
    rcu::barrier().unwrap();
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

/// A context that is counted.
#[derive(Debug)]
struct Counted(u64, Arc<AtomicI64>);

impl Counted {
    fn new(value: u64, count: &Arc<AtomicI64>) -> Self {
        count.fetch_add(1, Relaxed);
        Self(value, Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Relaxed);
    }
}

/// The visible state of a table.
#[derive(Debug, PartialEq)]
struct Snapshot {
    live: Vec<(Id, u64)>,
    next_free: Option<u32>,
    usage: Usage,
    stats: TableStats,
}

fn snapshot(table: &CtxTable<Counted>) -> Snapshot {
    table.validate();
    let guard = rcu::pin();
    Snapshot {
        live: table.iter(&guard).map(|(id, context)| (id, context.0)).collect(),
        next_free: table.next_free(),
        usage: table.usage(),
        stats: table.stats(),
    }
}

/// Tables whose next context needs a new slab: the first slab, another one, or one with new nodes above it.
fn tables() -> impl Iterator<Item = (CtxTable<Counted>, Arc<AtomicI64>)> {
    [0, 64, 128, 4096].into_iter().map(|full| {
        let count = Arc::new(AtomicI64::new(0));
        let table = CtxTable::builder().max_contexts(10_000).max_weight(10_000).build().unwrap();
        for value in 0..full {
            table.insert(Counted::new(value, &count)).unwrap();
        }
        (table, count)
    })
}

type Case = fn(&CtxTable<Counted>, Counted) -> Result<Id, (InsertRefused, Option<Counted>)>;

const INSERTS: [Case; 6] = [
    |table, value| table.insert(value).map_err(|error| (error.reason, Some(error.value))),
    |table, value| {
        table.insert_weighted(value, 7).map_err(|error| (error.reason, Some(error.value)))
    },
    |table, value| {
        table.insert_in(70_000.., value).map_err(|error| (error.reason, Some(error.value)))
    },
    |table, value| table.insert_cyclic(value).map_err(|error| (error.reason, Some(error.value))),
    |table, value| table.insert_wait(value).map_err(|error| (error.reason, Some(error.value))),
    |table, value| {
        table.insert_with(|_| value).map_err(|error| {
            let reason = error.reason;
            let make = error.value;
            // The closure still has the value.
            (reason, Some(make(Id::from_bits(1 << 32).unwrap())))
        })
    },
];

#[test]
fn inv09_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    let _alone = alone();
    for insert in INSERTS {
        for (table, count) in tables() {
            let before = snapshot(&table);
            let values = count.load(Relaxed);
            let mut value = Some(Counted::new(99, &count));
            let inserted = Cell::new(None);
            let try_it = || match insert(&table, value.take().unwrap()) {
                Ok(id) => {
                    inserted.set(Some(id));
                    false
                }
                Err((reason, back)) => {
                    assert_eq!(reason, InsertRefused::Alloc(AllocError::new()));
                    value = back;
                    true
                }
            };
            fails_cleanly(try_it, |refused| {
                let mut now = snapshot(&table);
                // The lists of dead slots are made once and stay.
                now.stats.bytes = before.stats.bytes;
                assert_eq!(now, before, "after {refused} allocations");
            });
            let id = inserted.get().unwrap();
            assert_eq!(table.with(id, |context| context.0), Ok(99));
            assert_eq!(count.load(Relaxed), values + 1);
            drop(table);
            assert_eq!(count.load(Relaxed), 0);
        }
    }
}

#[test]
fn inv09_a_refused_reservation_or_room_changes_nothing() {
    let _alone = alone();
    for (table, _count) in tables() {
        let before = snapshot(&table);
        let check = |refused| {
            let mut now = snapshot(&table);
            now.stats.bytes = before.stats.bytes;
            assert_eq!(now, before, "after {refused} allocations");
        };
        let refused = InsertRefused::Alloc(AllocError::new());
        let kept = Cell::new(None);
        let reserve = || match table.reserve() {
            Ok(reservation) => {
                kept.set(Some(reservation));
                false
            }
            Err(error) => {
                assert_eq!(error.reason, refused);
                true
            }
        };
        fails_cleanly(reserve, check);
        drop(kept.take().unwrap());
        table.shrink_to_fit();
        // Slabs that were made before the failure stay, and the contexts do not change.
        fails_cleanly(
            || match table.try_reserve(200) {
                Ok(()) => false,
                Err(error) => {
                    assert_eq!(error, refused);
                    true
                }
            },
            |_| {
                let now = snapshot(&table);
                assert_eq!((now.live, now.usage), (snapshot(&table).live, before.usage));
            },
        );
        refuse_after(0, || {
            for _ in 0..200 {
                let id = table.reserve().unwrap().id();
                assert!(id.generation() > 0);
            }
        });
    }
}

#[test]
fn inv13_a_refused_count_gives_no_reference() {
    let _alone = alone();
    for (table, count) in tables() {
        let id = table.insert(Counted::new(5, &count)).unwrap();
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
        assert_eq!(context.0, 5);
        refuse_after(0, || {
            drop(context.clone());
            drop(table.get_ref(id).unwrap());
            table.remove(id).unwrap();
        });
        drop(table);
        assert_eq!(count.load(Relaxed), 1, "the reference keeps the context");
        drop(context);
        assert_eq!(count.load(Relaxed), 0);
    }
}

/// A waker that has no memory leaves nothing behind, so the map of the wakers does not grow.
#[test]
fn inv18_a_refused_waker_takes_no_memory() {
    let _alone = alone();
    let table = CtxTable::new();
    let held: Vec<_> = (0..20).map(|value| table.insert_ref(value).unwrap()).collect();
    let poll = |context, admitted| {
        let future = pin!(CtxRef::removed(context));
        refuse_after(admitted, || future.poll(&mut Context::from_waker(Waker::noop())))
    };
    assert!(poll(&held[0], 1).is_pending()); // makes the map
    let bytes = thread_bytes();
    for context in &held[1..] {
        assert!(poll(context, 0).is_pending());
    }
    assert!(poll(&held[19], 1).is_pending()); // a full map would grow here
    assert_eq!(thread_bytes(), bytes);
}

/// Lookups, references, removals, reclaim, and inserts into slabs with vacant slots allocate nothing.
#[test]
fn a_table_with_room_allocates_nothing() {
    let _alone = alone();
    let table = CtxTable::builder().max_contexts(10_000).build().unwrap();
    table.try_reserve(100).unwrap();
    let first = table.insert(0).unwrap();
    drop(table.get_ref(first).unwrap()); // makes the counts of the slab
    table.remove(table.insert(0).unwrap()).unwrap();
    table.flush().unwrap(); // makes the memory of RCU
    let left = refuse_after(100, || {
        let guard = rcu::pin();
        assert_eq!((table.get(first, &guard), table.with(first, |n| *n)), (Ok(&0), Ok(0)));
        assert!(table.contains(first) && table.at_or_after(0, &guard).is_some());
        assert!(table.at_or_before(u32::MAX, &guard).is_some() && table.iter(&guard).count() == 1);
        drop(guard);
        let held = table.get_ref(first).unwrap();
        drop(held.clone());
        for round in 0..3_000 {
            let id = match round % 3 {
                0 => table.insert(round).unwrap(),
                1 => table.insert_with(|_| round).unwrap(),
                _ => table.reserve().unwrap().commit(round),
            };
            table.remove(id).unwrap();
            drop(table.reserve().unwrap());
            if round % 50 == 49 {
                table.flush().unwrap(); // so that two slabs are enough
            }
        }
        assert!(table.next_free().is_some() && table.usage().contexts == 1);
        assert!(table.stats().live == 1 && table.poll() <= 3_000);
        table.flush().unwrap();
        assert_eq!(table.begin_remove_all().len(), 1);
        drop(held);
        table.flush().unwrap();
        assert!(table.is_empty());
        admitted_left()
    });
    assert_eq!(left, 100, "allocated");
}

#[test]
fn inv09_a_table_that_cannot_be_made_is_refused() {
    let _alone = alone();
    let made = Cell::new(None);
    let bytes = thread_bytes();
    let build = || match CtxTable::<u64>::builder().max_contexts(5).max_weight(9).build() {
        Ok(table) => {
            made.set(Some(table));
            false
        }
        Err(AllocError { .. }) => true,
    };
    fails_cleanly(build, |refused| assert_eq!(thread_bytes(), bytes, "after {refused}"));
    let table = made.take().unwrap();
    assert_eq!(table.with(table.insert(7).unwrap(), |value| *value), Ok(7));
}

/// An insert that fails gives its share of the limits back, also if `make` panics.
#[test]
fn inv15_every_failing_path_gives_its_share_back() {
    let _alone = alone();
    let count = Arc::new(AtomicI64::new(0));
    let table = CtxTable::builder().max_contexts(3).max_weight(30).max_index(1).build().unwrap();
    let usage = || {
        let usage = table.usage();
        (usage.contexts, usage.weight)
    };
    for insert in INSERTS {
        let _ = refuse_after(0, || insert(&table, Counted::new(0, &count)).is_err());
        assert_eq!((usage(), count.load(Relaxed)), ((0, Some(0)), 0));
    }
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let make = |_| -> Counted { resume_unwind(Box::new(())) };
        table.insert_with(make).map(|_| ()).map_err(|error| error.reason)
    }));
    assert!(panicked.is_err());
    assert_eq!(usage(), (0, Some(0)));
    drop(table.reserve().unwrap());
    assert_eq!(usage(), (0, Some(0)));
    for _ in 0..2 {
        table.insert_weighted(Counted::new(0, &count), 3).unwrap();
    }
    for insert in INSERTS {
        let refused = insert(&table, Counted::new(0, &count)).unwrap_err().0;
        assert!(!matches!(refused, InsertRefused::Quota | InsertRefused::Alloc(_)));
        assert_eq!(usage(), (2, Some(6)));
    }
    let refused = table.insert_weighted(Counted::new(0, &count), 25).unwrap_err();
    assert_eq!((refused.reason, usage()), (InsertRefused::Quota, (2, Some(6))));
}

/// All bytes are freed after a mass removal, and after the drop of the table and its last reference.
#[test]
fn inv11_all_bytes_are_back_after_mass_removal() {
    let _alone = alone();
    let round = |threads: usize| {
        let count = Arc::new(AtomicI64::new(0));
        let table = CtxTable::new();
        assert!(size_of_val(&table) <= 16 && table.stats().bytes <= 1024, "{}", table.stats());
        let ids: Vec<Id> =
            (0..50_000).map(|value| table.insert(Counted::new(value, &count)).unwrap()).collect();
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
        assert_eq!(count.load(Relaxed), 10);
        rcu::barrier().unwrap();
        let left = table.stats();
        assert!(left.slabs <= 2 && left.nodes <= 2, "{full}; {left}");
        assert!(ids.iter().all(|id| table.with(*id, |_| ()) == Err(LookupError::Stale)));
        // Uses the same indexes with other generations.
        let again: Vec<Id> =
            (0..1_000).map(|value| table.insert(Counted::new(value, &count)).unwrap()).collect();
        assert!(again.iter().all(|id| id.generation() > 1 || !ids.contains(id)));
        assert!(ids.iter().all(|id| !table.contains(*id)));
        drop(table);
        assert_eq!(count.load(Relaxed), 10);
        drop(held);
        assert_eq!(count.load(Relaxed), 0);
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
    let before = {
        rcu::barrier().unwrap();
        rcu::barrier().unwrap();
        process_bytes()
    };
    for threads in [1, 4] {
        round(threads);
        for _ in 0..3 {
            rcu::barrier().unwrap();
        }
        assert_eq!(process_bytes(), before, "{threads} threads");
    }
}
