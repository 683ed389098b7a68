//! Requests that are cancelled or time out, and waits that end before their requests.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::common::{fifo, on_every_backend};
use crate::readable::{assert_quiet, readable};
use crate::scripted::scripted;
use aio_reap::{BackendKind, BufList, Engine, File, OpenOptions, Operation};
use aio_reap_test::sim::{Cancel, SubmitStep, Transfer};

const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(3600);
/// Much longer than any wait of these tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// Repeats `test` until it returns that it was in time. If the machine stops for a moment, a short
/// time can be over before the test checks it.
fn in_time(try_it: impl Fn() -> bool) {
    assert!((0..100).any(|_| try_it()), "it is never in time");
}

fn errno(result: Result<usize, aio_reap::RequestError>) -> i32 {
    result.unwrap_err().errno()
}

/// Attaches a pipe, whose reads block until its writer writes, if the backend supports that.
fn slow_file(engine: &Engine) -> Option<(File, io::PipeWriter)> {
    let (reader, writer) = io::pipe().unwrap();
    // `pread` in the pool refuses pipes.
    (engine.backend() == BackendKind::Uring).then(|| (engine.attach(reader).unwrap(), writer))
}

#[test]
fn pending_requests_are_cancelled_for_certain_and_keep_the_order_of_the_rest() {
    let (engine, script) = scripted(2);
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let plug = engine.plug();
    let mut reads: Vec<Operation<Vec<u8>>> =
        (0..6).map(|at| engine.read(&file, vec![at as u8], at).submit().unwrap()).collect();
    let cancelled = [4, 1, 0].map(|nth| {
        let read = reads.remove(nth);
        assert!(read.cancel() && !read.is_done(), "delivered by the next turn");
        engine.validate();
        (nth, read)
    });
    assert!(readable(fd, Duration::ZERO), "no turn would deliver them");
    drop(plug);
    for (nth, read) in cancelled {
        assert!(read.is_done());
        let (result, buf) = read.wait();
        assert_eq!((errno(result), buf), (libc::ECANCELED, vec![nth as u8]));
    }
    while !engine.turn().is_idle() {
        script.complete(1);
    }
    assert_eq!(script.log(), [2, 3, 5]);
    reads.into_iter().for_each(|read| assert_eq!(read.wait().0.unwrap(), 0));
    assert_eq!(script.cancellations(), 0, "the device knew nothing of them");
}

#[test]
fn requests_in_flight_are_cancelled_if_the_device_can() {
    for cancel in [Cancel::Works, Cancel::TooLate, Cancel::Refused] {
        let (engine, script) = scripted(4);
        script.cancels(cancel);
        let nop = engine.nop().submit().unwrap();
        assert_eq!(nop.cancel(), cancel != Cancel::Refused);
        let works = cancel == Cancel::Works;
        assert_eq!((script.cancellations(), script.in_flight()), (1, usize::from(!works)));
        let (result, ()) = nop.wait();
        if works {
            assert_eq!(errno(result), libc::ECANCELED);
        } else {
            result.unwrap();
        }
        let done = engine.nop().submit().unwrap();
        script.complete(1);
        engine.turn();
        assert!(!done.cancel(), "nothing to try");
        done.wait().0.unwrap();
    }
}

/// A cancelled request is neither retried nor continued.
#[test]
fn inv12_cancelled_requests_are_not_retried() {
    for transfer in [
        Transfer::Fail(libc::EINTR),
        Transfer::Fail(libc::EAGAIN),
        Transfer::Fail(libc::ECANCELED),
        Transfer::Short(3),
    ] {
        let (engine, script) = scripted(4);
        script.cancels(Cancel::TooLate);
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let write = engine.write(&file, vec![1; 10], 0).submit().unwrap();
        write.cancel();
        script.on_transfer(transfer);
        script.complete(1);
        engine.turn();
        assert!(write.is_done(), "{transfer:?} was tried again");
        assert_eq!(errno(write.wait().0), libc::ECANCELED, "{transfer:?}");
    }
    // The device cancelled it without a request, so the error is returned.
    let (engine, script) = scripted(4);
    script.on_transfer(Transfer::Fail(libc::ECANCELED));
    assert_eq!(errno(engine.nop().submit().unwrap().wait().0), libc::ECANCELED);
    // The request completes in spite of the attempt.
    script.cancels(Cancel::TooLate);
    let nop = engine.nop().submit().unwrap();
    nop.cancel();
    script.complete(1);
    nop.wait().0.unwrap();
}

/// The kernel reports a number of its own (`ERESTARTSYS`) for an open that it interrupted.
#[test]
fn inv12_an_interrupted_open_is_cancelled() {
    let (engine, script) = scripted(128);
    script.cancels(Cancel::TooLate);
    for cancels in [true, false] {
        let open = engine.open("/", OpenOptions::read_only()).submit().unwrap();
        assert!(!cancels || open.cancel());
        script.on_transfer(Transfer::Fail(512));
        let opened = open.wait().0;
        assert_eq!(opened.err().map(|error| error.errno()), cancels.then_some(libc::ECANCELED));
    }
    on_every_backend(|engine| {
        if engine.backend() != BackendKind::Uring {
            return; // the threads cannot be interrupted
        }
        let (_folder, path) = fifo();
        // With `truncate` the open waits for a reader, on a thread of the kernel.
        let open =
            engine.open(&path, OpenOptions::write_only().flags(libc::O_TRUNC)).submit().unwrap();
        assert_eq!(engine.wait(Some(SHORT)).unwrap().delivered, 0);
        assert!(!open.is_done() && open.cancel());
        assert_eq!(open.wait().0.unwrap_err().errno(), libc::ECANCELED);
    });
}

