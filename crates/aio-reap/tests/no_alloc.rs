//! A warm engine does not allocate per request, on every real backend and the simulated one, with
//! every front end.
//!
//! The program has only one test, because the allocator counts every thread.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use aio_reap::{AlignedBuf, BackendKind, CompletionQueue, Engine, File};
use aio_reap_test::Build;
use aio_reap_test::sim::{Model, Sim};
use testkit::alloc::{CountingAllocator, counted};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: usize = 8;
const ROUNDS: usize = 300;

/// The buffers of one round. Every front end returns them.
struct Bench {
    engine: Rc<Engine>,
    file: File,
    queue: CompletionQueue<AlignedBuf>,
    spare: Vec<AlignedBuf>,
}

impl Bench {
    fn take(&mut self) -> AlignedBuf {
        self.spare.pop().expect("the last round gave them back")
    }

    /// Sends a full batch through the queue.
    fn queue_round(&mut self) {
        let engine = Rc::clone(&self.engine);
        let plug = engine.plug();
        for block in 0..DEPTH as u64 {
            let buf = self.take();
            engine.write(&self.file, buf, block * 4096).enqueue(&self.queue, block).unwrap();
        }
        drop(plug);
        engine.drain().unwrap();
        while let Some(done) = self.queue.pop() {
            done.result.unwrap();
            self.spare.push(done.buf);
        }
    }

    /// Sends a full batch with callbacks, each of which makes another request.
    fn callback_round(&mut self) {
        let returned: Rc<Cell<Vec<AlignedBuf>>> = RETURNED.with(Rc::clone);
        let engine = Rc::clone(&self.engine);
        let plug = engine.plug();
        for block in 0..DEPTH as u64 {
            let buf = self.take();
            let (returned, again) = (Rc::clone(&returned), Rc::clone(&engine));
            let done = move |result: Result<usize, aio_reap::RequestError>, buf| {
                result.unwrap();
                let mut list = returned.take();
                list.push(buf);
                returned.set(list);
                again.nop().callback(|result, ()| assert!(result.is_ok())).unwrap();
            };
            engine.read(&self.file, buf, block * 4096).zero_fill().callback(done).unwrap();
        }
        drop(plug);
        engine.drain().unwrap();
        let mut list = returned.take();
        self.spare.append(&mut list);
        returned.set(list);
    }

    /// Sends futures, of which half are waited for and half awaited (`block_on` may allocate once
    /// per call).
    fn future_round(&mut self) -> u64 {
        let engine = Rc::clone(&self.engine);
        for block in 0..DEPTH as u64 / 2 {
            let buf = self.take();
            let write = engine.write(&self.file, buf, block * 4096).submit().unwrap();
            let (result, buf) = write.wait();
            result.unwrap();
            self.spare.push(buf);
            engine.fdatasync(&self.file).submit().unwrap().wait().0.unwrap();
        }
        let buf = self.take();
        let mut read = engine.read(&self.file, buf, 0).submit().unwrap();
        let poll = poll_fn(|context| match Pin::new(&mut read).poll(context) {
            Poll::Ready((result, buf)) => {
                result.unwrap();
                Poll::Ready(buf)
            }
            Poll::Pending => Poll::Pending,
        });
        self.spare.push(engine.block_on(poll).unwrap());
        2 // the waker and its handle
    }
}

thread_local! {
    static RETURNED: Rc<Cell<Vec<AlignedBuf>>> = Rc::new(Cell::new(Vec::with_capacity(DEPTH)));
}

#[test]
fn no_allocation_per_request_after_warm_up() {
    for kind in [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads, BackendKind::External]
    {
        let builder = Engine::builder().depth(DEPTH);
        let started = match kind {
            BackendKind::External => builder.build_sim(&Sim::new(Model::default(), 0)),
            _ => builder.backend(kind).build(),
        };
        let engine = match started {
            Ok(engine) => Rc::new(engine),
            Err(error) if matches!(kind, BackendKind::Uring | BackendKind::Aio) => {
                assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "{error}");
                eprintln!("skipped: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for direct in [false, true] {
            use std::os::unix::fs::OpenOptionsExt;
            let flags = if direct { libc::O_DIRECT } else { 0 };
            let mut options = std::fs::OpenOptions::new();
            let opened = options.read(true).write(true).custom_flags(flags).open(temp.path());
            let Ok(opened) = opened else { continue }; // the file system has no O_DIRECT
            let mut bench = Bench {
                file: engine.attach(opened).unwrap(),
                engine: Rc::clone(&engine),
                queue: CompletionQueue::new(),
                spare: (0..DEPTH).map(|_| AlignedBuf::zeroed(4096, 4096)).collect(),
            };
            // Warm-up: queues grow, threads start.
            for _ in 0..20 {
                bench.queue_round();
                bench.callback_round();
                bench.future_round();
            }
            let (mut allowed, made) = counted(|| {
                let mut allowed = 0;
                for _ in 0..ROUNDS {
                    bench.queue_round();
                    bench.callback_round();
                    allowed += bench.future_round();
                }
                allowed
            });
            let made = made.allocations;
            // The table of parking_lot grows if more workers sleep than ever before.
            allowed += 4;
            assert!(
                made <= allowed,
                "{kind}, direct {direct}: {made} allocations, {allowed} known"
            );
        }
    }
    // The main thread of the test harness may allocate meanwhile, but not each time.
    let one = || counted(|| drop(std::hint::black_box(vec![0_u8; 1]))).1.allocations;
    assert!((0..4).any(|_| one() == 1), "the allocator counts");
}
