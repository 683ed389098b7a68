//! The common part of the criterion benches of the crates: one thread, on one CPU, in groups of rows.

use criterion::Criterion;

/// Measures a group of rows, each of which is an operation over and over.
macro_rules! group {
    ($c:ident, $name:literal, $($row:literal => $operation:expr),+ $(,)?) => {
        let mut group = $c.benchmark_group($name);
        $(
            let row = criterion::BenchmarkId::new($row, 1);
            group.bench_function(row, |b| b.iter(|| $operation));
        )+
        group.finish();
    };
}
pub(crate) use group;

/// Keeps the bench on one CPU.
pub(crate) fn on_one_cpu() -> Criterion {
    harness::pin(harness::allowed_cpus()[0]);
    eprintln!("percpu: {}", offlock_percpu::capabilities());
    Criterion::default()
}
