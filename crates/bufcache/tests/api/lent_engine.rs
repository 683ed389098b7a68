//! The user's callbacks on an engine that a thread has lent: where they run, and what their panics leave.

use std::cell::Cell;
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

/// Only turns of the engine reap.
fn world() -> World {
    let engine = Engine::builder().reap_mode(ReapMode::OnTurn).build().unwrap();
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

    /// Waits until a request is done, and for some time in which the other one may be.
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

/// Neither one that is done nor one that is not submitted yet. Its panic leaves no mark and no pin.
#[test]
fn inv23_no_callback_runs_inside_a_call_of_the_cache() {
    const BLOCKS: [u64; 5] = [1, 2, 3, 5, 9];
    type Call = fn(&Device);
    let calls: [Call; 5] = [
        |disk| assert_eq!(disk.get(3).unwrap()[0], 3),
        |disk| disk.readahead(3..4),
        |disk| drop(disk.get_mut(1).unwrap()),
        |disk| disk.write_through(5..6).unwrap(),
        |disk| disk.sync().unwrap(),
    ];
    for (is_done, call) in calls.into_iter().flat_map(|call| [(false, call), (true, call)]) {
        let world = world();
        BLOCKS.into_iter().for_each(|block| world.disk.create(block).unwrap().fill(block as u8));
        world.disk.invalidate(3).unwrap();
        let plug = (!is_done).then(|| world.engine.plug());
        let ran = Rc::new(Cell::new(false));
        let runs = Rc::clone(&ran);
        world.request(|| panic!("a callback of the user's"));
        world.request(move || runs.set(true));
        if is_done {
            world.wait_for_completion();
        }
        call(&world.disk);
        assert!(!ran.get(), "it ran inside a call");
        let panicked = [panics(|| drop(plug)), panics(|| world.engine.drain().unwrap())];
        assert!(panicked[0] != panicked[1], "it is called once");
        world.engine.drain().unwrap();
        assert!(ran.get());
        for block in BLOCKS {
            assert_eq!(world.disk.get_mut(block).map(|guard| guard[0]), Ok(block as u8));
        }
    }
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
