//! Requests of other threads are performed once and answered once.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::common;
use crate::counted;
use crate::direct_file as direct;
use crate::readable;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use aio_reap::{
    AlignedBuf, AllocateMode, BufList, Engine, Remote, RemoteOperation, RemoteRequest, SharedFile,
    SubmitError,
};
use aio_reap_test::Build;
use aio_reap_test::scripted::{Script, SubmitStep};
use common::on_every_backend;
use counted::Counted;
use direct::direct_file;
use readable::readable;
use testkit::block_on;

const SHORT: Duration = Duration::from_millis(20);

fn scripted(depth: usize, capacity: usize, remote_capacity: usize) -> (Engine, Script) {
    let script = Script::new();
    let builder =
        Engine::builder().depth(depth).capacity(capacity).remote_capacity(remote_capacity);
    (builder.build_scripted(&script).unwrap(), script)
}

fn shared_file() -> SharedFile {
    SharedFile::new(tempfile::tempfile().unwrap()).unwrap()
}

/// Runs `work` on another thread while the engine serves.
fn beside<T: Send + 'static>(
    engine: &Engine,
    work: impl FnOnce(Remote) -> T + Send + 'static,
) -> T {
    let remote = engine.remote();
    let worker = thread::spawn(move || work(remote));
    engine.serve().unwrap();
    worker.join().unwrap()
}

#[test]
fn handles_may_go_to_other_threads() {
    fn shareable<T: Send + Sync>() {}
    fn movable<T: Send>() {}
    shareable::<Remote>();
    shareable::<SharedFile>();
    shareable::<RemoteRequest<'_, Vec<u8>>>();
    shareable::<RemoteOperation<Vec<u8>>>();
    movable::<RemoteOperation<Cell<u8>>>();
}

/// Every operation on every backend, by `wait` and by `await`.
#[test]
fn inv15_remote_requests_do_the_same_everywhere() {
    on_every_backend(|engine| {
        beside(engine, |remote| {
            let file = shared_file();
            let write = remote.write(&file, vec![7; 10_000], 0).submit().unwrap();
            assert_eq!(write.wait().0.unwrap(), 10_000);
            let read = remote.read(&file, vec![1; 8], 9_996).submit().unwrap();
            assert_eq!(block_on(read).1, [7, 7, 7, 7, 1, 1, 1, 1]);
            let (read, buf) =
                remote.read(&file, vec![1; 8], 9_996).zero_fill().submit().unwrap().wait();
            assert_eq!((read.unwrap(), buf), (8, vec![7, 7, 7, 7, 0, 0, 0, 0]));
            let (read, _) = remote.read_exact(&file, vec![1; 8], 9_996).submit().unwrap().wait();
            assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
            for sync in [remote.fsync(&file), remote.fdatasync(&file), remote.nop()] {
                assert_eq!(block_on(sync.submit().unwrap()).0.unwrap(), 0);
            }
            let punch = remote.allocate(&file, AllocateMode::PunchHole, 0, 4096);
            punch.submit().unwrap().wait().0.unwrap();
            let list = BufList::new(vec![vec![1; 4095], vec![2; 3]]).unwrap();
            let (read, list) = remote.read_vectored(&file, list, 1).submit().unwrap().wait();
            assert_eq!(
                (read.unwrap(), &list[0][..], &list[1][..]),
                (4098, &[0; 4095][..], &[7; 3][..])
            );
            let (written, _) = remote.write_vectored(&file, list, 0).submit().unwrap().wait();
            assert_eq!(written.unwrap(), 4098);

            let (send, receive) = mpsc::channel();
            let done = move |result: Result<usize, aio_reap::RequestError>, buf: Vec<u8>| {
                send.send((thread::current().id(), result.unwrap(), buf)).unwrap();
            };
            remote.read(&file, vec![1; 2], 4094).callback(done).unwrap();
            let (ran_on, read, buf) = receive.recv().unwrap();
            assert_eq!((read, buf), (2, vec![0, 7]));
            assert_ne!(ran_on, thread::current().id());
        });
    });
}

