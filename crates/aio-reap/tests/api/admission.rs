//! Futures that wait for a slot get it in their order, and leave nothing behind when dropped.

use std::future::{Future, poll_fn};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::on_every_backend;
use crate::counted::OnDrop;
use crate::direct_file::direct_file;
use aio_reap::{AlignedBuf, Engine, Operation, Submission, SubmitError};
use aio_reap_test::sim::Script;
use testkit::TestTask;

use crate::readable::readable;
use crate::scripted::full_at;

/// A task that waits for a slot.
fn waiting(engine: &Engine) -> TestTask<Submission<'_, ()>> {
    TestTask::waiting(engine.nop().submit_async())
}

/// An engine with two slots, both taken.
fn full() -> (Engine, Script, Vec<Operation<()>>) {
    let (engine, script) = full_at(2);
    let taken = (0..2).map(|_| engine.nop().submit().unwrap()).collect();
    (engine, script, taken)
}

#[test]
fn dropping_a_waiting_future_moves_later_ones_forward() {
    let (engine, script, taken) = full();
    let mut tasks: Vec<_> = (0..4).map(|_| waiting(&engine)).collect();
    drop(taken.into_iter().next());
    script.complete(1);
    engine.turn();
    assert_eq!(tasks[0].wakes(), 1);
    // A woken future that is dropped wakes the next one.
    drop(tasks.remove(0));
    assert_eq!(tasks.iter().map(TestTask::wakes).collect::<Vec<_>>(), [1, 0, 0]);
    // A future dropped in the middle wakes no other.
    drop(tasks.remove(1));
    assert_eq!(tasks.iter().map(TestTask::wakes).collect::<Vec<_>>(), [1, 0]);
    drop(tasks.remove(0));
    assert_eq!(tasks[0].wakes(), 1);
    assert!(matches!(engine.nop().submit(), Err(SubmitError::Full(_))), "the other one's slot");
    let Poll::Ready(Ok(operation)) = tasks[0].poll() else { panic!() };
    script.complete(9);
    operation.wait().0.unwrap();
    assert!(engine.validate().is_idle());
}

#[test]
fn waiting_futures_see_the_shutdown_and_errors() {
    let (engine, script, taken) = full();
    let mut tasks: Vec<_> = (0..3).map(|_| waiting(&engine)).collect();
    // A misaligned request is refused at once.
    if let Some((_temp, file)) = direct_file(&engine) {
        let mut refused = engine.write(&file, AlignedBuf::zeroed(512, 512), 1).submit_async();
        let poll = Pin::new(&mut refused).poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll, Poll::Ready(Err(SubmitError::Misaligned(_)))));
    }
    script.complete(2);
    engine.shutdown().unwrap();
    assert!(tasks.iter().all(|task| task.wakes() == 1));
    for task in &mut tasks {
        assert!(matches!(task.poll(), Poll::Ready(Err(SubmitError::Closed(_)))));
    }
    taken.into_iter().for_each(|operation| _ = operation.wait().0.unwrap());
}

/// Many tasks share few slots: each one writes and reads back, with a pause in between.
pub(crate) async fn share_slots(engine: &Engine, pause: impl AsyncFn(u64)) {
    let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
    let task = async |nr: u64| {
        for at in (nr * 3..nr * 3 + 3).map(|block| block * 64) {
            let write = engine.write(&file, vec![nr as u8; 64], at).submit_async().await.unwrap();
            let (written, buf) = write.await;
            pause(nr).await;
            let read = engine.read(&file, buf, at).submit_async().await.unwrap();
            let (read, buf) = read.await;
            assert_eq!((written.unwrap(), read.unwrap(), buf), (64, 64, vec![nr as u8; 64]));
        }
    };
    let mut tasks: Vec<_> = (0..200).map(|nr| Box::pin(task(nr))).collect();
    poll_fn(|context| {
        tasks.retain_mut(|task| task.as_mut().poll(context).is_pending());
        if tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[test]
fn many_tasks_share_few_slots() {
    on_every_backend(|engine| engine.block_on(share_slots(engine, async |_| ())).unwrap());
}

/// User code that frees a slot panics: the drop of the buffer of a dropped operation, or a callback. A
/// turn follows, also if the program asks for the descriptor only then, and wakes the future that waits for
/// the slot.
#[test]
fn inv06_a_panic_leaves_no_future_behind() {
    for (in_callback, watched) in [(true, true), (true, false), (false, true), (false, false)] {
        let (engine, script) = full_at(1);
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        // Once, as an event loop takes it: each call looks for work.
        let early = watched.then(|| engine.as_fd());
        let write = if in_callback {
            engine.nop().callback(|_, ()| panic!("on purpose")).unwrap();
            None
        } else {
            let buf = OnDrop(vec![1; 8], || panic!("on purpose"));
            Some(engine.write(&file, buf, 0).submit().unwrap())
        };
        let mut task = waiting(&engine);
        script.complete(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            engine.turn();
            drop(write);
        }));
        assert!(panicked.is_err());
        let fd = early.unwrap_or_else(|| engine.as_fd());
        let what = (in_callback, watched);
        assert!(readable(fd, Duration::ZERO), "{what:?}: no turn would wake the future");
        engine.turn();
        assert_eq!(task.wakes(), 1, "{what:?}");
        assert!(matches!(task.poll(), Poll::Ready(Ok(_))), "{what:?}");
    }
}
