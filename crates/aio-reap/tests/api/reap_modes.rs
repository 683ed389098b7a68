//! Every reap mode, on the scripted device and on io_uring.

use std::cell::Cell;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::count::count;
use crate::readable::readable;
use crate::scripted::{scripted, scripted_by};
use aio_reap::{BackendKind, CompletionQueue, Engine, ReapMode};
use aio_reap_test::sim::{Script, SubmitStep};

fn in_mode(mode: ReapMode) -> (Engine, Script) {
    scripted_by(Engine::builder().depth(4).reap_mode(mode))
}

/// A submission reaps, but not in the mode `OnTurn`. In that mode the descriptor stays readable until
/// a turn reaps.
#[test]
fn inv05_on_turn_leaves_completions_to_the_next_turn() {
    for mode in [ReapMode::OnTurn, ReapMode::AfterSubmit] {
        let (engine, script) = in_mode(mode);
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
    let (engine, script) = in_mode(ReapMode::OnTurn);
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

/// The submission of a wait may sleep only if nothing but a completion can end the wait. A read that waits for
/// its pipe is held back until the wait.
#[test]
fn a_wait_that_submits_ends_for_everything_that_ends_a_wait() {
    const SHORT: Duration = Duration::from_millis(20);
    let built = Engine::builder().backend(BackendKind::Uring).depth(4).build();
    let Ok(engine) = built else { return };
    let (reader, _writer) = io::pipe().unwrap();
    let pipe = engine.attach(reader).unwrap();
    for what in ["a result to deliver", "a timeout", "a deadline", "a call"] {
        let _plug = engine.plug();
        let is_late = what == "a deadline";
        let mut read = engine.read(&pipe, vec![0], 0);
        if is_late {
            read = read.cancel_at(Instant::now() + SHORT);
        }
        let read = read.submit().unwrap();
        if what == "a result to deliver" {
            assert!(engine.nop().submit().unwrap().cancel());
        }
        let call = (what == "a call").then(|| {
            let remote = engine.remote();
            std::thread::spawn(move || {
                std::thread::sleep(SHORT);
                remote.call(|engine| _ = engine.nop().callback(|_, ()| ()).unwrap()).unwrap();
            })
        });
        let turn = engine.wait((what == "a timeout").then_some(SHORT)).unwrap();
        assert_eq!(turn.delivered, usize::from(what != "a timeout"), "{what}");
        assert_eq!(read.is_done(), is_late, "{what}");
        read.cancel();
        let errno = if is_late { libc::ETIMEDOUT } else { libc::ECANCELED };
        assert_eq!(read.wait().0.unwrap_err().errno(), errno, "{what}");
        call.into_iter().for_each(|thread| thread.join().unwrap());
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

/// Blocks its engine when it is dropped, and stores whether a retry is due then.
struct BlocksOnDrop<'e>(&'e Engine, &'e Script, &'e Cell<bool>);

impl Drop for BlocksOnDrop<'_> {
    fn drop(&mut self) {
        self.1.on_submit(SubmitStep::Again);
        drop(self.0.nop().submit().unwrap());
        self.2.set(catch_unwind(AssertUnwindSafe(|| self.0.validate())).is_ok());
    }
}

#[test]
fn inv04_an_engine_that_is_blocked_during_a_panic_retries() {
    let (engine, script) = scripted(128);
    let retries = Cell::new(false);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _blocks = BlocksOnDrop(&engine, &script, &retries);
        panic!("on purpose");
    }));
    assert!(panicked.is_err() && retries.get(), "a wait in the drop would sleep for ever");
}
