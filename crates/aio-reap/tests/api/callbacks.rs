//! Callbacks that use the engine that runs them: they submit, wait, nest, panic, or make requests
//! without end.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::common::on_every_backend;
use crate::count::count;
use crate::readable::readable;
use crate::scripted::scripted;
use aio_reap::{CompletionQueue, Engine, File};
use aio_reap_test::sim::{Script, SubmitStep};

/// Callbacks and wake-ups run in the order of the completions, not of the requests.
#[test]
fn inv02_callbacks_run_in_the_order_of_the_reap() {
    let (engine, script) = scripted(8);
    let log = Rc::new(RefCell::new(Vec::new()));
    let plug = engine.plug();
    for id in 0..5 {
        let log = Rc::clone(&log);
        let done = move |_: Result<usize, _>, ()| log.borrow_mut().push(id);
        match id % 2 {
            0 => engine.nop().callback(done).unwrap(),
            _ => engine.nop().callback_on_turn(done).unwrap(),
        };
    }
    drop(plug);
    // Of the requests left: the third, the first, the last, the last.
    [2, 0, 2, 1].into_iter().for_each(|nth| _ = script.complete_nth(nth));
    engine.turn();
    assert_eq!(*log.borrow(), [2, 0, 4, 3]);
    engine.drain().unwrap();
    assert_eq!(*log.borrow(), [2, 0, 4, 3, 1]);
}

/// The reap itself fills queues: a callback finds there the requests that completed after its own,
/// also those of its own turn, and a wait returns for them.
#[test]
fn inv07_queues_are_filled_before_the_first_callback() {
    let (engine, script) = scripted(8);
    let engine = Rc::new(engine);
    let queue = CompletionQueue::new();
    let plug = engine.plug();
    let (inner, device, tokens) = (Rc::clone(&engine), script.clone(), queue.clone());
    let called = Rc::new(Cell::new(0));
    let nested = Rc::clone(&called);
    let callback = move |result: Result<usize, aio_reap::RequestError>, ()| {
        result.unwrap();
        assert_eq!(tokens.pop().map(|done| done.token), Some(1));
        inner.nop().enqueue(&tokens, 2).unwrap();
        device.on_submit(SubmitStep::Inline);
        assert_eq!(inner.turn().delivered, 1);
        assert_eq!(tokens.pop().map(|done| done.token), Some(2));
        let submit = || {
            device.on_submit(SubmitStep::Inline);
            inner.nop().callback(count(&nested)).unwrap();
        };
        submit();
        assert_eq!((inner.wait(None).unwrap().delivered, nested.get()), (1, 1));
        // This callback still runs after the wait, so the submission delivers nothing.
        submit();
        assert_eq!(nested.get(), 1);
    };
    engine.nop().callback(callback).unwrap();
    engine.nop().enqueue(&queue, 1).unwrap();
    script.on_submit(SubmitStep::Inline);
    drop(plug);
    engine.turn();
    assert!(queue.is_empty() && engine.validate().is_idle());
    assert_eq!(called.get(), 2);

    engine.nop().enqueue(&queue, 3).unwrap();
    assert_eq!(engine.wait(None).unwrap().delivered, 1);
    assert_eq!((queue.len(), engine.stats().completed), (1, 6));
}

/// Requests that need no device, or that it completes inside their submission, each made by the callback of
/// the one before. The stack stays flat.
#[test]
fn inv14_requests_that_end_at_once_cannot_loop_for_ever() {
    /// Reads `len` bytes.
    fn next(engine: &Rc<Engine>, file: &File, script: &Script, len: usize, made: &Rc<Cell<u32>>) {
        made.set(made.get() + 1);
        assert!(made.get() < 1000, "the call does not return");
        if len > 0 {
            script.on_submit(SubmitStep::Inline); // the device must not see an empty read
        }
        let (inner, made) = (Rc::downgrade(engine), Rc::clone(made));
        let (again, device) = (file.clone(), script.clone());
        let done = move |_: Result<usize, aio_reap::RequestError>, _| {
            if let Some(engine) = inner.upgrade() {
                next(&engine, &again, &device, len, &made);
            }
        };
        let _ = engine.read(file, vec![0; len], 0).callback(done);
    }

    for len in [0, 1] {
        let (engine, script) = scripted(4);
        let engine = Rc::new(engine);
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let made = Rc::new(Cell::new(0));
        next(&engine, &file, &script, len, &made);
        assert_eq!(made.get(), 2, "{len}");
        assert!(readable(&engine, Duration::ZERO), "the second waits for a turn");
        let turn = engine.turn();
        assert_eq!((turn.delivered, turn.is_idle(), made.get()), (1, false, 3), "{len}");
    }
}

/// The requests of one poll of `block_on` are one batch, and a future may still wait by blocking.
#[test]
fn requests_of_one_poll_of_block_on_are_a_batch() {
    let (engine, script) = scripted(64);
    let both = engine.block_on(async {
        let reads: Vec<_> = (0..20).map(|_| engine.nop().submit().unwrap()).collect();
        assert!(script.batches().is_empty());
        for read in reads {
            read.await.0.unwrap();
        }
        engine.nop().submit().unwrap().wait().0.unwrap();
    });
    both.unwrap();
    assert_eq!(script.batches()[..2], [20, 1]);
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