/// On files opened with `O_DIRECT` misaligned requests are refused, and the other ones are
/// performed.
#[test]
fn direct_files_are_asked_for_aligned_requests() {
    on_every_backend(|engine| {
        let Some((_temp, local)) = direct_file(engine) else { return };
        let file = SharedFile::new(local.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(file.alignment(), local.alignment());
        beside(engine, move |remote| {
            let refused = remote.write(&file, AlignedBuf::zeroed(100, 4096), 0).submit();
            let Err(SubmitError::Misaligned(request)) = refused else { panic!("{refused:?}") };
            assert_eq!(request.into_buf().len(), 100);
            let buf = AlignedBuf::zeroed(8192, 4096);
            assert_eq!(remote.write(&file, buf, 0).submit().unwrap().wait().0.unwrap(), 8192);
            let list =
                BufList::new(vec![AlignedBuf::zeroed(4096, 4096), AlignedBuf::zeroed(4096, 4096)]);
            let (read, mut list) =
                remote.read_vectored(&file, list.unwrap(), 0).submit().unwrap().wait();
            assert_eq!(read.unwrap(), 8192);
            list[1].set_len(7);
            let refused = remote.read_vectored(&file, list, 0).submit();
            assert!(matches!(refused, Err(SubmitError::Misaligned(_))));
        });
    });
}

/// A request over the remote capacity is refused. The collection of a result makes room.
#[test]
fn inv01_remote_requests_are_bounded() {
    let (engine, script) = scripted(8, 8, 2);
    let remote = engine.remote();
    let mut ops: Vec<_> = (0..2).map(|_| remote.nop().submit().unwrap()).collect();
    let file = shared_file();
    let refused = remote.write(&file, vec![5; 3], 0).submit();
    let Err(SubmitError::Full(request)) = refused else { panic!("{refused:?}") };
    assert_eq!(engine.turn().in_flight, 2);
    script.complete(2);
    engine.turn();
    // The requests are complete but not collected.
    let Err(SubmitError::Full(request)) = request.submit() else { panic!() };
    assert!(ops.iter().all(RemoteOperation::is_done));
    block_on(ops.pop().unwrap()).0.unwrap();
    let write = request.submit().unwrap();
    assert!(matches!(remote.nop().callback(|_, ()| ()), Err(SubmitError::Full(_))));
    drop(ops);
    // A callback's request no longer counts when the callback begins.
    let (inner, called) = (remote.clone(), Arc::new(AtomicU64::new(0)));
    let counter = Arc::clone(&called);
    let again = move |_, ()| {
        counter.fetch_add(1, Ordering::Relaxed);
        let counter = Arc::clone(&counter);
        let count = move |_, ()| _ = counter.fetch_add(1, Ordering::Relaxed);
        inner.nop().callback(count).unwrap();
    };
    remote.nop().callback(again).unwrap();
    engine.turn();
    script.complete(2);
    engine.turn();
    assert_eq!(block_on(write).0.unwrap(), 3);
    engine.turn();
    script.complete(1);
    engine.turn();
    assert_eq!(called.load(Ordering::Relaxed), 2);
    assert!(engine.validate().is_idle());
}

/// The device sees a thread's requests in the order in which they were sent, also across turns and
/// while they wait for slots.
#[test]
fn inv02_requests_of_a_thread_keep_their_order() {
    let (engine, script) = scripted(2, 3, 16);
    let remote = engine.remote();
    let file = shared_file();
    let mut sent = 0;
    for burst in [1, 7, 2, 5] {
        for _ in 0..burst {
            remote.read(&file, vec![0; 1], sent).callback(|_, _| ()).unwrap();
            sent += 1;
        }
        engine.turn();
        script.complete(1);
    }
    while !engine.turn().is_idle() {
        script.complete(2);
    }
    assert_eq!(script.log(), (0..sent).collect::<Vec<_>>());
}

/// A burst notifies once and makes the descriptor readable. After the turn it is not readable.
#[test]
fn inv09_a_burst_notifies_and_one_turn_clears_it() {
    let (engine, script) = scripted(8, 8, 8);
    let remote = engine.remote();
    assert!(!readable(&engine, Duration::ZERO));
    let ops: Vec<_> = (0..5).map(|_| remote.nop().submit().unwrap()).collect();
    assert!(readable(&engine, Duration::ZERO), "no notification");
    assert_eq!(engine.turn().in_flight, 5);
    assert!(!readable(&engine, Duration::ZERO), "a loop would spin");
    script.complete(5);
    assert!(readable(&engine, Duration::ZERO));
    engine.turn();
    assert!(ops.iter().all(RemoteOperation::is_done));
    engine.turn();
    assert!(!readable(&engine, Duration::ZERO));
    // A request that was sent before the descriptor was watched, to an engine that was not turned
    // since.
    let (engine, _script) = scripted(8, 8, 8);
    let op = engine.remote().nop().submit().unwrap();
    assert!(readable(&engine, Duration::ZERO));
    drop(op);
}

/// Remote requests and futures get slots in the order in which they came, and a slot that is freed
/// for one makes the descriptor readable.
#[test]
fn remote_requests_and_futures_get_slots_in_order() {
    let (engine, script) = scripted(2, 2, 8);
    let remote = engine.remote();
    assert!(!readable(&engine, Duration::ZERO)); // watched from here on
    let mut taken: Vec<_> = (0..2).map(|_| engine.nop().submit().unwrap()).collect();
    type Task<'e> = Option<Pin<Box<dyn Future<Output = ()> + 'e>>>;
    let poll = |task: &mut Task| {
        let Some(future) = task else { return true };
        let ready = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if ready {
            *task = None;
        }
        ready
    };
    let wait = || -> Task {
        Some(Box::pin(async { _ = engine.nop().submit_async().await.unwrap().await }))
    };
    let mut first = wait();
    assert!(!poll(&mut first));
    let ops = [(); 2].map(|()| remote.nop().submit().unwrap());
    engine.turn(); // the first remote request is in the queue now
    let mut last = wait();
    assert!(!poll(&mut last));
    script.complete(2);
    engine.turn();
    assert!(!readable(&engine, Duration::ZERO), "both slots wait to be collected");

    taken.pop().unwrap().wait().0.unwrap(); // a slot for `first`
    engine.turn();
    assert_eq!(script.in_flight(), 0, "a later request got the slot");
    taken.pop().unwrap().wait().0.unwrap(); // and one for the remote request
    assert!(readable(&engine, Duration::ZERO), "no turn is due for the remote request");
    engine.turn();
    assert_eq!(script.in_flight(), 1);
    assert!(!poll(&mut last) && !poll(&mut first));
    assert_eq!(script.in_flight(), 2, "the first has its own");
    while !poll(&mut first) || !ops.iter().all(RemoteOperation::is_done) {
        script.complete(2);
        engine.turn();
        poll(&mut last);
    }
    engine.drain().unwrap();
    assert!(poll(&mut last));
    assert!(engine.validate().is_idle());
}

/// The shutdown or drop of an engine performs the sent requests, ends those without a slot, and
/// refuses later ones.
#[test]
fn inv14_the_end_answers_every_remote_request() {
    for explicit in [true, false] {
        let (engine, _script) = scripted(2, 2, 8);
        let remote = engine.remote();
        let file = shared_file();
        let freed = Arc::new(AtomicU64::new(0));
        let buf = || Counted(vec![1; 8], Arc::clone(&freed));
        let writes: Vec<_> =
            (0..6).map(|at| remote.write(&file, buf(), at * 8).submit().unwrap()).collect();
        let (send, called) = mpsc::channel();
        remote.nop().callback(move |result, ()| send.send(result).unwrap()).unwrap();
        drop(remote.write(&file, buf(), 48).submit().unwrap()); // performed although its operation is dropped
        if explicit {
            engine.shutdown().unwrap();
            assert!(matches!(remote.nop().submit(), Err(SubmitError::Closed(_))));
            let after = engine.remote();
            assert!(matches!(after.nop().submit(), Err(SubmitError::Closed(_))));
        }
        drop(engine);
        let Err(SubmitError::Closed(request)) = remote.write(&file, buf(), 0).submit() else {
            panic!("no engine is left to accept it")
        };
        drop(request);
        assert_eq!(freed.load(Ordering::Relaxed), 2);
        for write in writes {
            let (result, buf) = block_on(write);
            assert_eq!((result.unwrap(), buf.0.len()), (8, 8));
        }
        assert_eq!(called.recv().unwrap().unwrap(), 0);
        assert_eq!(freed.load(Ordering::Relaxed), 8);
    }
    // Remote requests that never get a slot are answered.
    let (engine, script) = scripted(1, 1, 8);
    let remote = engine.remote();
    let kept = engine.nop().submit().unwrap();
    let file = shared_file();
    let writes = [(); 2].map(|()| remote.write(&file, vec![3; 3], 0).submit().unwrap());
    let (send, called) = mpsc::channel();
    remote.nop().callback(move |result, ()| send.send(result).unwrap()).unwrap();
    script.complete(1);
    drop(engine);
    for write in writes {
        let (result, buf) = write_result(write);
        assert_eq!((result.unwrap_err().raw_os_error(), buf), (Some(libc::ECANCELED), vec![3; 3]));
    }
    assert_eq!(called.recv().unwrap().unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    kept.wait().0.unwrap();
}

fn write_result<B: Send + 'static>(op: RemoteOperation<B>) -> aio_reap::Outcome<B> {
    assert!(op.is_done());
    block_on(op)
}

/// If the engine's thread panics, every waiting thread gets a result, in every state of its
/// request.
#[test]
fn inv14_a_panic_of_the_engine_answers_every_remote_request() {
    let (to_us, from_engine) = mpsc::channel();
    let (go_on, waits) = mpsc::channel::<()>();
    let engine = thread::spawn(move || {
        let (engine, script) = scripted(2, 2, 8);
        to_us.send(engine.remote()).unwrap();
        waits.recv().unwrap();
        engine.turn();
        script.complete(1);
        drop(engine.plug()); // delivers
        panic!("on purpose");
    });
    let remote = from_engine.recv().unwrap();
    let file = shared_file();
    let writes: Vec<_> =
        (0..4).map(|at| remote.write(&file, vec![3; 3], at * 3).submit().unwrap()).collect();
    let (send, called) = mpsc::channel::<()>();
    remote.nop().callback(move |_, ()| send.send(()).unwrap()).unwrap();
    go_on.send(()).unwrap();
    let mut done = 0;
    for write in writes {
        let (result, buf) = write.wait();
        assert_eq!(buf, [3; 3]);
        match result {
            Ok(_) => done += 1,
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ECANCELED)),
        }
    }
    assert_eq!(done, 1);
    assert!(called.recv().is_err(), "a callback ran while its thread panicked");
    assert!(engine.join().is_err());
}

