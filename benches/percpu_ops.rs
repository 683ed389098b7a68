//! percpu, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench percpu_ops                 all groups
//! cargo bench --bench percpu_ops -- current_cpu  one group
//! ```
//!
//! One thread, on one CPU: the cost of an operation without contention. The rows
//! that decide a target, and those with two threads, are in `cargo bench --bench percpu`.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use crossbeam_utils::CachePadded;
use crossbeam_utils::sync::ShardedLock;
use offlock_percpu::{LgLock, PerCpuCounter, PercpuRef, rcu};
use parking_lot::Mutex;

/// Why no lock here is refused.
const FREE: &str = "no thread panics or locks twice";

thread_local! {
    /// What a program does that gives each thread a number instead of asking for its CPU.
    static SLOT: Cell<usize> = const { Cell::new(0) };
}

/// One row: `operation` over and over, called `name` with one thread.
macro_rules! row {
    ($group:ident, $name:literal, $operation:expr) => {
        $group.bench_function(BenchmarkId::new($name, 1), |b| b.iter(|| $operation));
    };
}

/// Which CPU am I on?
fn current_cpu(c: &mut Criterion) {
    let mut group = c.benchmark_group("current_cpu");
    row!(group, "percpu", black_box(offlock_percpu::current_cpu()));
    // SAFETY: the call takes no argument and reads no memory of ours.
    row!(group, "sched_getcpu", black_box(unsafe { libc::sched_getcpu() }));
    SLOT.set(black_box(1)); // not a constant that the optimiser could carry to the read
    row!(group, "const-thread-local", black_box(SLOT.get()));
    group.finish();
}

/// Adding one.
fn counter(c: &mut Criterion) {
    let ours = PerCpuCounter::new();
    let word = CachePadded::new(AtomicU64::new(0));
    let mut group = c.benchmark_group("counter");
    row!(group, "percpu", ours.add(1));
    // Ordering: Relaxed; a counter, it publishes nothing.
    row!(group, "fetch_add", word.fetch_add(1, Ordering::Relaxed));
    group.finish();
}

/// Taking a reference and putting it.
fn reference(c: &mut Criterion) {
    let ours = PercpuRef::new(|| {});
    let arc = Arc::new(0_u64);
    let mut group = c.benchmark_group("reference");
    row!(group, "percpu", drop(black_box(ours.try_get())));
    row!(group, "arc", drop(black_box(Arc::clone(&arc))));
    group.finish();
}

/// Locking and unlocking.
fn lock(c: &mut Criterion) {
    let plain = LgLock::new(|_| 0_u64);
    let parking_lot = Mutex::new(0_u64);
    let std = StdMutex::new(0_u64);
    let spin = spin::Mutex::<u64>::new(0);
    let sharded = ShardedLock::new(0_u64);
    let mut group = c.benchmark_group("lock");
    row!(group, "percpu-plain", *plain.local().expect(FREE) += 1);
    row!(group, "percpu-plain-global", drop(black_box(plain.global().expect(FREE))));
    row!(group, "parking_lot", *parking_lot.lock() += 1);
    row!(group, "std", *std.lock().expect(FREE) += 1);
    row!(group, "spin", *spin.lock() += 1);
    row!(group, "sharded-read", black_box(*sharded.read().expect(FREE)));
    group.finish();
}

/// Entering a read-side section and leaving it.
fn pin(c: &mut Criterion) {
    let seize = seize::Collector::new();
    let mut group = c.benchmark_group("pin");
    row!(group, "percpu", drop(black_box(rcu::pin())));
    row!(group, "crossbeam-epoch", drop(black_box(crossbeam_epoch::pin())));
    row!(group, "seize", drop(black_box(seize.enter())));
    group.finish();
}

fn on_one_cpu() -> Criterion {
    harness::pin(harness::allowed_cpus().expect("CPUs")[0]).expect("an allowed CPU");
    eprintln!("percpu: {}", offlock_percpu::capabilities());
    Criterion::default()
}

criterion_group! {
    name = ops;
    config = on_one_cpu();
    targets = current_cpu, counter, reference, lock, pin
}
criterion_main!(ops);
