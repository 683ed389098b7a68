//! The user's callbacks on an engine that a thread has lent: where they run, and what their panics leave.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use aio_reap::{Engine, ReapMode};
use bufcache::{Cache, Device, EngineDevice, GetError, LentEngine, lend_engine};

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
    let disk = cache.attach(EngineDevice::new(file()).unwrap()).unwrap();
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

#[test]
fn engines_are_lent_until_their_guards_drop_in_any_order() {
    let engines = [(); 3].map(|()| Rc::new(Engine::new().unwrap()));
    let owners = || engines.each_ref().map(Rc::strong_count);
    let [first, second, third] = engines.each_ref().map(lend_engine);
    drop(first);
    assert_eq!(owners(), [1, 2, 2]);
    drop(third);
    assert_eq!(owners(), [1, 2, 1]);
    let again = lend_engine(&engines[1]); // lent twice
    drop(second);
    assert_eq!(owners(), [1, 2, 1]);
    drop(again);
    assert_eq!(owners(), [1, 1, 1]);
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

#[test]
fn inv23_a_callback_that_panics_while_a_get_waits_leaves_no_pin() {
    let world = world();
    let plug = world.engine.plug();
    world.request(|| panic!("a callback of the user's"));
    world.disk.readahead(3..4);
    assert_eq!(world.disk.get(3).map(|guard| guard[0]), Ok(3)); // by an inner turn, which holds the callback
    assert!(panics(|| drop(plug)) || panics(|| world.engine.drain().unwrap()));
    world.engine.drain().unwrap();
    assert_eq!(world.disk.get_mut(3).map(|guard| guard[0]), Ok(3));
}

#[test]
fn inv23_a_callback_that_panics_while_a_read_begins_leaves_no_pin() {
    let world = world();
    world.engine.set_reap_mode(ReapMode::OnTurn);
    world.request(|| panic!("a callback of the user's"));
    thread::sleep(Duration::from_millis(100)); // the kernel is done with it
    world.engine.set_reap_mode(ReapMode::AfterSubmit);
    world.disk.readahead(3..4);
    assert!(panics(|| world.engine.drain().unwrap()));
    world.engine.drain().unwrap();
    assert_eq!(world.disk.get_mut(3).map(|guard| guard[0]), Ok(3));
}

#[test]
fn inv23_a_callback_that_panics_while_a_discard_waits_leaves_no_mark() {
    let world = world();
    world.disk.create(1).unwrap().fill(9);
    let plug = world.engine.plug();
    world.request(|| panic!("a callback of the user's"));
    world.disk.readahead(2..3);
    assert_eq!(world.disk.discard(1..3), Ok(()));
    assert!(panics(|| drop(plug)) || panics(|| world.engine.drain().unwrap()));
    world.engine.drain().unwrap();
    assert_eq!(world.disk.get_mut(1).map(drop), Ok(()));
}

#[test]
fn inv23_a_callback_may_use_a_block_that_a_discard_will_drop() {
    let world = world();
    world.disk.create(1).unwrap().fill(9);
    let plug = world.engine.plug();
    let told = Rc::new(RefCell::new(None));
    world.request({
        let (told, disk) = (Rc::clone(&told), world.disk.clone());
        move || *told.borrow_mut() = Some(disk.get_mut(1).map(|guard| guard[0]))
    });
    world.disk.readahead(2..3);
    assert_eq!(world.disk.discard(1..3), Ok(()));
    assert_eq!(*told.borrow(), None, "it ran inside `discard`");
    drop(plug);
    world.engine.drain().unwrap();
    assert_eq!(*told.borrow(), Some(Ok(0)));
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

/// The engine's operations end by waits of its thread also when it is lent no more, or another is, or it is again.
#[test]
fn inv02_a_wait_turns_the_engines_that_were_lent_before() {
    for again in 0..4 {
        let World { disk, _lent: lent, engine, file: _ } = world();
        let _plug = engine.plug(); // only a wait submits
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
            2 => {
                drop(lent);
                Some(lend_engine(&other))
            }
            _ => {
                std::mem::forget(lent);
                Some(lend_engine(&other))
            }
        };
        assert_eq!(disk.get(3).map(|guard| guard[0]), Ok(3), "{again}");
        assert_eq!(disk.get(5).map(|guard| guard[0]), Ok(5), "{again}");
    }
}
