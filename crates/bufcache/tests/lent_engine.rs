//! The user's callbacks on an engine that a thread has lent: where they run, and what their panics leave.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use aio_reap::Engine;
use bufcache::{Cache, Device, EngineDevice, LentEngine, lend_engine};

const SIZE: usize = 4096;

/// A file of 64 blocks, each filled with its number.
fn file() -> File {
    let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for block in 0..64 {
        file.write_all(&[block; SIZE]).unwrap();
    }
    file
}

struct World {
    disk: Device,
    _lent: LentEngine,
    engine: Rc<Engine>,
    file: aio_reap::File,
}

fn world() -> World {
    let cache = Cache::builder(64 * SIZE).patience(Duration::from_millis(300)).build().unwrap();
    let disk = cache.attach(EngineDevice::new(file()).unwrap(), SIZE).unwrap();
    let engine = Rc::new(Engine::new().unwrap());
    let file = engine.attach(file()).unwrap();
    World { disk, _lent: lend_engine(&engine), engine, file }
}

impl World {
    /// Makes a request of the engine, and calls `then` in its callback.
    fn request(&self, then: impl FnOnce() + 'static) {
        let request = self.engine.read(&self.file, vec![0; 16], 0);
        let then: Box<dyn FnOnce()> = Box::new(then);
        request.callback(move |_, _| then()).unwrap();
    }
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
