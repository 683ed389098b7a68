//! Every reap mode, on the scripted device and on the real backends.
#![cfg(not(offlock_model))]

use crate::count;
use crate::readable;

use std::cell::Cell;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use aio_reap::{BackendKind, CompletionQueue, Engine, ReapMode};
use aio_reap_test::Build;
use aio_reap_test::sim::{Script, SubmitStep, Transfer};
use count::count;
use readable::readable;

/// A guess; much longer than all retries of one request.
const PATIENCE: Duration = Duration::from_secs(60);

const REAL: [BackendKind; 3] = [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];

fn scripted(mode: ReapMode) -> (Engine, Script) {
    let script = Script::new();
    (Engine::builder().depth(4).reap_mode(mode).build_sim(&script).unwrap(), script)
}

/// A submission reaps in every mode but `OnTurn`. In that mode the descriptor stays readable until
/// a turn reaps.
#[test]
fn inv05_on_turn_leaves_completions_to_the_next_turn() {
    for mode in [ReapMode::OnTurn, ReapMode::AfterSubmit, ReapMode::Poll] {
        let (engine, script) = scripted(mode);
        assert_eq!(engine.reap_mode(), mode);
        let called = Rc::new(Cell::new(0));
        script.on_submit(SubmitStep::Inline);
        engine.nop().callback(count(&called)).unwrap();
        let at_once = usize::from(mode != ReapMode::OnTurn);
        assert_eq!((called.get(), script.visible()), (at_once, 1 - at_once), "{mode:?}");
        if mode == ReapMode::OnTurn {
            assert!(readable(&engine, Duration::ZERO), "the completion does not notify");
        }
        engine.turn();
        assert_eq!(called.get(), 1, "{mode:?}");
        assert!(engine.validate().is_idle());
    }
}

/// Requests that need no kernel are delivered in every mode.
#[test]
fn on_turn_delivers_what_the_kernel_refused() {
    let (engine, script) = scripted(ReapMode::OnTurn);
    script.on_submit(SubmitStep::Refuse(0, libc::EIO));
    let errno = Rc::new(Cell::new(0));
    let seen = Rc::clone(&errno);
    let done = move |result: Result<usize, aio_reap::RequestError>, ()| {
        seen.set(result.unwrap_err().errno());
    };
    engine.nop().callback(done).unwrap();
    assert_eq!(errno.get(), libc::EIO);
}

/// A wait submits the requests that a plug holds back and sleeps, whether or not the first one is
/// complete by then.
#[test]
fn waiting_submits_what_is_held_back_and_returns_with_the_first() {
    let built = Engine::builder().backend(BackendKind::Uring).depth(4).build();
    let Ok(engine) = built else { return };
    let (reader, mut writer) = io::pipe().unwrap();
    let pipe = engine.attach(reader).unwrap();
    let queue = CompletionQueue::new();
    let _plug = engine.plug();
    for token in 0..3 {
        engine.read(&pipe, vec![0], 0).enqueue(&queue, token).unwrap();
    }
    let (ask, asked) = mpsc::channel();
    let bytes = std::thread::spawn(move || {
        for byte in asked {
            std::thread::sleep(Duration::from_millis(20)); // usually it sleeps by then
            writer.write_all(&[byte]).unwrap();
        }
    });
    for byte in 0..3 {
        ask.send(byte).unwrap();
        assert_eq!(engine.wait(None).unwrap().delivered, 1);
        assert_eq!(queue.pop().unwrap().buf, [byte]);
    }
    assert!(engine.wait(None).unwrap().is_idle(), "an idle engine does not sleep");
    assert!(engine.validate().is_idle() && engine.stats().waits >= 1);
    drop(ask);
    bytes.join().unwrap();
}

/// `Poll` never sleeps while the kernel has a request.
#[test]
fn polling_peeks_and_the_other_modes_sleep() {
    for (mode, peeks, sleeps) in [
        (ReapMode::Poll, true, false),
        (ReapMode::AfterSubmit, false, true),
        (ReapMode::OnTurn, false, true),
    ] {
        let (engine, script) = scripted(mode);
        let turn = {
            let _nop = engine.nop().submit().unwrap();
            engine.wait(None).unwrap()
        };
        assert_eq!((turn.delivered, turn.in_flight), (1, 0), "{mode:?}");
        assert_eq!((script.peeks() > 0, script.waits() > 0), (peeks, sleeps), "{mode:?}");
    }
}

/// A peek finds the last completion, which is an EAGAIN. The engine must retry.
#[test]
fn inv04_eagain_found_by_a_peek_is_retried() {
    let (engine, script) = scripted(ReapMode::Poll);
    script.on_transfer(Transfer::Fail(libc::EAGAIN));
    let nop = engine.nop().submit().unwrap();
    let start = Instant::now();
    engine.wait(Some(Duration::from_secs(60))).unwrap();
    assert!(nop.is_done(), "the request is not retried");
    nop.wait().0.unwrap();
    assert!(start.elapsed() >= Duration::from_micros(100), "without a delay");
}

