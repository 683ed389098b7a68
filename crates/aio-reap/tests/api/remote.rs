//! Calls of other threads run once, on the engine's thread.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use crate::common::{on_engines, on_every_backend, small};
use crate::counted::Counted;
use crate::readable::readable;
use crate::scripted::scripted_by;
use aio_reap::{
    AllocateMode, BufList, Engine, NoResponse, Outcome, ReapMode, Remote, Response, SharedFile,
    SubmitError,
};
use aio_reap_test::Build;
use aio_reap_test::sim::{Script, SubmitStep};
use testkit::block_on;

const SHORT: Duration = Duration::from_millis(20);
/// Much longer than any wait of these tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn bounded(depth: usize, capacity: usize) -> (Engine, Script) {
    scripted_by(Engine::builder().depth(depth).capacity(capacity))
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

fn nop(remote: &Remote) -> Response<usize> {
    let nop = remote.ask(|engine, responder| {
        _ = engine.nop().callback(|done, ()| _ = responder.send(done.unwrap()));
    });
    nop.unwrap()
}

fn write(remote: &Remote, file: &SharedFile, buf: Counted, at: u64) -> Response<Outcome<Counted>> {
    let file = file.clone();
    let write = remote.ask(move |engine, responder| {
        let write = engine.write(&engine.attach_shared(&file), buf, at);
        _ = write.callback(|written, buf| _ = responder.send((written, buf)));
    });
    write.unwrap()
}

#[test]
fn handles_may_go_to_other_threads() {
    fn shareable<T: Send + Sync>() {}
    fn movable<T: Send>() {}
    shareable::<Remote>();
    shareable::<SharedFile>();
    movable::<aio_reap::RequestId>();
    movable::<Response<Cell<u8>>>();
    movable::<aio_reap::Responder<Cell<u8>>>();
}

/// The engine's whole interface is there for other threads, on every backend.
#[test]
fn inv15_calls_do_the_same_everywhere() {
    on_every_backend(|engine| {
        beside(engine, |remote| {
            let file = shared_file();
            let (result, _) =
                block_on(write(&remote, &file, Counted::new(10_000, 7, &Arc::default()), 0))
                    .unwrap();
            assert_eq!(result.unwrap(), 10_000);
            let home = thread::current().id();
            let rest = remote.ask(move |engine, responder| {
                assert_ne!(thread::current().id(), home);
                let file = engine.attach_shared(&file);
                // A call is not an ordinary callback of a request: it may wait like one.
                let punch = engine.allocate(&file, AllocateMode::PunchHole, 0, 4096);
                punch.submit().unwrap().wait().0.unwrap();
                let list = BufList::new(vec![vec![1; 4095], vec![2; 3]]).unwrap();
                let (read, list) = engine.read_vectored(&file, list, 1).submit().unwrap().wait();
                responder.send((read.unwrap(), list.into_inner())).unwrap();
            });
            let (read, bufs) = block_on(rest.unwrap()).unwrap();
            assert_eq!((read, &bufs[..]), (4098, &[vec![0; 4095], vec![7; 3]][..]));
        });
    });
}

/// A call over the capacity comes back. A turn makes room.
#[test]
fn inv01_calls_that_wait_are_bounded() {
    let (engine, script) = bounded(2, 2);
    let remote = engine.remote();
    let nops = [nop(&remote), nop(&remote)];
    let refused = remote.call(|_| panic!("it was refused"));
    assert!(matches!(&refused, Err(SubmitError::Full(_))), "{refused:?}");
    assert_eq!(refused.err().map(|refused| refused.errno()), Some(libc::EAGAIN));
    assert_eq!(format!("{remote:?}"), "Remote { calls: 2, capacity: 2 }");
    assert_eq!(engine.turn().in_flight, 2);
    assert_eq!(format!("{remote:?}"), "Remote { calls: 0, capacity: 2 }");
    script.complete(2);
    engine.turn();
    let third = nop(&remote);
    engine.drain().unwrap();
    nops.into_iter().chain([third]).for_each(|nop| assert_eq!(block_on(nop), Ok(0)));
    // A request that finds no slot is the business of its call.
    let held = engine.plug();
    assert!(engine.is_half_free());
    let first = engine.nop().submit().unwrap();
    assert!(!engine.is_half_free(), "one of two");
    let slots = [first, engine.nop().submit().unwrap()];
    let refused = nop(&remote);
    engine.turn();
    assert_eq!(block_on(refused), Err(NoResponse));
    drop((slots, held));
    assert_eq!(std::io::Error::from(NoResponse).raw_os_error(), Some(libc::ECANCELED));
}

