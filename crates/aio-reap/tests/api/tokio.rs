//! The engine on tokio runtimes: driven beside other tasks, and used by tasks of other threads.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use crate::admission::share_slots;
use crate::common::{on_engines, on_every_backend, small};
use crate::scripted::scripted;
use crate::writer::Writer;
use aio_reap::Engine;
use aio_reap_test::sim::{Cancel, SubmitStep};
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

const SHORT: Duration = Duration::from_millis(20);
/// Much longer than any of these tests takes.
const LONG: Duration = Duration::from_secs(30);

/// Runs a future on the current thread, with time and I/O. Fails instead of hanging.
fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(LONG, future).await.expect("a wake-up is lost") })
}

fn many_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap()
}

/// Many tasks, some with timers, share few slots on a real file.
#[test]
fn local_tasks_share_an_engine_on_every_backend() {
    on_every_backend(|engine| {
        let pause = async |nr| {
            if nr % 10 == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        run(engine.run_until(share_slots(engine, pause))).unwrap();
    });
}

/// The driver is a task of its own. Tasks that never turn the engine get their results, also if a
/// request completes late, and callbacks run.
#[test]
fn a_driver_task_serves_other_tasks() {
    let engine = Rc::new(Engine::new().unwrap());
    let (reader, mut writer) = std::io::pipe().unwrap();
    let local = LocalSet::new();
    run(local.run_until(async {
        let driver = tokio::task::spawn_local({
            let engine = Rc::clone(&engine);
            async move { engine.drive().await }
        });
        let called = Rc::new(Cell::new(false));
        let task = tokio::task::spawn_local({
            let (engine, called) = (Rc::clone(&engine), Rc::clone(&called));
            async move {
                let flag = Rc::clone(&called);
                engine.nop().callback(move |_, ()| flag.set(true)).unwrap();
                while !called.get() {
                    tokio::task::yield_now().await;
                }
                let pipe = engine.attach(reader).unwrap();
                // `pread` in the thread pool refuses pipes.
                engine.read(&pipe, vec![0; 3], 0).submit().unwrap().await.0.ok()
            }
        });
        sleep(SHORT).await;
        let written = std::io::Write::write_all(&mut writer, b"abc");
        drop(writer);
        // A read that is refused may leave the pipe without a reader before the write.
        if let Some(read) = task.await.unwrap() {
            assert_eq!((read, written.is_ok()), (3, true));
        }
        driver.abort();
        assert!(driver.await.unwrap_err().is_cancelled());
    }));
    assert!(engine.validate().is_idle());
}

/// The scripted device has no room and no completions, and requests have deadlines. Only the timers
/// of the descriptor wake the driver.
#[test]
fn inv04_retries_and_deadlines_wake_the_driver() {
    let (engine, script) = scripted(2);
    run(engine.run_until(async {
        (0..6).for_each(|_| script.on_submit(SubmitStep::Again));
        let nop = engine.nop().submit().unwrap();
        let start = Instant::now();
        while script.in_flight() == 0 {
            assert!(start.elapsed() < LONG);
            sleep(Duration::from_micros(100)).await;
        }
        script.complete(1);
        nop.await.0.unwrap();

        let start = Instant::now();
        let held = engine.nop().submit().unwrap();
        assert!(timeout(SHORT, held).await.is_err());
        let ended = engine.nop().cancel_at(Instant::now() + SHORT).submit().unwrap();
        script.cancels(Cancel::Works);
        assert_eq!(ended.await.0.unwrap_err().errno(), libc::ETIMEDOUT);
        assert!(start.elapsed() >= 2 * SHORT);
        script.complete(1);
    }))
    .unwrap();
}

/// Tasks of a runtime with several threads use an engine that a task drives.
#[test]
fn inv06_calls_wake_the_driver() {
    on_engines(small().capacity(128), |engine| {
        let writer = Writer::new(engine);
        let (done, is_done) = tokio::sync::oneshot::channel();
        let tasks = thread::spawn(move || {
            let tasks = async {
                let task = |nr| tokio::spawn(writer.clone().run(nr, |made| made < 100));
                for task in (0..8).map(task).collect::<Vec<_>>() {
                    timeout(LONG, task).await.expect("a wake-up is lost").unwrap();
                }
            };
            many_threads().block_on(tasks);
            done.send(()).unwrap();
        });
        run(engine.run_until(is_done)).unwrap().unwrap();
        tasks.join().unwrap();
    });
}

/// The engine completes the requests of aborted tasks, and no buffer is left.
#[test]
fn inv13_aborted_tasks_leave_their_requests_to_the_engine() {
    let (to_us, from_engine) = mpsc::channel();
    let engine = thread::spawn(move || {
        let engine = Engine::builder().capacity(2048).build().unwrap();
        to_us.send(Writer::new(&engine)).unwrap();
        engine.serve().unwrap();
        engine.validate()
    });
    let writer = from_engine.recv().unwrap();
    many_threads().block_on(async {
        for round in 0..200 {
            let task = tokio::spawn(writer.clone().run(round, |_| true));
            sleep(Duration::from_micros(10 * (round % 20))).await;
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
    });
    let freed = Arc::clone(&writer.freed);
    drop(writer);
    assert!(engine.join().unwrap().is_idle());
    assert_eq!(Arc::strong_count(&freed), 1, "a buffer is left");
}

/// Tasks that are ready together make one batch, in every round, wherever they are polled: by the
/// `LocalSet` or in the future of `run_until`.
#[test]
fn requests_of_tasks_that_are_driven_are_batches() {
    const TASKS: usize = 32;
    const ROUNDS: usize = 5;
    async fn rounds(engine: &Engine) {
        for _ in 0..ROUNDS {
            engine.nop().submit().unwrap().await.0.unwrap();
        }
    }
    for spawned in [true, false] {
        let (engine, script) = scripted(64);
        let engine = Rc::new(engine);
        let device = tokio::task::LocalSet::new();
        let completing = script.clone();
        device.spawn_local(async move {
            loop {
                completing.complete(TASKS);
                sleep(Duration::from_millis(1)).await; // all tasks have asked by then
            }
        });
        let tasks = async {
            if spawned {
                let task = |_| {
                    let engine = Rc::clone(&engine);
                    tokio::task::spawn_local(async move { rounds(&engine).await })
                };
                for task in (0..TASKS).map(task).collect::<Vec<_>>() {
                    task.await.unwrap();
                }
            } else {
                let mut tasks: Vec<_> = (0..TASKS).map(|_| Box::pin(rounds(&engine))).collect();
                let all = std::future::poll_fn(|context| {
                    tasks.retain_mut(|task| task.as_mut().poll(context).is_pending());
                    if tasks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
                });
                all.await;
            }
        };
        run(device.run_until(engine.run_until(tasks))).unwrap();
        let batches: Vec<_> = script.batches().into_iter().filter(|&size| size > 0).collect();
        assert_eq!(batches, [TASKS; ROUNDS], "spawned: {spawned}");
    }
}

/// A request that is made in the last poll, or while a driver ends, is submitted all the same.
#[test]
fn the_end_of_a_driver_submits_what_waits_for_it() {
    let (engine, script) = scripted(128);
    run(engine.run_until(async { drop(engine.nop().submit().unwrap()) })).unwrap();
    assert_eq!(script.in_flight(), 1);
    engine.block_on(async { drop(engine.nop().submit().unwrap()) }).unwrap();
    assert_eq!(script.in_flight(), 2);
}