/// The error of a request that is cancelled after a part was transferred reports that part: for a
/// cancellation in flight, before the short completion, and for one while the rest waits in the
/// engine.
#[test]
fn inv18_errors_of_cancelled_requests_report_their_bytes() {
    for in_flight in [true, false] {
        let (engine, script) = scripted(4);
        script.cancels(Cancel::TooLate);
        let raw = tempfile::tempfile().unwrap();
        let file = engine.attach(raw.try_clone().unwrap()).unwrap();
        let list = BufList::new(vec![vec![1; 2], vec![2; 8]]).unwrap();
        let write = engine.write_vectored(&file, list, 0).submit().unwrap();
        script.on_transfer(Transfer::Short(3));
        if in_flight {
            write.cancel();
            script.complete(1);
        } else {
            script.on_submit(SubmitStep::Again); // the rest
            script.complete(1);
            engine.turn();
            engine.turn();
            assert_eq!((script.in_flight(), engine.validate().pending), (0, 1));
            write.cancel();
        }
        let error = write.wait().0.unwrap_err();
        assert_eq!((error.errno(), error.transferred()), (libc::ECANCELED, 3), "{in_flight}");
        assert_eq!(std::io::read_to_string(raw).unwrap().as_bytes(), [1, 1, 2], "{in_flight}");
    }
}

#[test]
fn real_backends_cancel_what_waits() {
    on_every_backend(|engine| {
        // Requests in the engine's own queue.
        let plug = engine.plug();
        let nop = engine.nop().submit().unwrap();
        assert!(nop.cancel());
        drop(plug);
        assert_eq!(errno(nop.wait().0), libc::ECANCELED);

        // Requests in the kernel.
        if let Some((file, _writer)) = slow_file(engine) {
            let reads: Vec<_> =
                (0..8).map(|_| engine.read(&file, vec![0; 4], 0).submit().unwrap()).collect();
            assert_eq!(engine.validate().in_flight, 8);
            assert!(reads.iter().all(Operation::cancel));
            for read in reads {
                let (result, buf) = read.wait();
                assert_eq!((errno(result), buf.len()), (libc::ECANCELED, 4));
            }
            // No completion of a cancellation is left.
            assert_quiet(engine, engine);
        }
    });
}

/// There are many more cancellations than the completion ring has room for beside the requests.
#[test]
fn inv01_cancellations_never_overflow_the_completion_ring() {
    let Ok(engine) = Engine::builder().backend(BackendKind::Uring).depth(4).build() else {
        assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none());
        return;
    };
    let (file, mut writer) = slow_file(&engine).unwrap();
    for _ in 0..20 {
        let reads: Vec<_> =
            (0..4).map(|_| engine.read(&file, vec![0; 1], 0).submit().unwrap()).collect();
        // Without a turn in between no completion makes room.
        let tried = (0..50).filter(|_| reads.iter().any(Operation::cancel)).count();
        assert!((1..=8).contains(&tried), "{tried}: the ring has 8 places, 4 of them for requests");
        for read in &reads {
            read.cancel();
        }
        io::Write::write_all(&mut writer, &[1; 4]).unwrap();
        let mut moved = 0;
        for read in reads {
            match read.wait().0 {
                Ok(bytes) => moved += bytes,
                Err(error) => assert_eq!(error.errno(), libc::ECANCELED),
            }
        }
        // Empty the pipe.
        for _ in moved..4 {
            engine.read(&file, vec![0; 1], 0).submit().unwrap().wait().0.unwrap();
        }
    }
    assert!(engine.validate().is_idle());
    assert_eq!(engine.stats().stray, 0);
}

