//! Inner requests: a library waits on the engine of its caller and delivers only its own.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::Write;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use aio_reap::{BackendKind, CompletionQueue, Engine, SubmitError};
use aio_reap_test::Build;
use aio_reap_test::sim::Script;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::on_every_backend;
use crate::count::count;
use crate::readable::readable;

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits as a library does: turns the engine by inner turns until `done`.
fn inner_wait(engine: &Engine, waker: &Rc<RefCell<Option<Waker>>>, done: impl Fn() -> bool) {
    let wait = poll_fn(|context| {
        waker.replace(Some(context.waker().clone()));
        if done() { Poll::Ready(()) } else { Poll::Pending }
    });
    engine.block_on_inner(wait).unwrap();
}

#[test]
fn inv22_inner_turn_holds_every_other_delivery() {
    let script = Script::new();
    let engine = Engine::builder().build_sim(&script).unwrap();
    let (outer, inner) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let queue = CompletionQueue::new();
    engine.nop().callback(count(&outer)).unwrap();
    engine.nop().enqueue(&queue, 1).unwrap();
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    let mut operation = pin!(engine.nop().submit().unwrap());
    assert!(operation.as_mut().poll(&mut context).is_pending());
    engine.nop().inner_callback(count(&inner)).unwrap();
    let dropped = Rc::new(());
    let in_buffer = Rc::clone(&dropped);
    engine.nop().callback(move |_, ()| drop(in_buffer)).unwrap();
    assert!(!readable(&engine, Duration::ZERO));

    script.complete(5);
    assert_eq!(engine.turn_inner().delivered, 1);
    let held = engine.validate();
    assert_eq!((outer.get(), inner.get(), wakes.0.load(Ordering::Relaxed)), (0, 1, 0));
    assert_eq!((held.pending, held.in_flight, Rc::strong_count(&dropped)), (3, 0, 2));
    // The completion is in its queue, and the next ordinary turn counts it.
    assert_eq!(queue.pop().unwrap().token, 1);
    assert_eq!(engine.turn_inner().delivered, 0);
    assert!(readable(&engine, Duration::ZERO), "no event loop would turn the engine");
    assert_eq!(engine.turn().delivered, 4);
    assert_eq!((outer.get(), wakes.0.load(Ordering::Relaxed)), (1, 1));
    assert_eq!(Rc::strong_count(&dropped), 1);
    assert!(operation.poll(&mut context).is_ready());
    engine.turn();
    assert!(!readable(&engine, Duration::ZERO));
}

/// A turn that an inner callback makes wakes nothing of the program either.
#[test]
fn inv22_turn_in_an_inner_callback_holds_every_other_delivery() {
    let script = Script::new();
    let engine = Rc::new(Engine::builder().depth(3).capacity(3).build_sim(&script).unwrap());
    let (inner, wakes) = (Rc::new(Cell::new(0)), Arc::new(Wakes::default()));
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    let _slot = engine.nop().submit().unwrap();
    let (outer, turning) = (count(&inner), Rc::clone(&engine));
    let seen = Rc::new(Cell::new(usize::MAX));
    let (to, counted) = (Rc::clone(&seen), Arc::clone(&wakes));
    let turn_inside = move |result, ()| {
        outer(result, ());
        turning.turn();
        to.set(counted.0.load(Ordering::Relaxed));
    };
    engine.nop().inner_callback(turn_inside).unwrap();
    engine.nop().inner_callback(count(&inner)).unwrap();
    let mut no_slot = pin!(engine.nop().submit_async());
    assert!(no_slot.as_mut().poll(&mut context).is_pending());
    for nth in [1, 1] {
        assert!(script.complete_nth(nth));
    }
    assert_eq!(engine.turn_inner().delivered, 2);
    assert_eq!((inner.get(), seen.get()), (2, 0));
    assert!(readable(&*engine, Duration::ZERO), "no event loop would turn the engine");
    engine.turn();
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "of the future");
    script.complete(1);
}

