//! Tasks that wait for loads, which another thread ends: those that are woken, and those that are gone.

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use crate::{AttachOptions, Device, GetError, WriteError};
use offlock_sync::{Futex, Mutex, model, thread};

use super::world::{Numbered, World, beside, builder, dawdle, look, thoroughly};

/// Runs a future as a task, in this thread, which sleeps where the future waits.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let sleep = |woken: &Futex, seen| {
        woken.wait(seen);
        true
    };
    let output = offlock_sync::block_on(|context| future.as_mut().poll(context), sleep);
    output.expect("it sleeps until there is one")
}

/// Wakes a thread; or panics.
#[derive(Default)]
pub(super) struct Alarm {
    bell: Futex,
    panics: bool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.bell.advance();
        self.bell.wake_all();
        if self.panics {
            resume_unwind(Box::new(())); // without a message: a panic that has one ends a model
        }
    }
}

/// Polls once. Whether the future waits now.
pub(super) fn begin<F: Future>(future: &mut Pin<Box<F>>, alarm: &Arc<Alarm>) -> bool {
    let waker = Waker::from(Arc::clone(alarm));
    future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
}

#[test]
fn inv02_a_task_is_woken() {
    thoroughly(|| {
        let world = World::later(1, 0);
        look(&block_on(world.disk.get_async(1)).unwrap(), 1);
        world.join();
        assert_eq!(world.reads(), 1);
    });
}

/// A requester is gone before the end of its load, or after it. The block is loaded for others, and neither the
/// buffer nor the waker of the requester is kept.
#[test]
fn inv02_a_requester_that_is_gone() {
    thoroughly(|| {
        let (world, told) = without_its_requester(World::later(1, 0));
        assert_eq!((told, world.reads()), (Ok(()), 1));
        look(&world.disk.get(2).unwrap(), 2);
    });
}

/// The same of one whose load fails: the others are told.
#[test]
fn inv12_a_requester_that_is_gone_of_a_load_that_fails() {
    model(|| {
        let (world, told) = without_its_requester(World::later(2, 1));
        // By the load, or not: then it was over.
        assert_eq!(told.is_ok(), world.reads() == 2);
        assert_eq!(told.err().unwrap_or(FAILED), FAILED);
        world.both_are_of_use();
    });
}

/// Gets block 1 while another thread loads it for a task that is gone.
fn without_its_requester(world: World) -> (World, Result<(), GetError>) {
    let alarm = Arc::new(Alarm::default());
    let mut asks = Box::pin(world.disk.get_async(1));
    begin(&mut asks, &alarm);
    drop(asks);
    dawdle();
    let told = world.disk.get(1).map(|guard| look(&guard, 1));
    world.join();
    assert_eq!(Arc::strong_count(&alarm), 1, "its waker is kept");
    (world, told)
}

const FAILED: GetError = GetError::Io { errno: libc::EIO, block: 1 };

/// Two wait, and the first panics when it is woken.
#[test]
fn inv02_a_waker_that_panics() {
    thoroughly(|| {
        let world = World::later(1, 0);
        let alarm = Arc::new(Alarm { panics: true, ..Alarm::default() });
        let mut first = Box::pin(world.disk.get_async(1));
        let waits = begin(&mut first, &alarm);
        look(&block_on(world.disk.get_async(1)).unwrap(), 1);
        world.join();
        if waits {
            look(&block_on(first).unwrap(), 1);
        }
    });
}

/// The cache's own thread reads, sleeps, and reads again.
#[test]
fn inv12_a_task_is_told_of_a_load_that_panics() {
    model(|| {
        let world = World::panicking(2, 1);
        let told = block_on(world.disk.get_async(1)).map(drop);
        assert_eq!(told, Err(GetError::Panicked { block: 1 }));
        look(&block_on(world.disk.get_async(1)).unwrap(), 1);
        assert_eq!(world.reads(), 2);
        world.end();
    });
}

