//! The engine's invariants on the scripted device: a state machine that checks a model after every
//! step, and a test for each invariant.

use std::cell::Cell;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::common::{engines, small};
use crate::count::count;
use crate::model::{self, Device};
use crate::readable::readable;
use crate::scripted::{scripted, scripted_by};
use aio_reap::{CompletionQueue, Engine, File};
use aio_reap_test::sim::{SubmitStep, Transfer};
use proptest::collection::vec;
use proptest::prelude::*;

/// `OFFLOCK_SOAK` multiplies the number of cases.
fn config(cases: u32) -> ProptestConfig {
    let soak = std::env::var("OFFLOCK_SOAK").ok();
    let cases = cases * soak.map_or(1, |times| times.parse().expect("a number"));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn temp_file(engine: &Engine, bytes: &[u8]) -> (fs::File, File) {
    let raw = tempfile::tempfile().unwrap();
    raw.write_all_at(bytes, 0).unwrap();
    let file = engine.attach(raw.try_clone().unwrap()).unwrap();
    (raw, file)
}

proptest! {
    #![proptest_config(config(100))]

    /// Checks the invariants that `INVARIANTS.md` names after each of 450 to 900 steps. `model` documents
    /// what is compared.
    #[test]
    fn inv01_counts_add_up_after_every_step(input in vec(any::<u8>(), 1804..3604)) {
        let steps = model::run(&input);
        prop_assert!(steps >= 200);
    }

    /// However submissions end, the device sees requests in the order in which they were queued,
    /// and each completes once.
    #[test]
    fn inv02_device_sees_enqueue_order_and_each_completes_once(
        depth in 1usize..9,
        steps in vec((0usize..5, 0u8..5), 0..40),
        groups in vec(1usize..12, 20..40),
    ) {
        let builder = Engine::builder().depth(depth).capacity(1024);
        let (engine, script) = scripted_by(builder);
        let (_raw, file) = temp_file(&engine, &[]);
        for (count, kind) in steps {
            script.on_submit(match kind {
                0 => SubmitStep::Again,
                1 => SubmitStep::Inline,
                2 => SubmitStep::Refuse(count, libc::EIO),
                _ => SubmitStep::Accept(count),
            });
        }
        let queue = CompletionQueue::new();
        let mut made = 0u64;
        for group in groups {
            let _plug = engine.plug();
            for _ in 0..group {
                engine.read(&file, vec![0; 1], made).enqueue(&queue, made).unwrap();
                made += 1;
            }
            script.complete(group / 2);
        }
        engine.drain().unwrap();
        let mut done = vec![0; made as usize];
        let mut refused = Vec::new();
        while let Some(completion) = queue.pop() {
            done[completion.token as usize] += 1;
            if completion.result.is_err() {
                refused.push(completion.token);
            }
        }
        prop_assert!(done.iter().all(|&times| times == 1));
        refused.sort_unstable();
        let expected: Vec<_> = (0..made).filter(|at| refused.binary_search(at).is_err()).collect();
        prop_assert_eq!(script.log(), expected);
    }
}

proptest! {
    #![proptest_config(config(8))]

    /// Runs the model on every backend, and on a simulated device with faults.
    #[test]
    fn inv15_every_backend_does_what_the_model_does(
        input in vec(any::<u8>(), 804..2404),
        seed: u64,
    ) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        for engine in engines(small()) {
            model::run_on(Device::Kernel(engine.backend()), folder, &input);
        }
        model::run_on(model::faulty(seed), Path::new("/dev/shm"), &input);
    }
}

/// Replays the inputs that the fuzzer kept.
#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/aio_reap");
    testkit::corpus::replay(corpus, 40, 10_000, model::run);
}

