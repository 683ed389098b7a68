//! The limit of submissions adapts to the device.
#![cfg(not(offlock_model))]

use aio_reap::{CompletionQueue, Engine};
use aio_reap_test::Build;
use aio_reap_test::scripted::{Script, SubmitStep};

/// Turns until `count` requests were submitted. `complete` requests complete after each submission.
fn run(engine: &Engine, script: &Script, count: u64, complete: usize, step: Option<SubmitStep>) {
    let queue = CompletionQueue::new();
    let plug = engine.plug();
    for token in 0..count {
        engine.nop().enqueue(&queue, token).unwrap();
    }
    std::mem::forget(plug); // only turns submit
    while !engine.turn().is_idle() {
        script.complete(complete);
        if let Some(step) = step {
            script.on_submit(step);
        }
    }
    assert_eq!(queue.len() as u64, count);
}

#[test]
fn inv10_adaptive_batches_grow_in_the_background_and_shrink_when_complete_at_once() {
    let script = Script::new();
    let builder = Engine::builder().depth(256).capacity(4096).max_batch(200);
    let engine = builder.adaptive_batch(true).build_scripted(&script).unwrap();
    assert_eq!(engine.batch_limit(), 16);
    run(&engine, &script, 1000, 5, None);
    let batches = script.batches();
    assert_eq!(batches[..4], [16, 32, 64, 128]);
    assert!(batches.iter().all(|&size| size <= 200));
    assert!(engine.batch_limit() >= 128);

    // Batches that complete at once shrink, but not below 16.
    run(&engine, &script, 2000, 300, Some(SubmitStep::Inline));
    assert_eq!(engine.batch_limit(), 16);
    let batches = script.batches();
    assert!(batches.iter().rev().skip(2).take(10).all(|&size| size == 16), "{batches:?}");

    // If the device has no room, the limit shrinks.
    run(&engine, &script, 200, 5, None);
    let grown = engine.batch_limit();
    assert!(grown > 16);
    script.on_submit(SubmitStep::Again);
    run(&engine, &script, 1, 1, None);
    assert_eq!(engine.batch_limit(), grown / 2);
}

#[test]
fn inv10_batches_are_fixed_unless_asked() {
    let script = Script::new();
    let engine = Engine::builder().depth(64).capacity(1024).build_scripted(&script).unwrap();
    run(&engine, &script, 500, 64, None);
    assert_eq!((engine.batch_limit(), script.batches()[0]), (64, 64));
}
