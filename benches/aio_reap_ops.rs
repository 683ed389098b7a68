//! aio-reap, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench aio_reap_ops               all groups
//! cargo bench --bench aio_reap_ops -- nop_batch8 one group
//! ```
//!
//! A NOP goes to the kernel and comes back: what is left is the cost of the engine. A group submits
//! that many at once and waits for all of them; `elem/s` counts NOPs.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;

use aio_reap::{BackendKind, CompletionQueue, Engine, Operation};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use io_uring::{IoUring, opcode};

/// Slots of every engine and ring here; the largest batch fits.
const DEPTH: usize = 128;

fn nop(c: &mut Criterion) {
    harness::pin(harness::allowed_cpus().expect("CPUs")[0]).expect("an allowed CPU");
    // The refusal of a container, or of the kernel: every row here needs io_uring.
    let engine = match Engine::builder().backend(BackendKind::Uring).depth(DEPTH).build() {
        Ok(engine) => engine,
        Err(error) => {
            println!("aio_reap_ops: not measured: {error}");
            return;
        }
    };
    let mut ring = raw_ring();
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
            b.iter(|| awaited(&engine, &mut operations, batch));
        });
        group.finish();
    }
}

/// The peer, with the flags that the engine asks for where the kernel knows them.
fn raw_ring() -> IoUring {
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer().setup_submit_all();
    let ring = builder.build(DEPTH as u32).or_else(|_| IoUring::new(DEPTH as u32));
    ring.expect("the engine has an io_uring, so a second one works")
}

fn raw(ring: &mut IoUring, batch: usize) {
    let mut queue = ring.submission();
    for token in 0..batch as u64 {
        let entry = opcode::Nop::new().build().user_data(token);
        // SAFETY: a NOP refers to no buffer and no descriptor.
        unsafe { queue.push(&entry) }.expect("the ring is empty and a batch fits");
    }
    drop(queue);
    ring.submit().expect("submit");
    let mut done = 0;
    loop {
        for completion in ring.completion() {
            black_box((completion.user_data(), completion.result()));
            done += 1;
        }
        if done == batch {
            return;
        }
        ring.submit_and_wait(1).expect("wait");
    }
}

fn queued(engine: &Engine, queue: &CompletionQueue<()>, batch: usize) {
    let plug = engine.plug();
    for token in 0..batch as u64 {
        engine.nop().enqueue(queue, token).expect("a slot");
    }
    drop(plug);
    let mut done = 0;
    loop {
        while let Some(completion) = queue.pop() {
            black_box((completion.token, completion.result.expect("a NOP")));
            done += 1;
        }
        if done == batch {
            return;
        }
        engine.wait(None).expect("wait");
    }
}

fn called_back(engine: &Engine, done: &Rc<Cell<usize>>, batch: usize) {
    done.set(0);
    let plug = engine.plug();
    for _ in 0..batch {
        let done = Rc::clone(done);
        let count = move |result: std::io::Result<usize>, ()| {
            black_box(result.expect("a NOP"));
            done.set(done.get() + 1);
        };
        engine.nop().callback(count).expect("a slot");
    }
    drop(plug);
    while done.get() < batch {
        engine.wait(None).expect("wait");
    }
}

fn awaited(engine: &Engine, operations: &mut Vec<Operation<()>>, batch: usize) {
    let plug = engine.plug();
    for _ in 0..batch {
        operations.push(engine.nop().submit().expect("a slot"));
    }
    drop(plug);
    let all = async {
        for operation in operations.drain(..) {
            black_box(operation.await.0.expect("a NOP"));
        }
    };
    engine.block_on(all).expect("wait");
}

criterion_group!(ops, nop);
criterion_main!(ops);
