//! A warm engine does not allocate per request: with every front end, on every real backend and the
//! simulated one; and for vectors, paths, deadlines, and waits for a slot.
//!
//! The program has only one test, because the allocator counts every thread.
#![cfg(not(offlock_model))]

mod common;
#[path = "common/direct.rs"]
mod direct;

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use aio_reap::{AlignedBuf, BackendKind, BufList, CompletionQueue, Engine, File, IoPath};
use aio_reap_test::Build;
use aio_reap_test::sim::{Model, Sim};
use common::{engines, small};
use direct::direct_file;
use testkit::alloc::{CountingAllocator, counted};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const WARM_UP: usize = 40;
const ROUNDS: usize = 300;
/// The requests of a batch.
const BATCH: u64 = 8;
const FAR: Duration = Duration::from_secs(3600);
/// The number of late allocations that are allowed: a queue that is longer than ever, or one more
/// thread that sleeps.
const LATE: u64 = 4;

fn poll<F: Future>(future: Pin<&mut F>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Runs `round` until the engine is warm, and then counts allocations. A round may make `known` ones.
fn count(engine: &Engine, what: &str, known: u64, mut round: impl FnMut()) {
    (0..WARM_UP).for_each(|_| round());
    let ((), made) = counted(|| (0..ROUNDS).for_each(|_| round()));
    let (made, allowed) = (made.allocations, LATE + known * ROUNDS as u64);
    assert!(
        made <= allowed,
        "{what} on {}: {made} allocations in {ROUNDS} rounds",
        engine.backend()
    );
}

/// The buffers of one batch. Every front end returns them.
fn buffers() -> Vec<AlignedBuf> {
    (0..BATCH).map(|_| AlignedBuf::zeroed(4096, 4096)).collect()
}

fn queues(engine: &Engine, file: &File) {
    let (queue, mut spare) = (CompletionQueue::new(), buffers());
    count(engine, "a queue", 0, || {
        let plug = engine.plug();
        for block in 0..BATCH {
            let write = engine.write(file, spare.pop().unwrap(), block * 4096);
            write.enqueue(&queue, block).unwrap();
        }
        drop(plug);
        engine.drain().unwrap();
        while let Some(done) = queue.pop() {
            done.result.unwrap();
            spare.push(done.buf);
        }
    });
}

/// Each callback makes another request.
fn callbacks(engine: &Rc<Engine>, file: &File) {
    let spare = Rc::new(RefCell::new(buffers()));
    count(engine, "callbacks", 0, || {
        let plug = engine.plug();
        for block in 0..BATCH {
            let (returned, again) = (Rc::clone(&spare), Rc::clone(engine));
            let done = move |result: Result<usize, aio_reap::RequestError>, buf| {
                result.unwrap();
                returned.borrow_mut().push(buf);
                again.nop().callback(|result, ()| assert!(result.is_ok())).unwrap();
            };
            let buf = spare.borrow_mut().pop().unwrap();
            engine.read(file, buf, block * 4096).zero_fill().callback(done).unwrap();
        }
        drop(plug);
        engine.drain().unwrap();
    });
}

/// Operations, of which one is awaited: `block_on` allocates a waker and its handle.
fn futures(engine: &Engine, file: &File) {
    let mut spare = buffers();
    count(engine, "futures", 2, || {
        for block in 0..BATCH / 2 {
            let write = engine.write(file, spare.pop().unwrap(), block * 4096).submit().unwrap();
            let (result, buf) = write.wait();
            result.unwrap();
            spare.push(buf);
            engine.fdatasync(file).submit().unwrap().wait().0.unwrap();
        }
        let read = engine.read(file, spare.pop().unwrap(), 0).submit().unwrap();
        let (result, buf) = engine.block_on(read).unwrap();
        result.unwrap();
        spare.push(buf);
    });
}

fn vectors(engine: &Engine, file: &File) {
    let mut list = Some(BufList::new(vec![vec![1; 100], vec![2; 4000]]).unwrap());
    count(engine, "vectors", 0, || {
        let write = engine.write_vectored(file, list.take().unwrap(), 0).submit().unwrap();
        let (written, bufs) = write.wait();
        let (read, bufs) = engine.read_vectored(file, bufs, 0).submit().unwrap().wait();
        assert_eq!((written.unwrap(), read.unwrap()), (4100, 4100));
        list = Some(bufs);
    });
}

fn stats_by_name(engine: &Engine) {
    let mut path = Some(IoPath::from("/"));
    count(engine, "stat", 0, || {
        let (stat, back) = engine.stat(path.take().unwrap()).submit().unwrap().wait();
        assert!(stat.unwrap().is_dir());
        path = Some(back);
    });
}

fn deadlines(engine: &Engine) {
    count(engine, "deadlines", 0, || {
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
    count(engine, "waits", 0, || {
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
fn inv17_no_allocation_per_request_after_warm_up() {
    let simulated = small().build_sim(&Sim::new(Model::default(), 0)).unwrap();
    for engine in engines(small()).chain([simulated]) {
        let engine = Rc::new(engine);
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        // This burst starts every thread of the pool.
        let plug = engine.plug();
        let burst = [(); 64].map(|()| engine.fdatasync(&file).submit().unwrap());
        drop(plug);
        burst.into_iter().for_each(|op| assert_eq!(op.wait().0.unwrap(), 0));
        let direct = direct_file(&engine).map(|(_temp, file)| file);
        for file in [&file].into_iter().chain(&direct) {
            queues(&engine, file);
            callbacks(&engine, file);
            futures(&engine, file);
        }
        if engine.backend() != BackendKind::External {
            vectors(&engine, &file);
            stats_by_name(&engine);
            deadlines(&engine);
            waits_for_slots(&engine, 64); // the capacity of `small`
        }
    }
    // The main thread of the test harness may allocate meanwhile, but not each time.
    let one = || counted(|| drop(std::hint::black_box(vec![0_u8; 1]))).1.allocations;
    assert!((0..4).any(|_| one() == 1), "the allocator counts");
}
