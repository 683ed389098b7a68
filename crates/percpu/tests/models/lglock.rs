//! The local-global lock.
//!
//! The value is an atomic that is read and written in two steps, so that only the lock makes the
//! total right (shuttle sees that); and every use of a guard goes through a checked cell, so that
//! two uses which no ordering separates fail (loom sees that). Where a wake-up is lost, the model
//! deadlocks.

use offlock_percpu::CpuId;
use offlock_percpu::lglock::{LgLock, LockError};
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::virtual_cpu::set_current;
use offlock_sync::{Arc, beside};

use super::{long_model, model};

type Lock = LgLock<AtomicU64>;

const ZERO: CpuId = CpuId::new(0);
const ONE: CpuId = CpuId::new(1);

/// Adds 1 in two steps.
fn add(value: &AtomicU64) {
    // Ordering: Relaxed, both; the lock orders them.
    let seen = value.load(Ordering::Relaxed);
    value.store(seen + 1, Ordering::Relaxed);
}

/// Runs a thread for each function on one lock, the first one here, and returns the values of the slots.
fn race<const N: usize>(here: fn(&Lock), there: [fn(&Lock); N]) -> [u64; 2] {
    let lock = Arc::new(make());
    let others = there.map(|there| beside(&lock, there));
    here(&lock);
    others.into_iter().for_each(|other| other.join().unwrap());
    // Ordering: Relaxed; the lock ordered it.
    [ZERO, ONE].map(|cpu| lock.local_on(cpu).unwrap().load(Ordering::Relaxed))
}

fn make() -> Lock {
    Lock::new(|_| AtomicU64::new(0))
}

fn local(lock: &Lock) {
    add(&*lock.local().unwrap());
}

/// From the other CPU than where a thread starts.
fn remote(lock: &Lock) {
    set_current(ONE);
    add(&*lock.local_on(ZERO).unwrap());
}

fn global(lock: &Lock) {
    set_current(ONE);
    for (_, value) in lock.global().unwrap().iter_mut() {
        add(value);
    }
}

/// Locks on CPU 0 and unlocks on CPU 1.
fn migrate(lock: &Lock) {
    let guard = lock.local().unwrap();
    assert_eq!(guard.cpu(), ZERO);
    set_current(ONE);
    add(&guard);
}

#[test]
fn two_threads_exclude_each_other_on_a_slot() {
    model(|| assert_eq!(race(local, [local]), [2, 0]));
    model(|| assert_eq!(race(local, [remote]), [2, 0]));
    model(|| assert_eq!(race(local, [global]), [2, 1]));
    model(|| assert_eq!(race(global, [global]), [2, 2]));
}

/// Three threads for one slot: a thread that is woken wakes the next.
#[test]
fn three_on_one_slot_all_get_it() {
    long_model(|| assert_eq!(race(local, [local, remote]), [3, 0]));
}

#[test]
fn inv02_a_guard_unlocks_its_slot_after_a_migration() {
    model(|| assert_eq!(race(migrate, [local]), [2, 0]));
}

/// Locked on CPU 0, unlocked on CPU 1, while CPU 1's slot is locked by its own.
#[test]
fn inv02_a_migrated_guard_leaves_the_slot_of_its_new_cpu_alone() {
    fn on_one(lock: &Lock) {
        set_current(ONE);
        local(lock);
        local(lock);
    }
    fn twice(lock: &Lock) {
        migrate(lock);
        local(lock);
    }
    model(|| assert_eq!(race(twice, [on_one]), [1, 3]));
}

/// A thread that would have to wait for a slot before one that it holds is refused: here both threads
/// hold a slot and want the other's, or everything.
#[test]
fn holders_are_refused_rather_than_left_waiting_for_each_other() {
    model(|| {
        let lock = Arc::new(make());
        let greedy = |lock: &Lock, cpu: CpuId, other: CpuId| {
            set_current(cpu);
            let _mine = lock.local_on(cpu).unwrap();
            match lock.local_on(other) {
                Ok(guard) => assert_eq!(guard.cpu(), other),
                Err(error) => assert_eq!(error, LockError::Deadlock),
            }
            assert_eq!(lock.global().unwrap_err(), LockError::Deadlock);
        };
        let other = beside(&lock, move |lock| greedy(lock, ONE, ZERO));
        greedy(&lock, ZERO, ONE);
        other.join().unwrap();
        assert!(lock.global().is_ok(), "everything is free again");
    });
}
