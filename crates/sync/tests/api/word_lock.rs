//! The lock on real threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
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

/// Every waiter is woken, even if it sleeps by the time of the unlock.
#[test]
fn waiting_threads_get_the_lock_in_turn() {
    let lock = Arc::new(WordLock::new(0));
    let guard = lock.lock();
    let waiters = [(); 3].map(|()| {
        let lock = Arc::clone(&lock);
        thread::spawn(move || *lock.lock() += 1)
    });
    thread::sleep(Duration::from_millis(50));
    assert_eq!(*guard, 0);
    drop(guard);
    for waiter in waiters {
        waiter.join().unwrap();
    }
    assert_eq!(*lock.lock(), 3);
}

#[test]
fn many_threads_lose_no_update() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 20_000;
    let lock = WordLock::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| (0..ROUNDS).for_each(|_| *lock.lock() += 1));
        }
    });
    assert_eq!(*lock.lock(), THREADS * ROUNDS);
}