/// A wait with a timeout ends in time, and the request is not lost.
#[test]
fn polling_ends_with_the_timeout() {
    for kind in REAL {
        let Ok(engine) = Engine::builder().backend(kind).reap_mode(ReapMode::Poll).build() else {
            continue;
        };
        let (reader, writer) = io::pipe().unwrap();
        let file = engine.attach(reader).unwrap();
        // A pipe is not seekable: `pread` in the thread pool fails, and io_uring's read waits for
        // data.
        let read = engine.read(&file, vec![0; 1], 0).submit().unwrap();
        let start = Instant::now();
        let turn = engine.wait(Some(Duration::from_millis(20))).unwrap();
        if turn.in_flight == 1 {
            assert!(start.elapsed() >= Duration::from_millis(20), "{kind}: too early");
            assert_eq!(engine.stats().waits, 0, "{kind} slept");
        } else {
            assert!(kind != BackendKind::Uring, "the read of an empty pipe ended");
        }
        drop(writer);
        let _ = read.wait();
        assert!(engine.validate().is_idle());
    }
}

/// A polling engine sleeps if no request is in the kernel and only the retry timer can help.
#[test]
fn polling_sleeps_while_blocked_with_nothing_in_flight() {
    let (engine, script) = scripted(ReapMode::Poll);
    script.on_submit(SubmitStep::Again);
    script.on_submit(SubmitStep::Again);
    let nop = engine.nop().submit().unwrap();
    nop.wait().0.unwrap(); // the retry timer wakes it
    assert!(script.peeks() > 0, "once it was in flight");
}

/// A wake-up of another thread ends a poll although no request completes.
#[test]
fn a_wake_up_of_another_thread_ends_polling() {
    let Ok(engine) =
        Engine::builder().backend(BackendKind::Uring).reap_mode(ReapMode::Poll).build()
    else {
        assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none());
        return;
    };
    let (reader, writer) = io::pipe().unwrap();
    let file = engine.attach(reader).unwrap();
    let read = engine.read(&file, vec![0; 1], 0).submit().unwrap(); // a request in flight, so that it polls
    let mut polls = 0;
    let woken = engine.block_on(std::future::poll_fn(|context| {
        polls += 1;
        if polls == 1 {
            let waker = context.waker().clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(10));
                waker.wake();
            });
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(())
    }));
    woken.unwrap();
    drop(writer);
    assert_eq!(read.wait().0.unwrap(), 0);
}

/// Every real backend completes every request in every mode.
#[test]
fn every_backend_works_in_every_mode() {
    for kind in REAL {
        let builder = Engine::builder().depth(8).capacity(64).backend(kind);
        let engine = match builder.build() {
            Ok(engine) => engine,
            Err(error) => {
                assert!(kind != BackendKind::Threads, "{error}");
                assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "{kind}: {error}");
                continue;
            }
        };
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let queue = CompletionQueue::new();
        for mode in [ReapMode::OnTurn, ReapMode::AfterSubmit, ReapMode::Poll] {
            engine.set_reap_mode(mode);
            let waits = engine.stats().waits;
            for round in 0..20u64 {
                let plug = engine.plug();
                for block in 0..16u64 {
                    let bytes = vec![(round + block) as u8; 512];
                    engine.write(&file, bytes, block * 512).enqueue(&queue, block).unwrap();
                }
                drop(plug);
                let mut done = 0u32;
                while done != 0xffff {
                    engine.wait(None).unwrap();
                    while let Some(completion) = queue.pop() {
                        assert_eq!(completion.result.unwrap(), 512);
                        assert_eq!(done & 1 << completion.token, 0, "delivered twice");
                        done |= 1 << completion.token;
                    }
                }
            }
            if mode == ReapMode::Poll {
                assert_eq!(engine.stats().waits, waits, "{kind} slept");
            }
            assert!(engine.validate().is_idle());
        }
    }
}

/// One turn reaps every completion.
#[test]
fn inv05_one_turn_reaps_everything_that_is_ready() {
    const READS: usize = 100;
    let Ok(engine) = Engine::builder().backend(BackendKind::Uring).build() else {
        assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none());
        return;
    };
    let called = Rc::new(Cell::new(0));
    let mut writers = Vec::new();
    for _ in 0..READS {
        let (reader, writer) = io::pipe().unwrap();
        let file = engine.attach(reader).unwrap();
        let counter = Rc::clone(&called);
        let done = move |result: Result<usize, aio_reap::RequestError>, _| {
            assert_eq!(result.unwrap(), 1);
            counter.set(counter.get() + 1);
        };
        engine.read(&file, vec![0; 1], 0).callback(done).unwrap();
        writers.push(writer);
    }
    assert_eq!(engine.validate().in_flight, READS);
    for writer in &mut writers {
        io::Write::write_all(writer, &[7]).unwrap();
    }
    assert!(readable(&engine, Duration::ZERO), "no notification");
    let turn = engine.turn();
    assert_eq!((turn.delivered, called.get()), (READS, READS));
}

/// A retry comes also while another request stays in the kernel.
#[test]
fn inv04_a_request_behind_one_that_never_completes_is_retried() {
    let (engine, script) = scripted(ReapMode::AfterSubmit);
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    assert!(!readable(fd, Duration::ZERO));
    let _never = engine.nop().submit().unwrap();
    let nop = engine.nop().submit().unwrap();
    script.on_transfer(Transfer::Fail(libc::EAGAIN));
    script.complete_nth(1);
    engine.turn();
    engine.validate();
    assert!(readable(fd, PATIENCE), "no turn would retry after an EAGAIN");
    engine.turn();
    assert_eq!(script.in_flight(), 2);
    script.complete_nth(1);
    engine.turn();
    nop.wait().0.unwrap();
    script.on_submit(SubmitStep::Again);
    let _refused = engine.nop().submit().unwrap();
    engine.validate();
    assert!(readable(fd, PATIENCE), "no turn would submit again");
    engine.turn();
    assert_eq!(script.in_flight(), 2);
}
