//! Cancellation of requests with callbacks, in queues, and of other threads.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use aio_reap::{CompletionQueue, Engine, RequestError, SharedFile};
use aio_reap_test::Build;
use aio_reap_test::scripted::{Cancel, Script};
use common::on_every_backend;

use crate::common;
use crate::readable::readable;

const CANCELLED: Option<i32> = Some(libc::ECANCELED);

#[test]
fn inv21_an_id_cancels_its_request_and_no_later_one() {
    on_every_backend(|engine| {
        let results = Rc::new(RefCell::new(Vec::new()));
        let queue = CompletionQueue::new();
        let plug = engine.plug();
        let to = Rc::clone(&results);
        let called = engine.nop().callback(move |result, ()| {
            to.borrow_mut().push(result.unwrap_err().raw_os_error());
        });
        let (called, queued) = (called.unwrap(), engine.nop().enqueue(&queue, 7).unwrap());
        let other = engine.nop().submit().unwrap();
        assert!(called != queued && engine.cancel(called) && engine.cancel(queued));
        assert!(!engine.cancel(called), "it has its result");
        drop(plug);
        engine.drain().unwrap();
        assert_eq!(other.wait().0.unwrap(), 0);
        assert_eq!(*results.borrow(), [CANCELLED]);
        assert_eq!(queue.pop().unwrap().result.unwrap_err().raw_os_error(), CANCELLED);
        // The slots are used again.
        let plug = engine.plug();
        for token in 0..64 {
            assert!(![called, queued].contains(&engine.nop().enqueue(&queue, token).unwrap()));
        }
        assert!(!engine.cancel(called) && !engine.cancel(queued));
        drop(plug);
        engine.drain().unwrap();
        assert!(std::iter::from_fn(|| queue.pop()).all(|done| done.result.unwrap() == 0));
    });
}

#[test]
fn inv21_an_id_cancels_a_request_in_flight() {
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    let queue = CompletionQueue::new();
    let first = engine.nop().enqueue(&queue, 1).unwrap();
    engine.nop().enqueue(&queue, 2).unwrap();
    assert_eq!(script.in_flight(), 2);
    assert!(engine.cancel(first));
    engine.turn();
    let done = queue.pop().unwrap();
    assert_eq!((done.token, done.result.unwrap_err().raw_os_error()), (1, CANCELLED));
    assert_eq!((queue.len(), script.in_flight()), (0, 1));
}

#[test]
fn inv21_remote_requests_are_cancelled_wherever_they_wait() {
    let script = Script::new();
    let builder = Engine::builder().depth(1).capacity(2).remote_capacity(4);
    let engine = builder.build_scripted(&script).unwrap();
    let remote = engine.remote();
    let send = || remote.nop().submit().unwrap();
    let (in_flight, pending, without_slot) = (send(), send(), send());
    engine.turn();
    assert_eq!(script.in_flight(), 1);
    let in_mailbox = send();
    // The last two get their slots when those in front of them are done.
    for operation in [&in_mailbox, &without_slot, &pending, &in_flight] {
        assert!(operation.cancel() && operation.cancel());
    }
    engine.drain().unwrap();
    for operation in [in_flight, pending, without_slot, in_mailbox] {
        assert!(operation.is_done() && !operation.cancel());
        assert_eq!(operation.wait().0.unwrap_err().raw_os_error(), CANCELLED);
    }
    assert_eq!(script.log().len(), 1);
    // The slots of the mailbox are used again, and the marks are gone.
    let again = [send(), send(), send(), send()];
    engine.drain().unwrap();
    assert!(again.into_iter().all(|operation| operation.wait().0.is_ok()));
}

/// io_uring refuses cancellations while its ring is full.
#[test]
fn inv21_a_refused_remote_cancellation_is_tried_again() {
    let script = Script::new();
    let engine = Engine::builder().build_scripted(&script).unwrap();
    assert!(!readable(&engine, Duration::ZERO)); // watched from here on
    let remote = engine.remote();
    let send = || remote.nop().submit().unwrap();
    let (operation, completes) = (send(), send());
    engine.turn();
    script.cancels(Cancel::Refused);
    assert!(operation.cancel() && operation.cancel() && completes.cancel());
    engine.turn();
    let refused = script.cancellations();
    engine.turn();
    assert!(script.cancellations() > refused && script.in_flight() == 2);
    assert!(!readable(&engine, Duration::ZERO), "the engine would turn without a pause");
    assert!(script.complete_nth(1));
    engine.turn();
    script.cancels(Cancel::Works);
    engine.turn();
    assert_eq!(script.in_flight(), 0, "no second request was needed");
    engine.turn();
    assert_eq!(operation.wait().0.unwrap_err().raw_os_error(), CANCELLED);
    assert!(completes.wait().0.is_ok());
    // No request is left to be cancelled, and none that has the slot of such a request.
    let attempts = script.cancellations();
    let again = [send(), send()];
    engine.drain().unwrap();
    assert_eq!(script.cancellations(), attempts);
    assert!(again.into_iter().all(|operation| operation.wait().0.is_ok()));
}

