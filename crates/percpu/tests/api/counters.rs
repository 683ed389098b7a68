//! Counters on threads that migrate.

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use offlock_percpu::PerCpuCounter;

use crate::threads::{hop, until};
use testkit::stress::keep_running;

/// Threads add on changing CPUs. The sum at the end is exact. A sum meanwhile has each add that ended
/// before it and no add that began after it, and is not less than an earlier sum.
pub(crate) fn hop_and_count(until: Instant) {
    const LARGEST: i64 = 50;
    const ENOUGH: i64 = 10_000;
    let counter = PerCpuCounter::new();
    let (begun, ended) = (AtomicI64::new(0), AtomicI64::new(0));
    let go = || keep_running(until, || ended.load(SeqCst) > ENOUGH);
    let add = |delta| {
        begun.fetch_add(delta, SeqCst);
        counter.add(delta);
        ended.fetch_add(delta, SeqCst);
    };
    hop(
        4,
        go,
        |_, _| (1..=LARGEST).chain([LARGEST; 20]).for_each(add),
        || {
            let mut last = 0;
            while go() {
                let least = ended.load(SeqCst).max(last);
                last = counter.sum();
                assert!((least..=begun.load(SeqCst)).contains(&last), "{least}, then {last}");
            }
        },
    );
    let sum = ended.into_inner();
    assert!(sum > ENOUGH, "{sum}");
    assert_eq!(counter.sum(), sum);
}

#[test]
fn inv03_sums_are_exact_under_migration() {
    hop_and_count(until(true));
}

#[test]
#[ignore = "stress: seconds of hopping"]
fn stress_inv03_sums_are_exact_under_migration() {
    hop_and_count(until(false));
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
