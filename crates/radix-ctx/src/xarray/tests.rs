//! What needs the lock from inside.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use percpu::Forked;
use percpu::rcu::{self, Owned};

use super::*;

#[path = "../../tests/common/child.rs"]
mod child;

use child::in_child;

/// A child of a fork at which the lock was held says so, gives back, and goes on reading.
#[test]
fn a_fork_child_does_not_wait_for_its_parents_writer() {
    let array = XArray::<Value>::new();
    array.store(0, 1.into()).unwrap();
    array.store(9, 9.into()).unwrap();
    let nine = Value::from(9);
    let reservation = array.reserve(1).unwrap();
    let locked = array.lock().unwrap();
    let checks: &[(&str, &dyn Fn() -> bool)] = &[
        ("load", &|| array.load(0, &rcu::pin()) == Some(1.into())),
        ("iter", &|| array.iter(&rcu::pin()).count() == 2),
        ("store", &|| array.store(2, nine) == Err(StoreError::Forked(nine))),
        ("insert", &|| array.insert(2, nine) == Err(InsertError::Forked(nine))),
        ("insert_with", &|| {
            let said = array.insert_with(2, |_| nine);
            matches!(said, Err(InsertError::Forked(Some(_))))
        }),
        ("erase", &|| {
            array.erase(0).map_err(|error: Forked| error.errno()) == Err(libc::EOWNERDEAD)
        }),
        ("erase_range", &|| array.erase_range(..).is_err()),
        ("compare_exchange", &|| {
            let guard = rcu::pin();
            let said = array.compare_exchange(2, None, Some(nine), &guard);
            said.is_err_and(|error| {
                matches!(error.kind, CompareExchangeErrorKind::Forked) && error.new == Some(nine)
            })
        }),
        ("reserve", &|| array.reserve(2).is_err_and(|error| error == ReserveError::Forked)),
        ("release", &|| array.release(1).is_err()),
        ("commit", &|| array.commit(1, nine) == Err(CommitError::Forked(nine))),
        ("alloc", &|| array.alloc(.., nine) == Err(AllocateError::Forked(nine))),
        ("alloc_cyclic", &|| array.alloc_cyclic(.., nine) == Err(AllocateError::Forked(nine))),
        ("set_mark", &|| array.set_mark(0, Mark::Zero).is_err()),
        ("clear_mark", &|| array.clear_mark(0, Mark::Zero).is_err()),
        ("next_free", &|| array.next_free(..).is_err()),
        ("try_reserve", &|| array.try_reserve(0..1_000) == Err(StoreError::Forked(()))),
        ("shrink_to_fit", &|| array.shrink_to_fit().is_err()),
    ];
    for (name, check) in checks {
        assert!(in_child(check), "{name}");
    }
    assert!(in_child(|| {
        // SAFETY: the reservation is forgotten in this process, so that it is dropped once in each.
        let copy = unsafe { ptr::read(&reservation) };
        copy.commit(nine) == Err(CommitError::Forked(nine)) && !array.contains(1)
    }));
    drop(locked);
    reservation.commit(nine).unwrap();
    assert!(in_child(|| array.erase(1) == Ok(Some(nine))), "a lock that was free at the fork is");
    array.validate();
}

/// Neither a drop nor a closure of the caller's runs under the lock. In a child, that has one thread: so
/// who finds the lock held has it.
#[test]
fn drops_and_closures_run_without_the_lock() {
    static ARRAY: OnceLock<XArray<Owned<Again>>> = OnceLock::new();
    static HELD: AtomicU64 = AtomicU64::new(0);
    static DROPPED: AtomicU64 = AtomicU64::new(0);

    struct Again;
    impl Again {
        fn look() {
            let is_held = ARRAY.get().is_some_and(|array| array.lock.try_lock().is_none());
            HELD.fetch_add(is_held.into(), Relaxed);
        }
    }
    impl Drop for Again {
        fn drop(&mut self) {
            Self::look();
            DROPPED.fetch_add(1, Relaxed);
        }
    }

    assert!(in_child(|| {
        let array = ARRAY.get_or_init(XArray::new);
        let new = || Owned::new(Again);
        // Enough for full bags, so that drops run inside the calls.
        for round in 0..5_000 {
            drop(array.store(round % 100, new()).unwrap());
            assert!(array.insert(round % 100, new()).is_err());
            drop(array.alloc(0..50, new()));
            assert!(array.insert_with(round % 100, |_| unreachable!("it is taken")).is_err());
            drop(array.erase(round * 7 % 100).unwrap());
            let made = array.alloc_with(200..250, |_| {
                Again::look();
                new()
            });
            if made.is_err() {
                array.erase_range(150..).unwrap();
            }
        }
        array.clear().unwrap();
        rcu::barrier().unwrap();
        HELD.load(Relaxed) == 0 && DROPPED.load(Relaxed) > 10_000
    }));
}
