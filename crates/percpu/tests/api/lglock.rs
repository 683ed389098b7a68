//! `LgLock` on the real kernel: its errors, the state after a panic or an exited thread, and sums under
//! migration.
//!
//! Every test passes with and without rseq.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::lglock::LocalGuard;
use offlock_percpu::{CpuId, LgLock, possible_cpus};

use crate::threads::{hop, until};
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng::Rng;
use testkit::stress::keep_running;

const ZERO: CpuId = CpuId::new(0);

#[test]
fn a_slot_for_every_cpu_with_its_value() {
    let lock = LgLock::new(|cpu| cpu.get() * 10);
    let mut all = lock.global().unwrap();
    all.iter_mut().for_each(|(_, value)| *value += 2);
    assert!(all.iter().map(|(_, &value)| value).eq((0..all.capacity() as u32).map(|n| n * 10 + 2)));
    assert!(all.iter().enumerate().all(|(at, (cpu, _))| at == cpu.index()), "ascending");
    assert_eq!((all.capacity(), all.iter().rev().len()), (possible_cpus(), possible_cpus()));
}

#[test]
#[should_panic(expected = "out of bounds")]
fn a_cpu_without_a_slot_panics() {
    let lock = LgLock::new(|_| 0);
    let _ = lock.local_on(CpuId::new(lock.capacity() as u32));
}

/// Waiters of every method sleep until the guard is dropped, and then each locks in turn.
#[test]
fn everyone_who_waits_is_woken() {
    let lock = &LgLock::new(|_| 0_u64);
    let end = lock.capacity() as u64;
    let guard = lock.global().unwrap();
    thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| *lock.local().unwrap() += 1);
            s.spawn(|| *lock.local_on(ZERO).unwrap() += 1);
            s.spawn(|| lock.global().unwrap().iter_mut().for_each(|(_, n)| *n += 1));
        }
        thread::sleep(Duration::from_millis(50)); // long enough for all threads to sleep
        assert_eq!(guard.iter().map(|(_, n)| *n).sum::<u64>(), 0);
        drop(guard);
    });
    let total: u64 = lock.global().unwrap().iter().map(|(_, n)| *n).sum();
    assert_eq!(total, 3 + 3 + 3 * end);
}

#[test]
fn a_panic_inside_a_guard_unlocks_and_poisons_nothing() {
    let lock = LgLock::new(|_| 0);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        *lock.local_on(ZERO).unwrap() = 7;
        let mut all = lock.global().unwrap();
        *all.iter_mut().next().unwrap().1 += 1;
        panic!("inside a guard");
    }));
    assert!(panicked.is_err());
    assert_eq!(*lock.local_on(ZERO).unwrap(), 8, "the value at the panic");
    assert!(lock.global().is_ok());
}

/// The destructor of a guard in a thread-local variable unlocks when the thread ends.
#[test]
fn inv15_a_guard_in_a_thread_local_unlocks_when_its_thread_ends() {
    thread_local! {
        static KEPT: RefCell<Option<LocalGuard<'static, u32>>> = const { RefCell::new(None) };
    }
    let lock: &'static LgLock<u32> = Box::leak(Box::new(LgLock::new(|_| 0)));
    for turn in 1..=3 {
        thread::spawn(move || {
            let mut guard = lock.local_on(ZERO).expect("the earlier thread has ended");
            *guard += 1;
            KEPT.set(Some(guard));
        })
        .join()
        .unwrap();
        assert_eq!(*lock.local_on(ZERO).unwrap(), turn);
    }
}

/// Threads on changing CPUs add by every method, and no add is lost.
pub(crate) fn hop_and_lock(until: Instant) {
    let lock = LgLock::new(|_| (0_u64, 0_u64));
    let (cpus, end) = (allowed_cpus(), lock.capacity());
    let (added, moved) = (AtomicU64::new(0), AtomicU64::new(0));
    let enough = || added.load(Relaxed) > 10_000 && (cpus.len() == 1 || moved.load(Relaxed) > 0);
    let step = |rng: &mut Rng, _| {
        let cpu = CpuId::new(rng.usize(..end) as u32);
        match rng.usize(..64) {
            0 => {
                lock.global().unwrap().iter_mut().for_each(|(_, both)| add(both));
                added.fetch_add(end as u64 - 1, Relaxed);
            }
            1..8 => add(&mut lock.local_on(cpu).unwrap()),
            8 => {
                let mut guard = lock.local().unwrap();
                pin_to(&cpus); // any allowed CPU
                pin_to(&[cpus[rng.usize(..cpus.len())]]);
                if offlock_percpu::current_cpu() != guard.cpu() {
                    moved.fetch_add(1, Relaxed);
                }
                add(&mut guard);
            }
            _ => add(&mut lock.local().unwrap()),
        }
        added.fetch_add(1, Relaxed);
    };
    let steps = |rng: &mut Rng, cpu| (0..100).for_each(|_| step(rng, cpu));
    hop(8, || keep_running(until, enough), steps, || ());
    let all = lock.global().unwrap();
    assert!(all.iter().all(|(_, (first, second))| first == second));
    let got: u64 = all.iter().map(|(_, (first, _))| *first).sum();
    println!("{added:?} additions, {moved:?} guards unlocked on another CPU, {lock:?}");
    assert_eq!(got, added.load(Relaxed));
    assert!(enough());
}

#[test]
#[ignore = "stress: five seconds of hopping"]
fn stress_inv02_hopping_threads_lose_no_update_by_any_method() {
    hop_and_lock(until(false));
}

/// Adds 1 by a separate load and store, so that a second thread inside loses an update.
fn add((first, second): &mut (u64, u64)) {
    *first += 1;
    std::hint::black_box(&*first);
    *second += 1;
}
