//! The user's callbacks on an engine that a thread has lent: where they run, and what their panics leave.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aio_reap::ReapMode;
use bufcache::LentEngine;

use crate::world::*;

const SIZE: usize = 4096;

struct World {
    disk: Device,
    _lent: LentEngine,
    engine: Rc<Engine>,
    file: aio_reap::File,
}

fn world() -> World {
    world_on(Engine::new().unwrap())
}

/// Only turns of the engine reap.
fn world_on_turn() -> World {
    world_on(Engine::builder().reap_mode(ReapMode::OnTurn).build().unwrap())
}

fn world_on(engine: Engine) -> World {
    let cache = Cache::builder(64 * SIZE).patience(Duration::from_millis(300)).build().unwrap();
    let disk = cache.attach(FileDevice::new(numbered_file()).unwrap()).unwrap();
    let engine = Rc::new(engine);
    let file = engine.attach(numbered_file()).unwrap();
    World { disk, _lent: lend_engine(&engine), engine, file }
}

impl World {
    /// Makes a request of the engine, and calls `then` in its callback.
    fn request(&self, then: impl FnOnce() + 'static) {
        let request = self.engine.read(&self.file, vec![0; 16], 0);
        let then: Box<dyn FnOnce()> = Box::new(then);
        request.callback(move |_, _| then()).unwrap();
    }

    /// Waits until a request is done, and for some time in which others may be.
    fn wait_for_completion(&self) {
        let fd = self.engine.as_fd().as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to one valid pollfd.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 60_000) }, 1, "no request is done");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_thread_lends_one_engine_at_a_time() {
    let engine = Rc::new(Engine::new().unwrap());
    let lent = lend_engine(&engine);
    assert!(panics(|| drop(lend_engine(&engine))));
    assert_eq!(Rc::strong_count(&engine), 2);
    drop(lent);
    assert_eq!(Rc::strong_count(&engine), 1);
    drop(lend_engine(&engine));
}

/// Calls it and tells whether it has panicked.
fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

#[test]
fn inv23_no_callback_runs_while_the_device_has_the_blocks() {
    let world = world();
    for blocks in [vec![1], vec![1, 5, 9], vec![1, 2, 3, 9]] {
        for &block in &blocks {
            world.disk.create(block).unwrap().fill(9);
        }
        let plug = world.engine.plug();
        world.request(|| panic!("a callback of the user's"));
        assert_eq!(world.disk.sync(), Ok(()), "{blocks:?}");
        for &block in &blocks {
            assert_eq!(world.disk.get_mut(block).unwrap()[0], 9);
        }
        // It was not lost.
        assert!(panics(|| drop(plug)) || panics(|| world.engine.drain().unwrap()));
    }
}

/// A callback that panicked has left the next one for a later turn.
#[test]
fn inv23_a_read_that_begins_runs_no_callback_that_is_ready() {
    let world = world_on_turn();
    let ran = Rc::new(RefCell::new(0));
    let count = Rc::clone(&ran);
    world.request(|| panic!("a callback of the user's"));
    world.request(move || *count.borrow_mut() += 1);
    world.wait_for_completion();
    assert!(panics(|| _ = world.engine.turn()));
    world.disk.readahead(3..4);
    assert_eq!(*ran.borrow(), 0, "it ran inside `readahead`");
    world.engine.drain().unwrap();
    assert_eq!((*ran.borrow(), world.disk.get(3).map(|guard| guard[0])), (1, Ok(3)));
}

#[test]
fn inv23_a_callback_that_panics_while_a_read_begins_leaves_no_pin() {
    let world = world();
    let request = world.engine.read(&world.file, vec![0; 16], 0);
    request.callback_on_turn(|_, _| panic!("a callback of the user's")).unwrap();
    world.wait_for_completion();
    world.disk.readahead(3..4);
    assert!(panics(|| world.engine.drain().unwrap()));
    world.engine.drain().unwrap();
    assert_eq!(world.disk.get_mut(3).map(|guard| guard[0]), Ok(3));
}

