//! Cancellation of requests with callbacks and in queues.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::common::{fifo, on_every_backend};
use aio_reap::{BackendKind, CompletionQueue, Engine, OpenOptions, Operation, ReapMode};

use crate::readable::readable;

const CANCELLED: i32 = libc::ECANCELED;

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

/// The only thread of the pool waits for the other end of a FIFO, so no other job has begun.
#[test]
fn a_request_that_waits_for_a_thread_is_cancelled_and_notifies() {
    let threads = Engine::builder().backend(BackendKind::Threads).threads(1);
    let engine = threads.reap_mode(ReapMode::OnTurn).build().unwrap();
    let (_folder, path) = fifo();
    let open = engine.open(&path, OpenOptions::read_only()).submit().unwrap();
    let nops = [(); 3].map(|()| engine.nop().submit().unwrap());
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    let quiet = !readable(fd, Duration::ZERO) && nops[1].cancel();
    let notified = readable(fd, Duration::ZERO);
    engine.turn();
    let done = nops.each_ref().map(Operation::is_done);
    // Before a panic, because the drop of the engine waits for the open.
    std::fs::File::options().write(true).open(&path).unwrap();
    assert!(quiet && notified && !nops[1].cancel());
    assert_eq!(done, [false, true, false]);
    let errno = |nop: Operation<()>| nop.wait().0.err().map(|error| error.errno());
    assert_eq!(nops.map(errno), [None, Some(CANCELLED), None]);
    open.wait().0.unwrap();
}

/// A job that finds every thread of the pool busy starts one more.
#[test]
fn a_busy_thread_does_not_delay_the_next_request() {
    let threads = Engine::builder().backend(BackendKind::Threads).threads(2);
    let engine = threads.build().unwrap();
    let (_folder, path) = fifo();
    let open = engine.open(&path, OpenOptions::read_only()).submit().unwrap();
    let nop = engine.nop().submit().unwrap();
    if !nop.is_done() {
        engine.wait(Some(Duration::from_secs(60))).unwrap();
    }
    let done = nop.is_done();
    // Before a panic, because the drop of the engine waits for the open.
    std::fs::File::options().write(true).open(&path).unwrap();
    assert!(done, "it waits for the open");
    open.wait().0.unwrap();
}
