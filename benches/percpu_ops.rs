//! percpu, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench percpu_ops                 all groups
//! cargo bench --bench percpu_ops -- current_cpu  one group
//! ```
//!
//! One thread, on one CPU: the cost of an operation without contention. The rows that decide a target, and
//! those with two threads, are in `cargo bench --bench percpu`.

mod ops;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{Criterion, criterion_group, criterion_main};
use offlock_percpu::{LgLock, PerCpuCounter, PercpuRef, rcu};
use parking_lot::Mutex;

use self::ops::{on_one_cpu, row};

/// The message of `expect`: no lock is refused.
const FREE: &str = "no thread panics or locks twice";

fn current_cpu(c: &mut Criterion) {
    let mut group = c.benchmark_group("current_cpu");
    row!(group, "percpu", black_box(offlock_percpu::current_cpu()));
    // SAFETY: the call takes no argument and reads no memory of ours.
    row!(group, "sched_getcpu", black_box(unsafe { libc::sched_getcpu() }));
    group.finish();
}

/// Adding one.
fn counter(c: &mut Criterion) {
    let (ours, word) = (PerCpuCounter::new(), AtomicU64::new(0));
    let mut group = c.benchmark_group("counter");
    row!(group, "percpu", ours.add(1));
    // Ordering: Relaxed; a counter, it publishes nothing.
    row!(group, "fetch_add", word.fetch_add(1, Ordering::Relaxed));
    group.finish();
}

/// Taking a reference and putting it.
fn reference(c: &mut Criterion) {
    let (ours, arc) = (PercpuRef::new(|| {}), Arc::new(0_u64));
    let mut group = c.benchmark_group("reference");
    row!(group, "percpu", drop(black_box(ours.try_get())));
    row!(group, "arc", drop(black_box(Arc::clone(&arc))));
    group.finish();
}

/// Locking and unlocking.
fn lock(c: &mut Criterion) {
    let (ours, parking_lot) = (LgLock::new(|_| 0_u64), Mutex::new(0_u64));
    let mut group = c.benchmark_group("lock");
    row!(group, "percpu-local", *ours.local().expect(FREE) += 1);
    row!(group, "percpu-global", drop(black_box(ours.global().expect(FREE))));
    row!(group, "parking_lot", *parking_lot.lock() += 1);
    group.finish();
}

/// Entering a read-side section and leaving it.
fn pin(c: &mut Criterion) {
    let mut group = c.benchmark_group("pin");
    row!(group, "percpu", drop(black_box(rcu::pin())));
    row!(group, "crossbeam-epoch", drop(black_box(crossbeam_epoch::pin())));
    group.finish();
}

criterion_group! {
    name = groups;
    config = on_one_cpu();
    targets = current_cpu, counter, reference, lock, pin
}
criterion_main!(groups);