/// A wait that finds its completions held would turn without a pause if their notification ended its
/// sleep.
#[test]
fn inv22_inner_wait_sleeps_while_completions_are_held() {
    let Ok(engine) = Engine::builder().backend(BackendKind::Uring).build() else { return };
    for watched in [false, true] {
        if watched {
            readable(&engine, Duration::ZERO);
        }
        let outer = Rc::new(Cell::new(0));
        let queue = CompletionQueue::new();
        let plug = engine.plug();
        engine.nop().callback(count(&outer)).unwrap();
        engine.nop().enqueue(&queue, 1).unwrap();
        let (read, mut write) = std::io::pipe().unwrap();
        let pipe = engine.attach(read).unwrap();
        let (done, waker) = (Rc::new(Cell::new(false)), Rc::new(RefCell::new(None::<Waker>)));
        let (to, wake) = (Rc::clone(&done), Rc::clone(&waker));
        let arrived = move |result: Result<usize, _>, _: Vec<u8>| {
            to.set(result.unwrap() == 1);
            wake.take().into_iter().for_each(Waker::wake);
        };
        engine.read(&pipe, vec![0; 1], 0).inner_callback(arrived).unwrap();
        let before = engine.stats().waits;
        let writer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            write.write_all(b"x").unwrap();
        });
        inner_wait(&engine, &waker, || done.get());
        writer.join().unwrap();
        let waits = engine.stats().waits - before;
        assert!((1..6).contains(&waits), "{waits} sleeps, watched: {watched}");
        assert_eq!((outer.get(), queue.len()), (0, 1));
        assert!(!watched || readable(&engine, Duration::ZERO));
        assert_eq!(engine.wait(None).unwrap().delivered, 2);
        drop(plug);
    }
}

#[test]
fn inv22_held_completions_keep_their_slots_and_an_inner_request_is_told() {
    on_every_backend(|engine| {
        let (outer, inner) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let plug = engine.plug();
        for _ in 0..64 {
            engine.nop().callback(count(&outer)).unwrap();
        }
        while engine.turn_inner().in_flight > 0 || engine.validate().pending < 64 {}
        assert_eq!(engine.validate().pending, 64);
        let refused = engine.nop().inner_callback(count(&inner)).unwrap_err();
        assert!(matches!(refused, SubmitError::Full(_)));
        while outer.get() < 64 {
            engine.wait(None).unwrap();
        }
        let Ok(_) = refused.into_request().inner_callback(count(&inner)) else { panic!("a slot") };
        drop(plug);
        engine.drain().unwrap();
        assert_eq!(inner.get(), 1);
    });
}

/// The submission of an inner request reaps, and a callback of the program does not run in it.
#[test]
fn inv22_submission_of_an_inner_request_runs_no_other_callback() {
    on_every_backend(|engine| {
        let (outer, inner) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let plug = engine.plug();
        for _ in 0..4 {
            engine.nop().callback(count(&outer)).unwrap();
        }
        while engine.turn_inner().in_flight > 0 {}
        // The plug is gone, and its drop is the program's own turn.
        assert_eq!(outer.get(), 0);
        std::mem::forget(plug);
        engine.nop().inner_callback(count(&inner)).unwrap();
        while inner.get() == 0 {
            engine.turn_inner();
        }
        assert_eq!(outer.get(), 0);
        engine.drain().unwrap();
        assert_eq!(outer.get(), 4);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Whatever is mixed, each request is delivered once, inner turns deliver inner requests only, and
    /// each kind in the order of the reap.
    #[test]
    fn inv22_any_mix_of_turns_delivers_each_request_once_in_order(
        depth in 1usize..6,
        steps in vec((0u8..6, 1usize..4), 1..80),
    ) {
        let script = Script::new();
        let builder = Engine::builder().depth(depth).capacity(512);
        let engine = builder.build_sim(&script).unwrap();
        let delivered = Rc::new(RefCell::new(Vec::new()));
        let allowed = Rc::new(Cell::new(true)); // ordinary callbacks may run now
        let mut made = 0u64;
        let _plug = engine.plug();
        for (step, count) in steps {
            match step {
                0 | 1 => for _ in 0..count {
                    let (to, allowed) = (Rc::clone(&delivered), Rc::clone(&allowed));
                    let (inner, number) = (step == 1, made);
                    let done = move |result: Result<usize, _>, ()| {
                        assert!(result.is_ok() && (inner || allowed.get()));
                        to.borrow_mut().push((inner, number));
                    };
                    let request = engine.nop();
                    if inner {
                        request.inner_callback(done).unwrap();
                    } else {
                        request.callback(done).unwrap();
                    }
                    made += 1;
                },
                2 => _ = script.complete(count),
                3 => _ = engine.turn(),
                _ => {
                    allowed.set(false);
                    engine.turn_inner();
                    allowed.set(true);
                }
            }
            engine.validate();
        }
        engine.drain().unwrap();
        let delivered = delivered.borrow();
        for kind in [false, true] {
            let numbers: Vec<_> =
                delivered.iter().filter(|&&(inner, _)| inner == kind).map(|&(_, n)| n).collect();
            prop_assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
        }
        prop_assert_eq!(delivered.len() as u64, made);
    }
}