/// The request of a dropped or forgotten operation is performed, and its buffer is freed at the
/// right time and place.
#[test]
fn inv13_dropped_remote_operations_leave_their_buffers_until_the_end() {
    let (engine, script) = scripted(8, 8, 8);
    let remote = engine.remote();
    let file = shared_file();
    let freed = Arc::new(AtomicU64::new(0));
    let count = || freed.load(Ordering::Relaxed);
    let write = |at: u64| {
        let buf = Counted(vec![at as u8; 16], Arc::clone(&freed));
        remote.write(&file, buf, at * 16).submit().unwrap()
    };
    drop(write(0)); // before the engine takes it
    let in_flight = write(1);
    let done = write(2);
    std::mem::forget(write(3));
    engine.turn();
    drop(in_flight);
    assert_eq!(count(), 0, "freed while the kernel has it");
    script.complete(2);
    engine.turn();
    assert_eq!(count(), 2);
    script.complete(2);
    engine.turn();
    assert_eq!(count(), 2, "this one is waited for");
    drop(done);
    assert_eq!(count(), 3);
    let (read, buf) = remote
        .read(&file, vec![9; 64], 0)
        .submit()
        .map(|read| {
            script.on_submit(SubmitStep::Inline);
            engine.turn();
            block_on(read)
        })
        .unwrap();
    assert_eq!(read.unwrap(), 64);
    assert!(buf.chunks(16).zip(0..).all(|(bytes, nr)| bytes == [nr; 16]));
}