#[test]
fn inv12_a_task_is_told_of_a_verifier_that_panics() {
    thoroughly(|| {
        let refuses = AtomicBool::new(true);
        let verify = move |_: u64, _: &[u8]| match refuses.swap(false, Relaxed) {
            true => resume_unwind(Box::new(())),
            false => true,
        };
        let options = AttachOptions::new().verify(verify);
        let world = World::attach(builder(2, Duration::ZERO), Numbered::later(0), options);
        let told = block_on(world.disk.get_async(1)).map(drop);
        assert_eq!(told, Err(GetError::Panicked { block: 1 }));
        world.join();
        look(&world.disk.get(1).unwrap(), 1);
    });
}

/// The one thread that reads the device waits for a block that no other thread is to read.
#[test]
fn inv02_a_verifier_needs_a_block_that_is_queued() {
    model(|| {
        let itself = Arc::new(Mutex::<Option<Device>>::new(None));
        let verify = {
            let itself = Arc::clone(&itself);
            move |block: u64, _: &[u8]| {
                let device = itself.lock().clone();
                block != 1 || device.is_some_and(|device| device.get(2).is_ok())
            }
        };
        let world = World::with(3, AttachOptions::new().verify(verify));
        *itself.lock() = Some(world.disk.clone());
        world.disk.readahead(1..2);
        world.disk.readahead(2..3);
        look(&block_on(world.disk.get_async(1)).unwrap(), 1);
        let device = itself.lock().take();
        drop(device);
        world.end();
    });
}

/// The cache's own thread makes a call, sleeps, and makes another.
#[test]
fn inv23_calls_of_tasks() {
    thoroughly(|| {
        let world = World::new(2);
        for _ in 0..2 {
            let told = block_on(world.disk.discard_async(1..2));
            assert_eq!(told, Err(WriteError::Io { errno: libc::EOPNOTSUPP, block: 1 }));
        }
        world.end();
    });
}

/// A task that wants to write waits for a reader and is gone. The task behind it is woken.
#[test]
fn inv23_a_writer_that_is_gone_leaves_the_line() {
    model(|| {
        let world = World::new(2);
        let alarm = Arc::new(Alarm::default());
        let held = world.disk.get(1).unwrap().pin().unwrap(); // a guard of this thread is refused at once
        let mut gone = Box::pin(world.disk.get_mut_async(1));
        assert!(begin(&mut gone, &alarm));
        let waits = beside(&world.disk, |disk| look(&block_on(disk.get_mut_async(1)).unwrap(), 1));
        thread::yield_now();
        dawdle();
        drop(held); // which wakes the first
        assert_eq!(alarm.bell.load(), 1);
        drop(gone);
        waits.join().unwrap();
        assert_eq!(Arc::strong_count(&alarm), 1, "its waker is kept");
        world.end();
    });
}

#[test]
fn inv15_a_task_that_waits_for_a_writer() {
    thoroughly(|| waits_to_write(|disk| block_on(disk.get_mut_async(1)).unwrap()));
}

#[test]
fn inv15_a_task_that_waits_for_a_pin() {
    thoroughly(|| waits_to_write(|disk| disk.get(1).unwrap().pin().unwrap()));
}

/// A task waits until this thread drops what it holds of a block, whose bytes the checker watches.
fn waits_to_write<T>(hold: impl Fn(&Device) -> T) {
    let world = World::new(2);
    world.read(1);
    let held = hold(&world.disk);
    let waits = beside(&world.disk, |disk| look(&block_on(disk.get_mut_async(1)).unwrap(), 1));
    thread::yield_now(); // it is the other's turn, which a checker need not find
    dawdle();
    drop(held);
    waits.join().unwrap();
    world.end();
}

/// The thread that makes the calls of a device serves the holder of a block, not the task that waits for it.
#[cfg(offlock_shuttle)] // more than loom does in a minute
#[test]
fn inv25_a_task_that_waits_for_a_creator() {
    model(|| {
        let world = World::with(2, AttachOptions::new().on_loss(|_| {})); // of what it created
        let waits = beside(&world.disk, |disk| drop(block_on(disk.create_async(1)).unwrap()));
        thread::yield_now();
        let held = world.disk.create(1).unwrap();
        block_on(world.disk.call_async(|_| ()));
        drop(held);
        waits.join().unwrap();
        world.end();
    });
}
