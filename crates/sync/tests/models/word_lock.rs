//! The small mutex.
//!
//! The value is read and written in two steps, so that only the lock makes the total right (shuttle
//! sees that); and every use of a guard goes through a checked cell, so that two uses which no
//! ordering separates fail (loom sees that). Where a wake-up is lost, the model deadlocks.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::virtual_fence::both_strategies;
use offlock_sync::{Arc, WordLock, beside};

use super::thoroughly;

/// Runs a model with each strategy of the fences, because an unlock takes another path with each.
fn model(f: impl Fn() + Send + Sync + Copy + 'static) {
    thoroughly(|| both_strategies(|| offlock_sync::model(f)));
}

/// Adds 1 in two steps.
fn add(lock: &WordLock<AtomicU64>) {
    let value = &mut *lock.lock();
    // Ordering: Relaxed, both; the lock orders them.
    let seen = value.load(Ordering::Relaxed);
    value.store(seen + 1, Ordering::Relaxed);
}

/// `others` threads beside this one, each adding `times`.
fn adders(others: usize, times: u64) {
    let lock = Arc::new(WordLock::new(AtomicU64::new(0)));
    let others: Vec<_> = (0..others)
        .map(|_| beside(&lock, move |lock| (0..times).for_each(|_| add(lock))))
        .collect();
    let threads = others.len() as u64 + 1;
    (0..times).for_each(|_| add(&lock));
    for other in others {
        other.join().unwrap();
    }
    // Ordering: Relaxed; the joins ordered it.
    let total = lock.try_lock().expect("everybody has unlocked").load(Ordering::Relaxed);
    assert_eq!(total, threads * times);
}

/// Fails if the lock or the unlock is weakened, or if a waiter is not seen.
#[test]
fn inv24_one_thread_at_a_time_sees_what_the_last_one_did() {
    model(|| adders(1, 2));
}

/// Two threads may wait at once: the one that is woken must wake the next.
#[test]
fn inv24_three_threads_are_all_woken() {
    // Not with three preemptions, which take minutes.
    both_strategies(|| offlock_sync::model(|| adders(2, 1)));
}

/// Trying neither waits nor takes what is held.
#[test]
fn a_try_takes_only_what_is_free() {
    model(|| {
        let lock = Arc::new(WordLock::new(AtomicU64::new(0)));
        let other = beside(&lock, add);
        let mine = match lock.try_lock() {
            Some(value) => {
                let seen = value.load(Ordering::Relaxed);
                value.store(seen + 1, Ordering::Relaxed);
                1
            }
            None => 0,
        };
        other.join().unwrap();
        let total = lock.try_lock().expect("both have unlocked").load(Ordering::Relaxed);
        assert_eq!(total, 1 + mine);
    });
}