/// The device sees the requests of a thread's calls in their order, those of a turn in one batch.
#[test]
fn inv02_calls_of_a_thread_keep_their_order() {
    let (engine, script) = bounded(16, 64);
    let remote = engine.remote();
    let file = shared_file();
    let mut sent = 0;
    for burst in [1, 7, 2, 5] {
        for _ in 0..burst {
            let (file, at) = (file.clone(), sent);
            let read = move |engine: &Engine| {
                let read = engine.read(&engine.attach_shared(&file), vec![0; 1], at);
                read.callback(|_, _| ()).unwrap();
            };
            remote.call(read).unwrap();
            sent += 1;
        }
        engine.turn();
        script.complete(1);
    }
    engine.drain().unwrap();
    assert_eq!(script.log(), (0..sent).collect::<Vec<_>>());
    assert_eq!(script.batches()[..4], [1, 7, 2, 5]);
}

/// A call that a call makes waits for the next turn, which is announced.
#[test]
fn inv02_calls_of_calls_run_in_the_next_turn() {
    let (engine, _script) = bounded(4, 4);
    let (remote, ran) = (engine.remote(), Arc::new(AtomicU64::new(0)));
    let (again, counter) = (remote.clone(), Arc::clone(&ran));
    let call = move |_: &Engine| {
        counter.fetch_add(1, Ordering::Relaxed);
        again.call(move |_| _ = counter.fetch_add(1, Ordering::Relaxed)).unwrap();
    };
    remote.call(call).unwrap();
    for expected in 1..=2 {
        assert!(readable(&engine, Duration::ZERO));
        engine.turn();
        assert_eq!(ran.load(Ordering::Relaxed), expected);
    }
    engine.turn();
    assert!(!readable(&engine, Duration::ZERO));
}

/// A turn inside a callback runs no call, and does not lose its notification.
#[test]
fn inv07_a_turn_in_a_callback_leaves_calls_to_the_next_turn() {
    let (engine, script) = bounded(8, 8);
    let (engine, ran) = (Rc::new(engine), Arc::new(AtomicU64::new(0)));
    let (inner, counter) = (Rc::downgrade(&engine), Arc::clone(&ran));
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    let turning = move |_: Result<usize, _>, ()| {
        let (engine, call): (Rc<Engine>, _) = (inner.upgrade().unwrap(), Arc::clone(&counter));
        engine.remote().call(move |_| _ = call.fetch_add(1, Ordering::Relaxed)).unwrap();
        engine.turn();
        assert_eq!(counter.load(Ordering::Relaxed), 0, "a call ran inside a callback");
    };
    engine.nop().callback(turning).unwrap();
    script.complete(1);
    engine.turn();
    assert!(readable(fd, Duration::ZERO), "the notification is lost");
    engine.turn();
    assert_eq!(ran.load(Ordering::Relaxed), 1);
}

/// The shutdown or drop of an engine runs the queued calls, and performs their requests.
#[test]
fn inv14_the_end_runs_every_queued_call() {
    for explicit in [true, false] {
        let (engine, _script) = bounded(2, 16);
        let remote = engine.remote();
        let file = shared_file();
        let freed = Arc::new(AtomicU64::new(0));
        let buf = || Counted::new(8, 1, &freed);
        let writes: Vec<_> = (0..6).map(|at| write(&remote, &file, buf(), at * 8)).collect();
        drop(write(&remote, &file, buf(), 48)); // performed although its response is dropped
        if explicit {
            engine.shutdown().unwrap();
            assert!(matches!(remote.call(|_| ()), Err(SubmitError::Closed(_))));
            assert!(matches!(engine.remote().call(|_| ()), Err(SubmitError::Closed(_))));
        }
        drop(engine);
        let refused = remote.call(|_| panic!("no engine is left"));
        assert_eq!(refused.err().map(|refused| refused.errno()), Some(libc::ECANCELED));
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        for write in writes {
            let (result, buf) = block_on(write).unwrap();
            assert_eq!((result.unwrap(), buf.0.len()), (8, 8));
        }
        assert_eq!(freed.load(Ordering::Relaxed), 7);
    }
}

