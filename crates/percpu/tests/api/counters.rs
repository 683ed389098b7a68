//! Counters on threads that migrate while words are folded, and the fuzzer's operations on its
//! corpus and on random bytes.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{CpuId, PerCpuCounter, possible_cpus};
use proptest::prelude::*;

use testkit::pin::{allowed_cpus, pin_to};
use testkit::stress::{keep_running, stress_time};

/// Returns the end of a test: `OFFLOCK_STRESS_SECONDS` from now if `long`.
fn until(long: bool) -> Instant {
    let time = if long { stress_time(5) } else { Duration::from_millis(300) };
    Instant::now() + time
}

fn all_cpus() -> impl Iterator<Item = CpuId> {
    (0..possible_cpus() as u32).map(CpuId::new)
}

/// Threads add on changing CPUs while another thread folds. The sum at the end is exact, and the
/// approximate value is within its bound all the time.
fn hop_and_count(until: Instant, batch: u32) {
    const THREADS: i64 = 4;
    const LARGEST: i64 = 50;
    const ENOUGH: i64 = 10_000;
    let counter = PerCpuCounter::with_batch(batch);
    let (begun, ended) = (AtomicI64::new(0), AtomicI64::new(0));
    let stop = AtomicBool::new(false);
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
        s.spawn(|| {
            while !stop.load(Relaxed) {
                for cpu in all_cpus() {
                    counter.fold(cpu);
                }
                thread::sleep(Duration::from_micros(200));
            }
        });
        // In flight: one add and one carried word of each adder, and one word of the folder.
        let near = possible_cpus() as i64 * (i64::from(batch) - 1);
        let flight = (THREADS + 1) * (LARGEST + i64::from(batch) - 1);
        while keep_running(until, || ended.load(SeqCst) > ENOUGH) {
            let least = ended.load(SeqCst);
            let seen = counter.approximate();
            let most = begun.load(SeqCst);
            assert!(least - near - flight <= seen && seen <= most + near + flight);
            thread::sleep(Duration::from_micros(100));
        }
        stop.store(true, Relaxed);
    });
    let sum = ended.into_inner();
    assert!(sum > ENOUGH, "{sum}");
    assert_eq!(counter.sum(), sum);
    assert!((sum - counter.approximate()).abs() <= possible_cpus() as i64 * i64::from(batch));
    for cpu in all_cpus() {
        counter.fold(cpu);
        assert_eq!(counter.sum(), sum);
    }
    assert_eq!(counter.approximate(), sum, "every word was folded");
}

#[test]
fn inv03_sums_are_exact_under_migration() {
    hop_and_count(until(false), 256);
}

#[test]
#[ignore = "stress: seconds of hopping"]
fn stress_inv03_sums_are_exact_under_migration() {
    for batch in [2, 256] {
        hop_and_count(until(true), batch);
    }
}

#[test]
#[ignore = "stress: seconds of hopping"]
fn stress_inv04_the_error_stays_within_the_bound() {
    hop_and_count(until(true), 1_000);
}

#[test]
fn inv06_folding_on_a_live_counter_changes_no_sum() {
    hop_and_count(until(false), 3);
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

/// The seed inputs of the fuzzer and those that it added.
#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/percpu_ops");
    testkit::corpus::replay(corpus, 19, 800, crate::model::run);
}

proptest! {
    #[test]
    fn random_operations_agree_with_the_model(input in prop::collection::vec(any::<u8>(), 0..600)) {
        crate::model::run(&input);
    }
}