#[test]
fn inv03_hard_error_hits_only_the_head() {
    for in_flight in [0, 3] {
        for (at, errno) in [(0, libc::EIO), (1, libc::EINVAL), (4, libc::ENOSPC)] {
            let (engine, script) = scripted(16);
            let (_raw, file) = temp_file(&engine, &[]);
            let queue = CompletionQueue::new();
            for token in 0..in_flight {
                engine.read(&file, vec![0; 1], 0).enqueue(&queue, 100 + token).unwrap();
            }
            assert_eq!(script.in_flight(), in_flight as usize);
            script.on_submit(SubmitStep::Refuse(at, errno));
            let plug = engine.plug();
            for token in 0..5 {
                engine.read(&file, vec![0; 1], 0).enqueue(&queue, token).unwrap();
            }
            drop(plug);
            // The head fails at once, and the requests behind it are in flight.
            let failed = queue.pop().unwrap();
            assert_eq!(failed.result.unwrap_err().errno(), errno);
            assert_eq!(failed.token, at as u64);
            assert_eq!(script.in_flight(), in_flight as usize + 4);
            engine.validate();
            engine.drain().unwrap();
            let mut good: Vec<_> = std::iter::from_fn(|| queue.pop())
                .map(|done| done.result.map(|_| done.token).unwrap())
                .filter(|&token| token < 100)
                .collect();
            good.push(at as u64);
            good.sort_unstable();
            assert_eq!(good, [0, 1, 2, 3, 4]);
        }
    }
}

/// If the device has no room, the descriptor becomes readable by itself, after a growing delay, also beside a
/// request in flight.
#[test]
fn inv04_blocked_engine_notifies_again_with_back_off() {
    let (engine, script) = scripted(4);
    let done = Rc::new(Cell::new(0));
    const TIMES: usize = 9;
    for held in 0..2 {
        if held == 1 {
            // The request of the first round completes, which resets the delay. This one stays in flight.
            engine.nop().callback(count(&done)).unwrap();
            script.complete(1);
            engine.turn();
        }
        (0..TIMES).for_each(|_| script.on_submit(SubmitStep::Again));
        let start = Instant::now();
        engine.nop().callback(count(&done)).unwrap();
        let mut retries = 0;
        while script.in_flight() == held {
            assert!(readable(&engine, Duration::from_secs(60)), "blocked for ever");
            retries += 1;
            engine.turn();
            engine.validate();
        }
        // 100 us, doubled eight times, is 51 ms; without back-off it would be 0.9 ms.
        assert_eq!(retries, TIMES);
        assert!(start.elapsed() >= Duration::from_millis(50), "{held}: {:?}", start.elapsed());
    }

    // Progress resets the delay: the next retry is due at once, not in 51 ms or more. One fast
    // attempt is enough, because others take longer if the machine stops for a moment.
    let mut tries = 0;
    let soon = (0..50).any(|_| {
        tries += 1;
        script.complete(2); // all
        engine.turn();
        assert_eq!(done.get(), 2 + tries);
        script.on_submit(SubmitStep::Again);
        let start = Instant::now();
        engine.nop().callback(count(&done)).unwrap();
        while script.in_flight() == 0 {
            assert!(readable(&engine, Duration::from_secs(60)));
            engine.turn();
        }
        start.elapsed() < Duration::from_millis(40)
    });
    assert!(soon, "the delay stays long");
    assert_eq!(engine.stats().busy, (2 * TIMES + tries) as u64);
}