/// A timeout ends the wait of another thread, or the request.
#[test]
fn remote_waits_and_requests_end_in_time() {
    let (engine, script) = scripted(1, 4, 8);
    let remote = engine.remote();
    let thread = thread::spawn(move || {
        let start = Instant::now();
        let op = remote.nop().submit().unwrap();
        let op = op.wait_timeout(SHORT).unwrap_err();
        assert!(start.elapsed() >= SHORT);
        let late = remote.nop().cancel_after(SHORT).submit().unwrap();
        assert_eq!(late.wait().0.unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        op
    });
    while !thread.is_finished() {
        engine.turn(); // a turn never sleeps; in a sleep the device would complete the request
        thread::sleep(Duration::from_micros(100));
    }
    script.complete(1);
    engine.turn();
    let op = thread.join().unwrap();
    block_on(op).0.unwrap();
}

/// A remote request wakes a sleeping engine: an idle one, one with a request in the kernel, and one
/// in `block_on`.
#[test]
fn inv06_a_remote_request_ends_every_kind_of_sleep() {
    on_every_backend(|engine| {
        let remote = engine.remote();
        let (reader, writer) = std::io::pipe().unwrap();
        let never = engine.attach(reader).unwrap();
        let pipe = engine.read(&never, vec![0; 1], 0).submit().unwrap(); // waits, if the kernel can
        let thread = thread::spawn(move || {
            thread::sleep(SHORT);
            remote.nop().submit().unwrap().wait().0.unwrap();
            thread::sleep(SHORT);
            remote.nop().submit().unwrap().wait().0.unwrap();
            drop(writer);
        });
        if !pipe.is_done() {
            engine.wait(Some(Duration::from_secs(20))).unwrap(); // the first request ends it
        }
        engine.block_on(pipe).unwrap().0.unwrap_or_default();
        engine.serve().unwrap();
        thread.join().unwrap();
    });
}

/// The engine's own thread may await its remote requests, but not block on them.
#[test]
fn the_engines_thread_cannot_wait_for_itself() {
    let (engine, _script) = scripted(4, 4, 4);
    let remote = engine.remote();
    let op = remote.nop().submit().unwrap();
    engine.block_on(op).unwrap().0.unwrap();
    let op = remote.nop().submit().unwrap();
    let blocked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| op.wait()));
    assert!(blocked.is_err());
    engine.drain().unwrap();
}

