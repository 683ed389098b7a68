//! The engine on tokio runtimes: driven beside other tasks, and used by tasks of other threads.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use crate::admission::share_slots;
use crate::common::on_every_backend;
use crate::scripted::scripted;
use aio_reap::{Engine, Remote, SharedFile, SubmitError};
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
    on_every_backend(|engine| {
        let remote = engine.remote();
        let (done, is_done) = tokio::sync::oneshot::channel();
        let tasks = thread::spawn(move || {
            done.send(many_threads().block_on(writers(remote, 8, 50))).unwrap();
        });
        assert_eq!(run(engine.run_until(is_done)).unwrap().unwrap(), 400);
        tasks.join().unwrap();
    });
}

/// Each of `tasks` writes `rounds` blocks and reads them back. Returns the number of blocks.
async fn writers(remote: Remote, tasks: u64, rounds: u64) -> u64 {
    let file = SharedFile::new(tempfile::tempfile().unwrap()).unwrap();
    let handles: Vec<_> = (0..tasks)
        .map(|task| {
            let (remote, file) = (remote.clone(), file.clone());
            tokio::spawn(async move {
                for round in 0..rounds {
                    let at = (task * rounds + round) * 32;
                    let byte = (at / 32) as u8;
                    let to = file.clone();
                    let write = remote.ask(move |engine, responder| {
                        let write = engine.write(&engine.attach_shared(&to), vec![byte; 32], at);
                        _ = write.callback(|done, buf| _ = responder.send((done, buf)));
                    });
                    let write = timeout(LONG, write.unwrap()).await.expect("a wake-up is lost");
                    let (written, buf) = write.unwrap();
                    assert_eq!(written.unwrap(), 32);
                    let from = file.clone();
                    let read = remote.ask(move |engine, responder| {
                        let read = engine.read(&engine.attach_shared(&from), buf, at);
                        _ = read.callback(|done, buf| _ = responder.send((done, buf)));
                    });
                    let read = timeout(LONG, read.unwrap()).await.expect("a wake-up is lost");
                    let (read, buf) = read.unwrap();
                    assert_eq!((read.unwrap(), buf), (32, vec![byte; 32]));
                }
                rounds
            })
        })
        .collect();
    let mut sum = 0;
    for handle in handles {
        sum += handle.await.unwrap();
    }
    sum
}

/// The engine completes the requests of aborted tasks, and no buffer is left.
#[test]
fn inv13_aborted_tasks_leave_their_requests_to_the_engine() {
    let (to_us, from_engine) = mpsc::channel();
    let engine = thread::spawn(move || {
        let engine = Engine::new().unwrap();
        to_us.send(engine.remote()).unwrap();
        engine.serve().unwrap();
        engine.validate()
    });
    let remote = from_engine.recv().unwrap();
    many_threads().block_on(async {
        for round in 0..200 {
            let (remote, file) =
                (remote.clone(), SharedFile::new(tempfile::tempfile().unwrap()).unwrap());
            let task = tokio::spawn(async move {
                loop {
                    let to = file.clone();
                    let write = remote.ask(move |engine, responder| {
                        let write = engine.write(&engine.attach_shared(&to), vec![1; 64], 0);
                        _ = write.callback(|done, _| _ = responder.send(done));
                    });
                    match write {
                        Ok(write) => assert!(matches!(write.await, Ok(Ok(64)))),
                        Err(SubmitError::Full(_)) => tokio::task::yield_now().await,
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            sleep(Duration::from_micros(10 * (round % 20))).await;
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
    });
    drop(remote);
    assert!(engine.join().unwrap().is_idle());
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
