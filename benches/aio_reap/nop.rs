//! A1: NOPs to the kernel and back, which leaves the cost of the engine itself.
//!
//! One operation of a row is a batch: that many are submitted at once, and all are waited for.

use std::cell::Cell;
use std::rc::Rc;

use aio_reap::{BackendKind, CompletionQueue, Engine};
use harness::{Case, Group, Plan, Report, Rounds};

use crate::nops::{awaited, called_back, queued, raw, ring};

/// Slots of every engine and ring; the largest batch fits.
const DEPTH: usize = 128;
const BATCHES: [usize; 4] = [1, 8, 32, 128];

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    // The refusal of a container, or of the kernel: every row here needs io_uring.
    if let Err(error) = build() {
        println!("# not measured: {error}");
        return;
    }
    let (mut callback, mut future) = (Vec::new(), Vec::new());
    for batch in BATCHES {
        let rounds = measure(plan, batch);
        report.show(&rounds);
        report.against(&rounds, "aio-reap queue", 1, &["io-uring"]);
        let ratio = rounds.time_ratio("aio-reap queue", "io-uring");
        report.record(&format!("A1.raw@{batch}"), ratio);
        callback.push(added(&rounds, "aio-reap callback/1", batch));
        future.push(added(&rounds, "aio-reap future/1", batch));
        let ns = |added: Option<&Option<f64>>| added.copied().flatten().unwrap_or(f64::NAN);
        let (by_callback, by_future) = (ns(callback.last()), ns(future.last()));
        println!("- added for each NOP: {by_callback:.1} ns by callback, {by_future:.1} by future");
    }
    report.record("A1.callback.ns", worst(&callback));
    report.record("A1.future.ns", worst(&future));
}

fn build() -> Result<Engine, aio_reap::StartError> {
    Engine::builder().backend(BackendKind::Uring).depth(DEPTH).build()
}

fn engine() -> Engine {
    build().expect("it could be built before")
}

fn measure(plan: &Plan, batch: usize) -> Rounds {
    Group::new(&format!("NOP, {batch} at once"))
        .case(Case::new("io-uring", 1, |_| {
            let mut ring = ring(DEPTH).expect("the engine has an io_uring");
            move |_| raw(&mut ring, batch)
        }))
        .case(Case::new("aio-reap queue", 1, |_| {
            let (engine, queue) = (engine(), CompletionQueue::new());
            move |_| queued(&engine, &queue, batch)
        }))
        .case(Case::new("aio-reap callback", 1, |_| {
            let (engine, done) = (engine(), Rc::new(Cell::new(0)));
            move |_| called_back(&engine, &done, batch)
        }))
        .case(Case::batched("aio-reap future", 1, |_| {
            let (engine, mut operations) = (engine(), Vec::with_capacity(batch));
            move |batches| awaited(&engine, &mut operations, batch, batches)
        }))
        .run(plan)
}

/// Nanoseconds that a row takes for each NOP beyond the queue's, from the ratio of each round.
fn added(rounds: &Rounds, row: &str, batch: usize) -> Option<f64> {
    let queue = "aio-reap queue/1";
    let ns = 1e9 / rounds.throughput(queue)? / batch as f64;
    Some((rounds.time_ratio(row, queue)?.median - 1.0) * ns)
}

/// The largest; none if one was not measured.
fn worst(values: &[Option<f64>]) -> Option<f64> {
    let all: Option<Vec<f64>> = values.iter().copied().collect();
    all?.into_iter().reduce(f64::max)
}