/// The same without an event loop: a wait retries by itself.
#[test]
fn inv04_waiting_outlasts_a_device_without_room() {
    let (engine, script) = scripted(4);
    (0..5).for_each(|_| script.on_submit(SubmitStep::Again));
    script.on_submit(SubmitStep::Accept(0));
    assert_eq!(engine.nop().submit().unwrap().wait().0.unwrap(), 0);
    assert_eq!(engine.stats().busy, 6);
    // Also while others are in flight, which may never complete. A completion makes room at once.
    let held: Vec<_> = (0..2).map(|_| engine.nop().submit().unwrap()).collect();
    (0..3).for_each(|_| script.on_submit(SubmitStep::Again));
    let blocked = engine.nop().submit().unwrap();
    assert!(readable(&engine, Duration::from_secs(60)), "no retry while one is in flight");
    engine.turn();
    script.complete(1);
    assert!(readable(&engine, Duration::ZERO));
    engine.turn();
    // A completion was reaped, so there is room, and the next turn submits.
    assert!(readable(&engine, Duration::ZERO));
    engine.turn();
    assert_eq!(script.in_flight(), 2);
    blocked.wait().0.unwrap();
    held.into_iter().for_each(|nop| assert!(nop.wait().0.is_ok()));
}

#[test]
fn inv10_plugs_balance_also_when_one_unwinds() {
    let (engine, script) = scripted(8);
    let done = Rc::new(Cell::new(0));
    let outer = engine.plug();
    let inner = engine.plug();
    engine.nop().callback(count(&done)).unwrap();
    drop(inner);
    assert_eq!(script.batches().len(), 0, "the outer plug still holds");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _inner = engine.plug();
        engine.nop().callback(count(&done)).unwrap();
        panic!("on purpose");
    }));
    assert!(unwound.is_err() && script.batches().is_empty());
    drop(outer);
    assert_eq!(script.batches(), [2]);

    // The last plug drops while a panic unwinds: no callback runs, and the descriptor is readable.
    script.on_submit(SubmitStep::Inline);
    let fd = engine.as_fd(); // once, as an event loop takes it: each call looks for work
    assert!(!readable(fd, Duration::ZERO));
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _last = engine.plug();
        engine.nop().callback(count(&done)).unwrap();
        panic!("on purpose");
    }));
    assert!(unwound.is_err());
    assert_eq!((script.batches().len(), done.get()), (1, 0));
    assert!(readable(fd, Duration::ZERO));
    engine.turn();
    assert_eq!(done.get(), 1);
    script.complete(8);
    engine.nop().callback(count(&done)).unwrap();
    assert_eq!(done.get(), 3, "no plug is left");
}

#[test]
fn inv12_interrupted_completions_are_retried_up_to_a_limit() {
    const LIMIT: usize = 16;
    for errno in [libc::EAGAIN, libc::EINTR] {
        let (engine, script) = scripted(4);
        let (_raw, file) = temp_file(&engine, b"0123456789");
        (0..LIMIT).for_each(|_| script.on_transfer(Transfer::Fail(errno)));
        let start = Instant::now();
        let (read, buf) = engine.read(&file, vec![0; 4], 2).submit().unwrap().wait();
        assert_eq!((read.unwrap(), &buf[..]), (4, &b"2345"[..]));
        assert_eq!(engine.stats().retries, LIMIT as u64);
        if errno == libc::EAGAIN {
            // The delays grow from 100 us, each twice the last, up to 100 ms.
            assert!(start.elapsed() > Duration::from_millis(500), "{:?}", start.elapsed());
        }

        (0..=LIMIT).for_each(|_| script.on_transfer(Transfer::Fail(errno)));
        let (read, buf) = engine.read(&file, vec![0; 4], 2).submit().unwrap().wait();
        assert_eq!(read.unwrap_err().errno(), errno);
        assert_eq!((buf, script.in_flight()), (vec![0; 4], 0));

        // Progress resets the count.
        for _ in 0..3 {
            (0..LIMIT).for_each(|_| script.on_transfer(Transfer::Fail(errno)));
            script.on_transfer(Transfer::Short(1));
        }
        let (read, buf) = engine.read(&file, vec![0; 4], 2).submit().unwrap().wait();
        assert_eq!((read.unwrap(), &buf[..]), (4, &b"2345"[..]));
        // Other errors are not retried.
        script.on_transfer(Transfer::Fail(libc::EIO));
        assert!(engine.fsync(&file).submit().unwrap().wait().0.is_err());
    }
}
