//! Counters on threads that migrate.

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::PerCpuCounter;

use testkit::pin::{allowed_cpus, pin_to};
use testkit::stress::{keep_running, stress_time};

/// Returns the end of a test: `OFFLOCK_STRESS_SECONDS` from now if `long`.
fn until(long: bool) -> Instant {
    let time = if long { stress_time(5) } else { Duration::from_millis(300) };
    Instant::now() + time
}

/// Threads add on changing CPUs. The sum at the end is exact. A sum meanwhile has each add that ended
/// before it and no add that began after it, and is not less than an earlier sum.
fn hop_and_count(until: Instant) {
    const THREADS: i64 = 4;
    const LARGEST: i64 = 50;
    const ENOUGH: i64 = 10_000;
    let counter = PerCpuCounter::new();
    let (begun, ended) = (AtomicI64::new(0), AtomicI64::new(0));
    let cpus = allowed_cpus();
    thread::scope(|s| {
        for start in 0..THREADS as usize {
            let (counter, begun, ended, cpus) = (&counter, &begun, &ended, &cpus);
            s.spawn(move || {
                let on = |_: &&usize| keep_running(until, || ended.load(SeqCst) > ENOUGH);
                for &cpu in cpus.iter().cycle().skip(start).take_while(on) {
                    pin_to(&[cpu]);
                    for delta in (1..=LARGEST).chain([LARGEST; 20]) {
                        begun.fetch_add(delta, SeqCst);
                        counter.add(delta);
                        ended.fetch_add(delta, SeqCst);
                    }
                }
            });
        }
        let mut last = 0;
        while keep_running(until, || ended.load(SeqCst) > ENOUGH) {
            let least = ended.load(SeqCst).max(last);
            last = counter.sum();
            assert!((least..=begun.load(SeqCst)).contains(&last), "{least}, then {last}");
        }
    });
    let sum = ended.into_inner();
    assert!(sum > ENOUGH, "{sum}");
    assert_eq!(counter.sum(), sum);
}

#[test]
fn inv03_sums_are_exact_under_migration() {
    hop_and_count(until(false));
}

#[test]
#[ignore = "stress: seconds of hopping"]
fn stress_inv03_sums_are_exact_under_migration() {
    hop_and_count(until(true));
}

/// The adds of an ended thread stay counted.
#[test]
fn inv15_thread_exit_leaves_counts_right() {
    let counter = PerCpuCounter::new();
    for _ in 0..10 {
        thread::scope(|s| {
            s.spawn(|| (0..100).for_each(|_| counter.increment()));
        });
    }
    assert_eq!(counter.sum(), 1_000);
}
