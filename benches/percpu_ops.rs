//! percpu, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench percpu_ops                 all groups
//! cargo bench --bench percpu_ops -- current_cpu  one group
//! ```

use std::cell::Cell;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

thread_local! {
    /// What a program does that gives each thread a number instead of asking for its CPU.
    static SLOT: Cell<usize> = const { Cell::new(0) };
}

/// Which CPU am I on?
fn current_cpu(c: &mut Criterion) {
    harness::pin(harness::allowed_cpus().expect("CPUs")[0]).expect("an allowed CPU");
    eprintln!("percpu: {}", percpu::backend());
    let mut group = c.benchmark_group("current_cpu");
    group.bench_function(BenchmarkId::new("percpu", 1), |b| {
        b.iter(|| black_box(percpu::current_cpu()));
    });
    group.bench_function(BenchmarkId::new("sched_getcpu", 1), |b| {
        // SAFETY: the call takes no argument and reads no memory of ours.
        b.iter(|| black_box(unsafe { libc::sched_getcpu() }));
    });
    group.bench_function(BenchmarkId::new("const-thread-local", 1), |b| {
        SLOT.set(black_box(1)); // not a constant that the optimiser could carry to the read
        b.iter(|| black_box(SLOT.get()));
    });
    group.finish();
}

criterion_group!(ops, current_cpu);
criterion_main!(ops);
