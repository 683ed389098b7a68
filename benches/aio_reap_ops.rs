//! aio-reap, operation by operation, with criterion's report in `target/criterion`:
//! `cargo bench --bench aio_reap_ops -- nop_batch8`.
//!
//! A NOP goes to the kernel and comes back: what is left is the cost of the engine. A group submits
//! that many at once and waits for all of them; `elem/s` counts NOPs.

#[path = "aio_reap/nops.rs"]
mod nops;

use std::cell::Cell;
use std::rc::Rc;

use aio_reap::{BackendKind, CompletionQueue, Engine};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use nops::{awaited, called_back, queued, raw, ring};

/// Slots of every engine and ring here; the largest batch fits.
const DEPTH: usize = 128;

fn nop(c: &mut Criterion) {
    harness::pin(harness::allowed_cpus()[0]);
    // The refusal of a container, or of the kernel: every row here needs io_uring.
    let engine = match Engine::builder().backend(BackendKind::Uring).depth(DEPTH).build() {
        Ok(engine) => engine,
        Err(error) => {
            println!("aio_reap_ops: not measured: {error}");
            return;
        }
    };
    let mut ring = ring(DEPTH).expect("the engine has an io_uring, so a second one works");
    for batch in [1, 8, 32, 128] {
        let mut group = c.benchmark_group(format!("nop_batch{batch}"));
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::new("io-uring", 1), |b| {
            b.iter(|| raw(&mut ring, batch));
        });
        let queue = CompletionQueue::new();
        group.bench_function(BenchmarkId::new("aio-reap-queue", 1), |b| {
            b.iter(|| queued(&engine, &queue, batch));
        });
        let done = Rc::new(Cell::new(0));
        group.bench_function(BenchmarkId::new("aio-reap-callback", 1), |b| {
            b.iter(|| called_back(&engine, &done, batch));
        });
        let mut operations = Vec::with_capacity(batch);
        group.bench_function(BenchmarkId::new("aio-reap-future", 1), |b| {
            b.iter(|| awaited(&engine, &mut operations, batch, 1));
        });
        group.finish();
    }
}

criterion_group!(ops, nop);
criterion_main!(ops);
