//! Callbacks that wait for a turn: a library submits on the engine of its caller.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use aio_reap_test::sim::SubmitStep;

use crate::common::on_every_backend;
use crate::count::count;
use crate::readable::readable;
use crate::scripted::scripted;

/// A callback that panics leaves the next one ready, and the kernel refuses the new request.
#[test]
fn inv22_a_submission_on_turn_delivers_neither_what_is_ready_nor_what_is_refused() {
    let (engine, script) = scripted(128);
    let (before, new) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    engine.nop().callback(|_, ()| panic!("a callback of the program")).unwrap();
    engine.nop().callback(count(&before)).unwrap();
    script.complete(2);
    assert!(catch_unwind(AssertUnwindSafe(|| engine.turn())).is_err());
    script.on_submit(SubmitStep::Refuse(0, libc::EINVAL));
    let seen = Rc::clone(&new);
    let refused = move |result: Result<usize, aio_reap::RequestError>, ()| {
        assert_eq!(result.unwrap_err().errno(), libc::EINVAL);
        seen.set(1);
    };
    engine.nop().callback_on_turn(refused).unwrap();
    assert_eq!((before.get(), new.get()), (0, 0));
    assert!(readable(&engine, Duration::ZERO), "no event loop would turn the engine");
    assert_eq!(engine.turn().delivered, 2);
    assert_eq!((before.get(), new.get()), (1, 1));
    engine.turn();
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    assert!(!readable(fd, Duration::ZERO));
    script.on_submit(SubmitStep::Refuse(0, libc::EINVAL));
    engine.nop().callback_on_turn(|_, ()| ()).unwrap();
    assert!(readable(fd, Duration::ZERO), "the error would wait for the next event");
}

/// The device may complete a request inside the submission.
#[test]
fn inv22_what_completes_at_once_waits_for_the_turn() {
    on_every_backend(|engine| {
        let ran = Rc::new(Cell::new(0));
        for nth in 1..=8 {
            engine.nop().callback_on_turn(count(&ran)).unwrap();
            assert_eq!(ran.get(), 0, "{nth}");
        }
        engine.drain().unwrap();
        assert_eq!(ran.get(), 8);
    });
}
