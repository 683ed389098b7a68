//! The lock on real threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use offlock_sync::WordLock;

#[test]
fn lock_excludes_try_lock_until_the_guard_drops() {
    let mut lock = WordLock::new(1);
    let mut guard = lock.lock();
    *guard += 1;
    assert!(lock.try_lock().is_none());
    drop(guard);
    assert_eq!(lock.try_lock().map(|guard| *guard), Some(2));
    *lock.get_mut() += 1;
    assert_eq!(*lock.lock(), 3);
}

#[test]
fn a_panic_unlocks() {
    let lock = WordLock::new(0);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        *lock.lock() = 1;
        let _guard = lock.lock();
        panic!("with the guard");
    }));
    assert!(panicked.is_err());
    assert_eq!(lock.try_lock().map(|guard| *guard), Some(1));
}

/// Every waiter is woken, even if it sleeps by the time of the unlock, and no update is lost.
#[test]
fn waiting_threads_get_the_lock_in_turn() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 20_000;
    let lock = WordLock::new(0);
    thread::scope(|scope| {
        let guard = lock.lock();
        for _ in 0..THREADS {
            scope.spawn(|| (0..ROUNDS).for_each(|_| *lock.lock() += 1));
        }
        thread::sleep(Duration::from_millis(50));
        assert_eq!(*guard, 0);
    });
    assert_eq!(*lock.lock(), THREADS * ROUNDS);
}