#[test]
fn inv23_a_call_that_is_refused_leaves_no_mark_and_no_pin() {
    let world = world();
    world.disk.create(1).unwrap().fill(9);
    let plug = world.engine.plug();
    world.disk.readahead(2..3);
    let refused = WriteError::WouldDeadlock { block: Some(2) };
    assert_eq!(world.disk.discard(1..3), Err(refused));
    assert_eq!(world.disk.get(2).map(drop), Err(GetError::WouldDeadlock));
    assert_eq!(world.disk.get_mut(2).map(drop), Err(GetError::WouldDeadlock));
    assert_eq!(world.disk.invalidate(2), Err(GetError::WouldDeadlock));
    drop(plug);
    world.engine.drain().unwrap();
    assert_eq!(world.disk.get_mut(1).map(|guard| guard[0]), Ok(9));
    assert_eq!(world.disk.get_mut(2).map(|guard| guard[0]), Ok(2));
}

/// The flush that the drop makes would wait for a write in the engine of this thread.
#[test]
fn inv19_the_last_handle_drops_beside_a_write_in_its_engine() {
    const LONG: Duration = Duration::from_secs(60);
    let cache = Cache::builder(64 * SIZE).patience(LONG).build().unwrap();
    let file = numbered_file();
    let lost = Arc::new(Mutex::new(None));
    let options = AttachOptions::new().on_loss({
        let lost = Arc::clone(&lost);
        move |error| *lost.lock().unwrap() = Some(error)
    });
    let disk = FileDevice::new(file.try_clone().unwrap()).unwrap();
    let disk = cache.attach_with(disk, options).unwrap();
    let engine = Rc::new(Engine::new().unwrap());
    let _lent = lend_engine(&engine);
    disk.create(1).unwrap().fill(9);
    let plug = engine.plug();
    let mut sync = Box::pin(disk.sync_async());
    assert!(sync.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(sync);
    let begun = Instant::now();
    drop(disk);
    assert!(begun.elapsed() < LONG, "this thread does not wait");
    drop(plug);
    engine.drain().unwrap();
    let is_detached = || {
        engine.drain().unwrap(); // the sync behind the write
        cache.attach(FileDevice::new(file.try_clone().unwrap()).unwrap()).is_ok()
    };
    testkit::wait_until(is_detached);
    let mut there = [0];
    file.read_exact_at(&mut there, SIZE as u64).unwrap();
    assert_eq!((there, *lost.lock().unwrap()), ([9], None));
}

#[test]
fn inv23_no_callback_runs_inside_a_call_of_the_cache() {
    let world = world();
    let told = Rc::new(RefCell::new(None));
    let ask = |told: &Rc<RefCell<Option<Result<(), GetError>>>>| {
        let (told, disk) = (Rc::clone(told), world.disk.clone());
        move || *told.borrow_mut() = Some(disk.get_mut(1).map(drop))
    };
    let plug = world.engine.plug();
    world.request(ask(&told));
    let guard = world.disk.get_mut(1).unwrap();
    assert_eq!(world.disk.get(3).unwrap()[0], 3);
    assert_eq!(*told.borrow(), None, "it ran inside `get_mut` or `get`");
    drop((guard, plug));
    world.engine.drain().unwrap();
    assert_eq!(*told.borrow(), Some(Ok(())));
}

/// Also when the engine is lent no more, or another is, or it is again.
#[test]
fn inv02_operations_count_in_an_engine_that_was_lent_before() {
    for again in 0..3 {
        let World { disk, _lent: lent, engine, file: _ } = world();
        let plug = engine.plug();
        disk.readahead(3..4);
        let other = Rc::new(Engine::new().unwrap());
        let _lent = match again {
            0 => {
                drop(lent);
                None
            }
            1 => {
                drop(lent);
                Some(lend_engine(&engine))
            }
            _ => {
                drop(lent);
                Some(lend_engine(&other))
            }
        };
        assert_eq!(disk.get(3).map(drop), Err(GetError::WouldDeadlock), "{again}");
        assert_eq!(disk.get(5).map(|guard| guard[0]), Ok(5), "{again}");
        drop(plug);
        engine.drain().unwrap();
        assert_eq!(disk.get(3).map(|guard| guard[0]), Ok(3), "{again}");
    }
}
