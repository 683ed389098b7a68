//! User code that uses the engine at unusual moments. Each test was, or could become, a hang, a
//! spinning loop or worse.

use crate::common::on_every_backend;
use crate::counted::OnDrop;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::time::{Duration, Instant};

use crate::readable::readable;
use crate::scripted::scripted;
use aio_reap::{BackendKind, CompletionQueue, Engine, StartError};
use aio_reap_test::Build;
use aio_reap_test::sim::SubmitStep;

/// A completion that wakes the future of `block_on` makes no system call for that: the engine is awake.
#[test]
fn a_completion_wakes_its_future_without_the_kick() {
    let (engine, _script) = scripted(8);
    engine.block_on(engine.nop().submit().unwrap()).unwrap().0.unwrap();
    assert!(!readable(&engine, Duration::ZERO), "the wake-up has signalled the kick");
}

/// Another thread wakes the future at the moment when the engine clears its own kick.
#[test]
fn waking_races_with_the_engines_own_kick() {
    let (engine, script) = scripted(8);
    let (to_thread, from_engine) = std::sync::mpsc::channel::<Waker>();
    let waking = std::thread::spawn(move || from_engine.iter().for_each(Waker::wake));
    let start = Instant::now();
    for round in 0..5_000 {
        // Each round is handed to the other thread, which takes long on a busy machine.
        if round >= 200 && start.elapsed() > Duration::from_secs(20) {
            break;
        }
        // There is left-over work on a watched engine, so the kick is signalled when `block_on`
        // turns the engine.
        assert!(round >= 200 || start.elapsed() < Duration::from_secs(60));
        let plug = engine.plug();
        let nops = [(); 2].map(|()| engine.nop().submit().unwrap());
        assert!(nops[0].cancel());
        assert!(readable(&engine, Duration::ZERO));
        nops.into_iter().for_each(drop);
        let mut polls = 0;
        let twice = poll_fn(|context| {
            polls += 1;
            if polls == 1 {
                to_thread.send(context.waker().clone()).unwrap();
                return Poll::Pending;
            }
            Poll::Ready(())
        });
        engine.block_on(twice).unwrap(); // hangs if the wake-up is lost
        script.complete(8);
        engine.drain().unwrap();
        drop(plug);
    }
    drop(to_thread);
    waking.join().unwrap();
}

/// A future that always wakes itself (a busy `yield_now`) does not stop the I/O.
#[test]
fn future_that_wakes_itself_does_not_starve_the_engine() {
    on_every_backend(|engine| {
        let kind = engine.backend();
        let _plug = engine.plug();
        let operation = engine.nop().submit().unwrap(); // held back, so only `block_on` submits it
        let start = Instant::now();
        let busy = poll_fn(|context| {
            assert!(start.elapsed() < Duration::from_secs(60), "{kind}: starved");
            context.waker().wake_by_ref();
            if operation.is_done() { Poll::Ready(()) } else { Poll::Pending }
        });
        engine.block_on(busy).unwrap();
    });
}

/// Two engines on one script would get each other's completions, and free buffers in use.
#[test]
fn script_drives_one_engine_at_a_time() {
    let (engine, script) = scripted(128);
    let second = Engine::builder().build_sim(&script);
    assert!(matches!(&second, Err(StartError::Refused(_))));
    assert_eq!(second.err().unwrap().errno(), libc::EBUSY);
    let orphan = engine.nop().submit().unwrap();
    drop(engine);
    assert!(orphan.is_done());
    drop(orphan); // the last owner of the device
    let engine = Engine::builder().build_sim(&script).unwrap();
    engine.nop().submit().unwrap().wait().0.unwrap();
}

/// To io_uring the offset -1 is the file's own position; to the other backends it is an error.
#[test]
fn offsets_beyond_the_kernels_are_refused_everywhere() {
    on_every_backend(|engine| {
        let kind = engine.backend();
        let raw = tempfile::tempfile().unwrap();
        raw.write_all_at(b"safe", 0).unwrap();
        let file = engine.attach(raw.try_clone().unwrap()).unwrap();
        for offset in [u64::MAX, 1 << 63] {
            let (result, buf) =
                engine.write(&file, b"torn".to_vec(), offset).submit().unwrap().wait();
            assert_eq!(result.unwrap_err().errno(), libc::EINVAL, "{kind}");
            assert_eq!(buf, b"torn");
            let (result, _) = engine.read(&file, vec![1; 4], offset).submit().unwrap().wait();
            assert_eq!(result.unwrap_err().errno(), libc::EINVAL, "{kind}");
        }
        // The largest offset: the computation of the rest does not wrap around.
        let (result, _) = engine.write(&file, vec![0; 4], i64::MAX as u64).submit().unwrap().wait();
        assert!(result.is_err());
        let (result, _) = engine.read(&file, vec![1; 4], i64::MAX as u64).submit().unwrap().wait();
        assert!(result.is_err() || matches!(result, Ok(0)), "{kind}: {result:?}");
        let mut bytes = [0; 5];
        assert_eq!((raw.read_at(&mut bytes, 0).unwrap(), &bytes[..4]), (4, &b"safe"[..]));
        engine.validate();
    });
}

