//! Inserts with options, and the state of the table after an insert that fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use percpu::rcu;
use radix_ctx::{CtxTable, InsertRefused};

const EXHAUSTED: InsertRefused = InsertRefused::Exhausted { pending: 0 };

#[test]
fn inv15_every_kind_of_insert_counts_its_weight() {
    let table = CtxTable::builder().max_weight(100).max_contexts(10).build().unwrap();
    let used = || {
        let usage = table.usage();
        (usage.contexts, usage.weight.unwrap())
    };
    let of_ten = || table.inserter().weight(10);
    let mut ids = vec![of_ten().insert(0).unwrap(), of_ten().within(7..).insert(1).unwrap()];
    ids.push(of_ten().cyclic().insert_with(|id| id.index()).unwrap());
    ids.push(of_ten().wait().reserve().unwrap().commit(3));
    assert_eq!(ids.iter().map(|id| id.index()).collect::<Vec<_>>(), [0, 7, 1, 2]);
    assert_eq!(used(), (4, 40));

    let reserved = table.inserter().weight(30).reserve().unwrap();
    assert_eq!(used(), (5, 70));
    drop(reserved);
    let panics = || of_ten().within(3..).insert_with(|_| panic!("half-way"));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    #[allow(clippy::reversed_empty_ranges, reason = "the test is about empty ranges")]
    let empty = of_ten().within(5..3);
    for cyclic in [false, true] {
        let with = |weight| {
            let inserter = table.inserter().weight(weight).wait();
            if cyclic { inserter.cyclic() } else { inserter }
        };
        let too_heavy = InsertRefused::TooHeavy { weight: 101, limit: 100 };
        assert_eq!(with(101).insert(9).unwrap_err().reason, too_heavy);
        assert_eq!(with(61).insert(9).unwrap_err().reason, InsertRefused::Quota);
        assert_eq!(
            with(9).within(u32::MAX..).insert(9).unwrap_err().reason,
            InsertRefused::NoRange
        );
        assert_eq!(with(9).within(7..8).insert(9).unwrap_err().reason, EXHAUSTED);
        assert_eq!(with(9).within(7..8).reserve().unwrap_err().reason, EXHAUSTED);
        assert_eq!(with(9).within(7..8).insert_with(|_| 9).unwrap_err().reason, EXHAUSTED);
    }
    assert_eq!(empty.insert(9).unwrap_err().reason, InsertRefused::NoRange);
    assert_eq!(used(), (4, 40));
    for id in ids {
        table.remove(id).unwrap();
    }
    assert_eq!(used(), (0, 0));
    table.validate();
}

#[test]
fn inv08_a_cyclic_insert_keeps_to_its_range() {
    let table = CtxTable::new();
    let next = || table.inserter().within(5..8).cyclic().insert(()).unwrap();
    let ids: Vec<_> = (0..3).map(|_| next()).collect();
    assert_eq!(ids.iter().map(|id| id.index()).collect::<Vec<_>>(), [5, 6, 7]);
    assert!(table.inserter().within(5..8).cyclic().insert(()).is_err());
    table.remove(ids[1]).unwrap().wait().unwrap();
    table.remove(ids[0]).unwrap().wait().unwrap();
    assert_eq!([next().index(), next().index()], [5, 6]);
    assert_eq!(table.insert_cyclic(()).unwrap().index(), 8, "there is one cursor");
    table.validate();
}

/// Two threads insert and remove. Before the wrap no index is assigned twice, and the indexes of each thread
/// ascend.
#[test]
fn inv08_no_index_is_assigned_twice_before_the_wrap() {
    let table = CtxTable::new();
    let lap = || {
        let given = (0..20_000).map(|_| {
            let id = table.insert_cyclic(()).unwrap();
            table.remove(id).unwrap();
            table.poll();
            id.index()
        });
        given.collect::<Vec<_>>()
    };
    let (mut all, other) = thread::scope(|scope| {
        let other = scope.spawn(lap);
        (lap(), other.join().unwrap())
    });
    assert!(all.is_sorted() && other.is_sorted());
    all.extend(other);
    all.sort_unstable();
    assert!(all.into_iter().eq(0..40_000));
    table.flush().unwrap();
    table.validate();
}

/// An insert with a range waits although indexes outside of the range are vacant.
#[test]
fn an_insert_waits_for_its_range() {
    let table = CtxTable::new();
    let id = table.insert_in(3..=3, 0).unwrap();
    let context = table.get_ref(id).unwrap();
    table.remove(id).unwrap();
    let there = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let id = table.inserter().within(3..=3).wait().insert(1).unwrap();
            there.store(true, Relaxed);
            id
        });
        thread::sleep(Duration::from_millis(50));
        let other = table.insert(2).unwrap();
        table.remove(other).unwrap().wait().unwrap();
        assert!(!there.load(Relaxed));
        drop(context);
        assert_eq!(waiter.join().unwrap().index(), 3);
    });
    let ids = [table.insert_in(4..=4, 0).unwrap()];
    let guard = rcu::pin();
    table.remove(ids[0]).unwrap();
    let refused = table.inserter().within(4..=4).wait().insert(5).unwrap_err();
    assert_eq!((refused.reason, refused.value), (InsertRefused::Deadlock, 5));
    drop(guard);
}