/// A sleeping engine is woken by a cancellation.
#[test]
fn inv21_a_cancellation_wakes_the_engine() {
    let (to_main, from_engine) = std::sync::mpsc::channel();
    let engine = thread::spawn(move || {
        let engine = Engine::builder().depth(1).build().unwrap();
        to_main.send(engine.remote()).unwrap();
        engine.serve().unwrap();
    });
    let remote = from_engine.recv().unwrap();
    for _ in 0..200 {
        let (reader, _writer) = std::io::pipe().unwrap();
        let pipe = SharedFile::new(reader).unwrap();
        let read = remote.read(&pipe, vec![0; 1], 0).submit().unwrap();
        if read.is_done() {
            break; // the backend has no requests on pipes
        }
        thread::yield_now();
        read.cancel();
        let errno = read.wait().0.unwrap_err().errno();
        assert!(matches!(errno, libc::ECANCELED | libc::ESPIPE), "{errno}");
    }
    drop(remote);
    engine.join().unwrap();
}

/// The bytes show which requests the kernel saw: none that was cancelled behind a plug, and every
/// other one once.
#[test]
fn inv21_a_cancelled_request_behind_a_plug_never_reaches_the_kernel() {
    on_every_backend(|engine| {
        let raw = tempfile::tempfile().unwrap();
        raw.set_len(8).unwrap();
        let file = engine.attach(raw.try_clone().unwrap()).unwrap();
        let queue = CompletionQueue::new();
        for round in 1..4u8 {
            let plug = engine.plug();
            let ids: Vec<_> = (0..8)
                .map(|at| engine.write(&file, vec![round], at).enqueue(&queue, at).unwrap())
                .collect();
            assert!(engine.cancel(ids[usize::from(round)]) && engine.cancel(ids[6]));
            engine.validate();
            // Behind the requests that were taken back.
            engine.write(&file, vec![round + 10], 6).enqueue(&queue, 8).unwrap();
            drop(plug);
            engine.drain().unwrap();
            let mut bytes = [0; 8];
            raw.read_exact_at(&mut bytes, 0).unwrap();
            let mut expected = [round; 8];
            (expected[usize::from(round)], expected[6]) = (round - 1, round + 10);
            assert_eq!(bytes, expected);
            let results = std::iter::from_fn(|| queue.pop()).map(|done| done.result.is_err());
            assert_eq!(results.map(usize::from).collect::<Vec<_>>().iter().sum::<usize>(), 2);
            assert!(queue.is_empty());
        }
    });
}

#[test]
fn inv21_a_remote_callback_is_cancelled_wherever_it_waits_and_no_later_one() {
    let script = Script::new();
    let builder = Engine::builder().depth(1).capacity(1).remote_capacity(3);
    let engine = builder.build_scripted(&script).unwrap();
    let remote = engine.remote();
    let results = Arc::new(Mutex::new(Vec::new()));
    let send = |number: u32| {
        let to = Arc::clone(&results);
        let done = move |result: Result<usize, RequestError>, ()| {
            to.lock().unwrap().push((number, result.err().and_then(|e| e.raw_os_error())));
        };
        remote.nop().callback(done).unwrap()
    };
    let (in_flight, without_slot) = (send(0), send(1));
    engine.turn();
    assert_eq!(script.in_flight(), 1);
    let in_mailbox = send(2);
    for id in [in_flight, without_slot, in_mailbox] {
        assert!(remote.clone().cancel(id) && remote.cancel(id));
    }
    engine.drain().unwrap();
    let mut ended = std::mem::take(&mut *results.lock().unwrap());
    ended.sort_unstable();
    assert_eq!(ended, [(0, CANCELLED), (1, CANCELLED), (2, CANCELLED)]);
    // The places are used again.
    let again = [send(3), send(4), send(5)];
    for id in [in_flight, without_slot, in_mailbox] {
        assert!(!again.contains(&id) && !remote.cancel(id));
    }
    while results.lock().unwrap().len() < 3 {
        engine.turn();
        script.complete(1);
    }
    assert_eq!(*results.lock().unwrap(), [(3, None), (4, None), (5, None)]);
    assert!(again.iter().all(|&id| !remote.cancel(id)));
    engine.validate();
}
