//! A warm engine does not allocate per request: for vectors, deadlines, and waits for a
//! slot, on every real backend.
//!
//! The program has only one test, because the allocator counts every thread.
#![cfg(not(offlock_model))]

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use aio_reap::{BufList, Engine, File, IoPath};
use common::on_every_backend;
use testkit::alloc::{CountingAllocator, counted};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const WARM_UP: usize = 40;
const ROUNDS: usize = 300;
const FAR: Duration = Duration::from_secs(3600);
/// The number of late allocations that are allowed: a queue that is longer than ever, or one more
/// thread that sleeps.
const LATE: u64 = 4;

fn poll<F: Future>(future: Pin<&mut F>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Runs `round` until the engine is warm, and then counts allocations.
fn count(engine: &Engine, what: &str, mut round: impl FnMut()) {
    (0..WARM_UP).for_each(|_| round());
    let ((), made) = counted(|| (0..ROUNDS).for_each(|_| round()));
    let made = made.allocations;
    assert!(made <= LATE, "{what} on {}: {made} allocations in {ROUNDS} rounds", engine.backend());
}

fn vectors(engine: &Engine, file: &File) {
    let mut list = Some(BufList::new(vec![vec![1; 100], vec![2; 4000]]).unwrap());
    count(engine, "vectors", || {
        let write = engine.write_vectored(file, list.take().unwrap(), 0).submit().unwrap();
        let (written, bufs) = write.wait();
        let (read, bufs) = engine.read_vectored(file, bufs, 0).submit().unwrap().wait();
        assert_eq!((written.unwrap(), read.unwrap()), (4100, 4100));
        list = Some(bufs);
    });
}

fn stats_by_name(engine: &Engine) {
    let mut path = Some(IoPath::from("/"));
    count(engine, "stat", || {
        let (stat, back) = engine.stat(path.take().unwrap()).submit().unwrap().wait();
        assert!(stat.unwrap().is_dir());
        path = Some(back);
    });
}

fn deadlines(engine: &Engine) {
    count(engine, "deadlines", || {
        let far = Instant::now() + FAR;
        engine.nop().cancel_at(far).submit().unwrap().wait().0.unwrap();
        let mut op = pin!(engine.nop().submit().unwrap());
        while !poll(op.as_mut()) {
            engine.wait(Some(FAR)).unwrap();
        }
        // A deadline that passes.
        let late = engine.nop().cancel_at(Instant::now()).submit().unwrap();
        _ = late.wait();
    });
}

/// All slots are taken, and one more request waits.
fn waits_for_slots(engine: &Engine, capacity: usize) {
    let mut taken = Vec::with_capacity(capacity);
    count(engine, "waits", || {
        let plug = engine.plug();
        (0..capacity).for_each(|_| taken.push(engine.nop().submit().unwrap()));
        let mut next = pin!(engine.nop().submit_async());
        assert!(!poll(next.as_mut()));
        drop(plug);
        taken.drain(..).for_each(|op| assert_eq!(op.wait().0.unwrap(), 0));
        assert!(poll(next.as_mut()));
        engine.drain().unwrap();
    });
}

#[test]
fn inv17_no_allocation_per_request_of_any_kind_after_warm_up() {
    on_every_backend(|engine| {
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        // This burst starts every thread of the pool.
        let plug = engine.plug();
        let burst = [(); 64].map(|()| engine.fdatasync(&file).submit().unwrap());
        drop(plug);
        burst.into_iter().for_each(|op| assert_eq!(op.wait().0.unwrap(), 0));
        vectors(engine, &file);
        stats_by_name(engine);
        deadlines(engine);
        waits_for_slots(engine, 64); // the capacity that `on_every_backend` sets
    });
    // The main thread of the test harness may allocate meanwhile, but not each time.
    let one = || counted(|| drop(std::hint::black_box(vec![0_u8; 1]))).1.allocations;
    assert!((0..4).any(|_| one() == 1), "the allocator counts");
}
