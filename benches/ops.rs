//! The common part of the criterion benches of the crates.

use criterion::Criterion;

/// Adds a row: `operation` over and over, called `name` with one thread.
macro_rules! row {
    ($group:ident, $name:literal, $operation:expr) => {
        $group.bench_function(criterion::BenchmarkId::new($name, 1), |b| b.iter(|| $operation));
    };
}
pub(crate) use row;

/// Keeps the bench on one CPU.
pub(crate) fn on_one_cpu() -> Criterion {
    harness::pin(harness::allowed_cpus()[0]);
    eprintln!("percpu: {}", offlock_percpu::capabilities());
    Criterion::default()
}