#[test]
fn a_request_ends_at_its_time_wherever_it_is() {
    // A request that waits in the engine, because the device has no room.
    let (engine, script) = scripted(2);
    for _ in 0..1000 {
        script.on_submit(SubmitStep::Again);
    }
    let start = Instant::now();
    let stuck = engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap();
    let never = engine.nop().submit().unwrap();
    assert_eq!(errno(stuck.wait().0), libc::ETIMEDOUT);
    assert!(start.elapsed() >= SHORT);
    assert!(!never.is_done());
    never.cancel();
    assert_eq!(errno(never.wait().0), libc::ECANCELED);
    // A request in flight.
    in_time(|| {
        let (engine, script) = scripted(2);
        let called = Rc::new(Cell::new(None));
        let seen = Rc::clone(&called);
        let done = move |result, ()| seen.set(Some(errno(result)));
        let at = Instant::now() + SHORT;
        engine.nop().cancel_at(at).callback(done).unwrap();
        engine.turn();
        if (script.in_flight(), called.get()) != (1, None) {
            assert!(Instant::now() >= at, "too early");
            return false;
        }
        std::thread::sleep(SHORT);
        engine.turn();
        assert_eq!((script.in_flight(), called.get()), (0, Some(libc::ETIMEDOUT)));
        assert_eq!(script.cancellations(), 1);
        true
    });
    // A request that completes in time: the deadline has no effect.
    in_time(|| {
        let (engine, script) = scripted(2);
        let at = Instant::now() + SHORT;
        let nop = engine.nop().cancel_at(at).submit().unwrap();
        script.complete(1);
        let ended = nop.wait().0;
        if Instant::now() >= at {
            return false;
        }
        ended.unwrap();
        std::thread::sleep(SHORT);
        let next = engine.nop().submit().unwrap(); // the same slot
        engine.turn();
        assert_eq!(script.cancellations(), 0, "cancelled the next user of the slot");
        script.complete(1);
        next.wait().0.unwrap();
        true
    });
}

/// The device refuses to cancel a request whose time has come. There is no second attempt, the next
/// deadline is seen, and the request is not retried when it fails later.
#[test]
fn inv09_a_refused_deadline_leaves_the_next_one() {
    let (engine, script) = scripted(4);
    let fd = engine.as_fd().try_clone_to_owned().unwrap();
    let turn_until = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(readable(&fd, PATIENCE), "no notification");
            engine.turn();
        }
        engine.turn(); // clears the notification of the cancelled request
        assert!(!readable(&fd, Duration::ZERO), "an old deadline keeps the descriptor readable");
    };
    script.cancels(Cancel::Refused);
    let refused = engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap();
    turn_until(&|| script.cancellations() == 1);
    script.cancels(Cancel::Works);
    let next = engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap();
    turn_until(&|| next.is_done());
    assert_eq!((errno(next.wait().0), script.cancellations()), (libc::ETIMEDOUT, 2));
    assert!(!refused.is_done());
    script.on_transfer(Transfer::Fail(libc::EAGAIN));
    script.complete(1);
    engine.turn();
    assert!(refused.is_done(), "it is tried again after its time");
    assert_eq!(errno(refused.wait().0), libc::ETIMEDOUT);
}

/// On every backend a wait sleeps and ends in time, and the descriptor becomes readable.
#[test]
fn inv09_deadlines_notify() {
    on_every_backend(|engine| {
        let Some((file, _writer)) = slow_file(engine) else { return };
        for foreign in [false, true] {
            let start = Instant::now();
            let read = engine.read(&file, vec![0; 4], 0).cancel_at(start + SHORT).submit().unwrap();
            while foreign && !read.is_done() {
                assert!(readable(engine, PATIENCE), "no notification");
                engine.turn();
            }
            engine.wait(Some(PATIENCE)).unwrap(); // its own timeout comes later
            assert_eq!(errno(read.wait().0), libc::ETIMEDOUT);
            assert!(start.elapsed() >= SHORT && start.elapsed() < PATIENCE);
        }
        assert_quiet(engine, engine);
        // One deadline is late and the other one early, in both orders.
        for times in [[SHORT, LONG], [LONG, SHORT]] {
            let _fd = engine.as_fd();
            let reads = times.map(|time| {
                let read = engine.read(&file, vec![0; 4], 0).cancel_at(Instant::now() + time);
                read.submit().unwrap()
            });
            assert!(readable(engine, PATIENCE));
            while reads.iter().all(|read| !read.is_done()) {
                engine.turn();
            }
            reads.iter().for_each(|read| _ = read.cancel());
            let ended = reads.map(|read| errno(read.wait().0));
            let expected =
                times.map(|time| if time == SHORT { libc::ETIMEDOUT } else { libc::ECANCELED });
            assert_eq!(ended, expected);
        }
    });
}

/// The descriptor becomes readable for deadlines that are set after the program asked for it, also
/// for those of requests of other threads, and not for deadlines of completed requests.
#[test]
fn inv09_later_deadlines_notify_a_kept_descriptor() {
    let (engine, script) = scripted(4);
    let fd = engine.as_fd().try_clone_to_owned().unwrap();
    let remote = engine.remote();
    script.cancels(Cancel::Works);
    let told = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(readable(&fd, PATIENCE), "no notification of {what}");
            engine.turn();
            assert!(start.elapsed() < PATIENCE, "{what} never ends");
        }
        let quiet = (0..4).any(|_| {
            engine.turn();
            !readable(&fd, Duration::ZERO)
        });
        assert!(quiet, "{what} keeps the descriptor readable");
    };

    let nop = engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap();
    told("a request's deadline", &|| nop.is_done());
    assert_eq!(errno(nop.wait().0), libc::ETIMEDOUT);

    let over = engine.nop().cancel_at(Instant::now()).submit().unwrap();
    told("a deadline that is over", &|| over.is_done());

    let late =
        |engine: &Engine| drop(engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap());
    remote.call(late).unwrap();
    told("a deadline that a call sets", &|| {
        engine.validate().is_idle() && engine.stats().accepted > 2
    });
}