/// If the engine's thread panics, every response resolves, in every state of its request.
#[test]
fn inv14_a_panic_of_the_engine_ends_every_response() {
    let (to_us, from_engine) = mpsc::channel();
    let (go_on, waits) = mpsc::channel::<()>();
    let engine = thread::spawn(move || {
        let (engine, script) = bounded(2, 8);
        to_us.send(engine.remote()).unwrap();
        waits.recv().unwrap();
        engine.turn();
        script.complete(1);
        drop(engine.plug()); // delivers
        to_us.send(engine.remote()).unwrap();
        waits.recv().unwrap();
        panic!("on purpose");
    });
    let remote = from_engine.recv().unwrap();
    let nops: Vec<_> = (0..4).map(|_| nop(&remote)).collect();
    go_on.send(()).unwrap();
    from_engine.recv().unwrap();
    let queued = remote.ask::<(), _>(|_, _| panic!("a call ran while its thread panicked"));
    go_on.send(()).unwrap();
    let ended: Vec<_> = nops.into_iter().map(block_on).collect();
    assert_eq!(ended, [Ok(0), Err(NoResponse), Err(NoResponse), Err(NoResponse)]);
    assert_eq!(block_on(queued.unwrap()), Err(NoResponse));
    assert!(engine.join().is_err());
    assert!(matches!(remote.call(|_| ()), Err(SubmitError::Closed(_))));
}

/// The request of a dropped response is performed, and its buffer is freed at the right time.
#[test]
fn inv13_dropped_responses_leave_their_buffers_until_the_end() {
    let (engine, script) = bounded(8, 8);
    let remote = engine.remote();
    let file = shared_file();
    let freed = Arc::new(AtomicU64::new(0));
    let count = || freed.load(Ordering::Relaxed);
    let write = |at: u64| {
        let buf = Counted::new(16, at as u8, &freed);
        write(&remote, &file, buf, at * 16)
    };
    drop(write(0)); // before the engine takes it
    let (in_flight, done) = (write(1), write(2));
    engine.turn();
    drop(in_flight);
    assert_eq!(count(), 0, "freed while the kernel has it");
    script.complete(2);
    engine.turn();
    assert_eq!(count(), 2);
    script.complete(1);
    engine.turn();
    assert_eq!(count(), 2, "this one is waited for");
    drop(done);
    assert_eq!(count(), 3);
}

/// A response that is dropped gives the value back to its sender.
#[test]
fn inv16_a_value_that_no_task_awaits_comes_back() {
    let (engine, _script) = bounded(4, 4);
    let remote = engine.remote();
    let (send, returned) = mpsc::channel();
    let call = move |_: &Engine, responder: aio_reap::Responder<Vec<u8>>| {
        send.send(responder.send(vec![1, 2])).unwrap();
    };
    drop(remote.ask(call).unwrap());
    engine.turn();
    assert_eq!(returned.recv().unwrap(), Err(vec![1, 2]));
    // And a response that was returned is not returned twice.
    let mut response = remote.ask(|_, responder| responder.send(5).unwrap()).unwrap();
    engine.turn();
    assert_eq!(block_on(&mut response), Ok(5));
    assert_eq!(block_on(response), Err(NoResponse));
}

/// A call wakes a sleeping engine: an idle one, one with a request in the kernel, and one in
/// `block_on`.
#[test]
fn inv06_a_call_ends_every_kind_of_sleep() {
    on_every_backend(|engine| {
        let remote = engine.remote();
        let (reader, writer) = std::io::pipe().unwrap();
        let never = engine.attach(reader).unwrap();
        let pipe = engine.read(&never, vec![0; 1], 0).submit().unwrap(); // waits, if the kernel can
        let thread = thread::spawn(move || {
            thread::sleep(SHORT);
            block_on(nop(&remote)).unwrap();
            thread::sleep(SHORT);
            block_on(nop(&remote)).unwrap();
            drop(writer);
        });
        if !pipe.is_done() {
            engine.wait(Some(Duration::from_secs(60))).unwrap(); // the first request ends it
        }
        engine.block_on(pipe).unwrap().0.unwrap_or_default();
        engine.serve().unwrap();
        thread.join().unwrap();
    });
}

