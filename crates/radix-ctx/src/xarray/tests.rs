//! Tests that need the private lock of the array.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use percpu::rcu::{self, Owned};
use testkit::child::in_own_process;

use super::*;

/// No drop of an entry and no closure of the program runs under the lock. The test has a process of its
/// own, so a drop that finds the lock held runs inside the call that holds it.
#[test]
fn drops_and_closures_run_without_the_lock() {
    static ARRAY: OnceLock<XArray<Owned<Again>>> = OnceLock::new();
    static HELD: AtomicU64 = AtomicU64::new(0);
    static DROPPED: AtomicU64 = AtomicU64::new(0);

    struct Again;
    impl Again {
        fn check_lock() {
            let is_held = ARRAY.get().is_some_and(|array| array.lock.try_lock().is_none());
            HELD.fetch_add(is_held.into(), Relaxed);
        }
    }
    impl Drop for Again {
        fn drop(&mut self) {
            Self::check_lock();
            DROPPED.fetch_add(1, Relaxed);
        }
    }

    in_own_process("xarray::tests::drops_and_closures_run_without_the_lock", || {
        let array = ARRAY.get_or_init(XArray::new);
        let new = || Owned::new(Again);
        // Enough rounds to fill the RCU bags, so that drops run inside the calls.
        for round in 0..5_000 {
            drop(array.store(round % 100, new()).unwrap());
            assert!(array.insert(round % 100, new()).is_err());
            drop(array.alloc(0..50, new()));
            assert!(array.insert_with(round % 100, |_| unreachable!("it is taken")).is_err());
            drop(array.erase(round * 7 % 100));
            let made = array.alloc_with(200..250, |_| {
                Again::check_lock();
                new()
            });
            if made.is_err() {
                array.erase_range(150..);
            }
        }
        array.clear();
        rcu::barrier().unwrap();
        assert_eq!(HELD.load(Relaxed), 0);
        assert!(DROPPED.load(Relaxed) > 10_000);
    });
}