thread_local! {
    static CLONED: RefCell<Option<Rc<Engine>>> = const { RefCell::new(None) };
}

/// The clone of a waker turns the engine, so the request may complete between the check and the
/// registration.
#[test]
fn waker_that_turns_the_engine_while_it_is_cloned_is_not_left_waiting() {
    const TURNING: RawWakerVTable = RawWakerVTable::new(
        |_| {
            let engine = CLONED.with_borrow(|engine| engine.clone());
            engine.unwrap().turn();
            RawWaker::new(std::ptr::null(), &TURNING)
        },
        |_| {},
        |_| {},
        |_| {},
    );
    let (engine, script) = scripted(8);
    let engine = Rc::new(engine);
    CLONED.set(Some(Rc::clone(&engine)));
    let mut operation = pin!(engine.nop().submit().unwrap());
    script.complete(1);
    // SAFETY: the functions of the table ignore the pointer, so it needs no owner.
    let waker = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &TURNING)) };
    let poll = operation.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(matches!(poll, Poll::Ready((Ok(0), ()))));
    engine.validate();
    CLONED.set(None);
}

/// The drops of wakers and buffers turn, drain and submit.
#[test]
fn drops_that_reenter_the_engine_find_nothing_borrowed() {
    let (engine, _script) = scripted(8);
    let engine = Rc::new(engine);
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let drops = Rc::new(Cell::new(0));
    let busy = || {
        let (engine, drops) = (Rc::downgrade(&engine), Rc::clone(&drops));
        move || {
            drops.set(drops.get() + 1);
            if let Some(engine) = engine.upgrade() {
                engine.turn();
                engine.validate();
                if let Ok(nop) = engine.nop().submit() {
                    nop.wait().0.unwrap();
                }
            }
        }
    };
    let write = || engine.write(&file, OnDrop(vec![1; 8], busy()), 0);
    drop(write()); // never submitted
    drop(write().submit().unwrap()); // an orphan
    write().callback(|result, _| assert_eq!(result.unwrap(), 8)).unwrap();
    let done = write().submit().unwrap();
    engine.drain().unwrap();
    assert!(done.is_done());
    drop(done); // complete, never collected
    let queue = CompletionQueue::new();
    write().enqueue(&queue, 0).unwrap();
    drop(queue); // its completion is dropped on delivery
    drop(write().submit().unwrap());
    let captured = OnDrop(Vec::new(), busy());
    engine.nop().callback(move |_, ()| drop(captured)).unwrap();
    drop(engine);
    assert_eq!(drops.get(), 7);
}

/// The last handle of the engine is dropped inside a callback that `Operation::wait` runs.
#[test]
fn engine_may_be_dropped_inside_a_callback() {
    let (engine, script) = scripted(8);
    let engine = Rc::new(engine);
    let owner = Rc::new(RefCell::new(None));
    let others = Rc::new(Cell::new(0));
    let plug = engine.plug();
    let shared = Rc::clone(&owner);
    let done = move |_: Result<usize, aio_reap::RequestError>, ()| drop(shared.take());
    engine.nop().callback(done).unwrap();
    for _ in 0..3 {
        let others = Rc::clone(&others);
        engine.nop().callback(move |_, ()| others.set(others.get() + 1)).unwrap();
    }
    let operation = engine.nop().submit().unwrap();
    drop(plug);
    *owner.borrow_mut() = Some(engine);
    assert_eq!(operation.wait().0.unwrap(), 0);
    assert_eq!((others.get(), script.in_flight()), (3, 0));
}

/// A wait with a timeout ends when the time is over, and not before.
#[test]
fn wait_with_a_limit_takes_that_long_when_nothing_comes() {
    on_every_backend(|engine| {
        let kind = engine.backend();
        let (reader, mut writer) = io::pipe().unwrap();
        let file = engine.attach(reader).unwrap();
        let read = engine.read(&file, vec![0; 2], 0);
        if kind != BackendKind::Uring {
            // `pread` refuses a pipe. The test checks that its error is returned.
            assert!(read.submit().unwrap().wait().0.is_err());
            assert!(engine.wait(Some(Duration::from_secs(5))).unwrap().is_idle());
            return;
        }
        let read = read.submit().unwrap();
        let start = Instant::now();
        let turn = engine.wait(Some(Duration::from_millis(30))).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(30));
        assert_eq!((turn.delivered, turn.in_flight), (0, 1));
        io::Write::write_all(&mut writer, b"hi").unwrap();
        assert_eq!(engine.wait(Some(Duration::MAX)).unwrap().delivered, 1);
        let (result, buf) = read.wait();
        assert_eq!((result.unwrap(), &buf[..]), (2, &b"hi"[..]));
    });
}

/// A request that completes during its submission needs no waker.
#[test]
fn operation_is_ready_at_its_first_poll_if_it_completed_at_once() {
    struct Unused;
    impl Wake for Unused {
        fn wake(self: Arc<Self>) {
            panic!("this waker is never used");
        }
    }
    let (engine, script) = scripted(8);
    script.on_submit(SubmitStep::Inline);
    let mut operation = pin!(engine.nop().submit().unwrap());
    let waker = Waker::from(Arc::new(Unused));
    let poll = operation.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(matches!(poll, Poll::Ready((Ok(0), ()))));
}