/// A cancellation by id is a call like any other, and wakes a sleeping engine.
#[test]
fn inv21_a_call_cancels_by_id() {
    let (to_main, from_engine) = mpsc::channel();
    let engine = thread::spawn(move || {
        let engine = Engine::builder().depth(1).build().unwrap();
        to_main.send(engine.remote()).unwrap();
        engine.serve().unwrap();
    });
    let remote = from_engine.recv().unwrap();
    for _ in 0..100 {
        let (reader, _writer) = std::io::pipe().unwrap();
        let pipe = SharedFile::new(reader).unwrap();
        let (send, ended) = mpsc::channel();
        let id = remote.ask(move |engine, responder| {
            let read = engine.read(&engine.attach_shared(&pipe), vec![0; 1], 0);
            let id = read.callback(move |read, _| send.send(read).unwrap()).unwrap();
            responder.send(id).unwrap();
        });
        let id = block_on(id.unwrap()).unwrap();
        remote.call(move |engine| _ = engine.cancel(id)).unwrap();
        let errno = ended.recv().unwrap().unwrap_err().errno();
        assert!(matches!(errno, libc::ECANCELED | libc::ESPIPE), "{errno}");
    }
    drop(remote);
    engine.join().unwrap();
}

/// The future of a `block_on` is polled only from the loop at the bottom of the stack, wherever it
/// is woken, and each wake-up leads to a poll.
#[test]
fn inv06_no_task_on_the_stack_is_ever_resumed() {
    let (engine, script) = bounded(8, 64);
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
        }
        script.on_submit(SubmitStep::Inline);
        engine.nop().callback(done).unwrap();
        engine.turn();
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

/// A call that panics takes no completion with it, although its turn has cleared the notification.
#[test]
fn inv06_a_panic_of_a_call_leaves_completions_notified() {
    let check = |engine: &Engine| {
        let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
        let nop = engine.nop().submit().unwrap();
        assert!(readable(fd, PATIENCE), "the completion does not notify");
        engine.remote().call(|_| panic!("on purpose")).unwrap();
        let turn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.turn()));
        assert!(turn.is_err() && !nop.is_done());
        assert!(readable(fd, Duration::ZERO), "{}: no turn would follow", engine.backend());
        engine.turn();
        assert!(nop.is_done());
    };
    let script = Script::new();
    script.on_submit(SubmitStep::Inline);
    check(&small().reap_mode(ReapMode::OnTurn).build_sim(&script).unwrap());
    on_engines(small().reap_mode(ReapMode::OnTurn), check);
}

/// A call makes the next remote in the turn that began without one.
#[test]
fn inv14_serving_goes_on_with_a_remote_that_a_call_has_made() {
    for at_once in [true, false] {
        let (engine, _script) = bounded(4, 4);
        let ran = Arc::new(AtomicU64::new(0));
        let (to_worker, remotes) = mpsc::channel::<Remote>();
        let worker = thread::spawn({
            let ran = Arc::clone(&ran);
            move || {
                let Ok(remote) = remotes.recv() else { return };
                thread::sleep(SHORT);
                _ = remote.call(move |_| _ = ran.fetch_add(1, Ordering::Relaxed));
            }
        });
        let counter = Arc::clone(&ran);
        let call = move |engine: &Engine| {
            let remote = engine.remote();
            if at_once {
                remote.call(move |_| _ = counter.fetch_add(1, Ordering::Relaxed)).unwrap();
            } else {
                to_worker.send(remote).unwrap();
            }
        };
        engine.remote().call(call).unwrap();
        engine.serve().unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 1, "it ended with a remote or a call left");
        worker.join().unwrap();
    }
}

/// A call that panics while the engine is dropped leaves no other one behind.
#[test]
fn inv14_a_panic_of_a_call_at_the_end_ends_the_others() {
    let (engine, _script) = bounded(4, 4);
    let _holds_the_core = engine.nop().submit().unwrap();
    let remote = engine.remote();
    remote.call(|_| panic!("on purpose")).unwrap();
    let mut after = nop(&remote);
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(engine)));
    assert!(end.is_err());
    let polled = Pin::new(&mut after).poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(polled, Poll::Ready(Err(NoResponse)), "a queued call was left behind");
    assert!(matches!(remote.call(|_| ()), Err(SubmitError::Closed(_))));
}