/// A result that is there needs no wait, also on the engine's thread.
#[test]
fn inv16_the_engines_thread_takes_a_result_that_is_there() {
    let (engine, _script) = scripted(4, 4, 4);
    let remote = engine.remote();
    let (first, second) = (remote.nop().submit().unwrap(), remote.nop().submit().unwrap());
    engine.drain().unwrap();
    assert!(first.is_done() && second.is_done());
    first.wait().0.unwrap();
    second.wait_timeout(Duration::ZERO).unwrap().0.unwrap();
}

/// Without a result the engine's thread gets its operation back at once, because the request cannot
/// complete while that thread blocks.
#[test]
fn inv16_a_timed_wait_on_the_engines_thread_gives_the_operation_back() {
    let (engine, _script) = scripted(4, 4, 4);
    let op = engine.remote().nop().submit().unwrap();
    let op = op.wait_timeout(Duration::from_secs(3600)).unwrap_err();
    engine.drain().unwrap();
    op.wait_timeout(Duration::ZERO).unwrap().0.unwrap();
}

/// A thread that reuses the memory of the engine's ended thread, and so the address of its
/// thread-locals, is a different thread and may block.
#[test]
fn inv16_a_thread_in_the_memory_of_the_engines_ended_thread_may_wait() {
    let (send, receive) = mpsc::channel();
    let home = thread::spawn(move || {
        let (engine, _script) = scripted(4, 4, 4);
        let remote = engine.remote();
        let done = remote.nop().submit().unwrap();
        engine.drain().unwrap();
        send.send((done, remote.nop().submit().unwrap())).unwrap();
        std::mem::forget(engine); // otherwise its drop would perform the second request
    });
    let (done, never) = receive.recv().unwrap();
    home.join().unwrap();
    // The C library gives a new thread the stack of the last one that ended.
    let other = thread::spawn(move || {
        let start = Instant::now();
        drop(never.wait_timeout(SHORT).unwrap_err());
        assert!(start.elapsed() >= SHORT, "the wait gave up at once");
        done.wait().0.unwrap();
    });
    other.join().unwrap();
}

/// The future of a `block_on` is polled only from the loop at the bottom of the stack, wherever it
/// is woken, and each wake-up leads to a poll.
#[test]
fn inv06_no_task_on_the_stack_is_ever_resumed() {
    let (engine, script) = scripted(8, 64, 8);
    let engine = Rc::new(engine);
    let (depth, polls) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0u32)));
    let mut operation: Option<aio_reap::Operation<()>> = None;
    let task = poll_fn(|context| {
        assert_eq!(depth.replace(1), 0, "resumed on its own stack");
        polls.set(polls.get() + 1);
        // The request completes inside the submission below. Its callback wakes this task, turns
        // the engine, waits, and runs another task to its end, all above this poll on the stack.
        let (inner, waker) = (Rc::downgrade(&engine), context.waker().clone());
        let done = move |_: Result<usize, aio_reap::RequestError>, ()| {
            let engine: Rc<Engine> = inner.upgrade().unwrap();
            waker.wake_by_ref();
            engine.turn();
            engine.block_on(engine.nop().submit().unwrap()).unwrap().0.unwrap();
            waker.wake();
        };
        // An operation that this task made in the last poll completes there too.
        if let Some(mut operation) = operation.take() {
            if Pin::new(&mut operation).poll(context).is_pending() {
                script.complete(8);
            }
            script.on_submit(SubmitStep::Inline);
            engine.nop().callback(done).unwrap();
        } else {
            script.on_submit(SubmitStep::Inline);
            engine.nop().callback(done).unwrap();
        }
        let mut next = engine.nop().submit().unwrap();
        let ready = Pin::new(&mut next).poll(context).is_ready();
        assert!(!ready, "it is scripted to wait");
        operation = Some(next);
        depth.set(0);
        if polls.get() < 50 { Poll::Pending } else { Poll::Ready(()) }
    });
    engine.block_on(task).unwrap(); // hangs if a wake-up is lost
    assert_eq!(polls.get(), 50);
    drop(operation);
    engine.drain().unwrap();
}
