//! An invalidation against threads that use the block, wait for it or evict it.

use std::sync::Arc;

use crate::GetError;
use offlock_sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use offlock_sync::{Futex, model};

use super::world::{World, beside, dawdle, look, thoroughly};

/// There is one buffer: a reader that has it keeps the other block from it.
#[test]
fn inv10_a_hit_keeps_what_was_invalidated() {
    thoroughly(|| {
        let world = World::new(1);
        world.against_a_hit(|| {
            assert_eq!(world.disk.invalidate(0), Ok(true));
            world.read(1);
        });
        assert_eq!(world.reads(), 2);
    });
}

/// The same of one that turns its guard into a pin.
#[test]
fn inv10_a_guard_becomes_a_pin() {
    thoroughly(|| {
        let world = World::impatient(1);
        let guard = world.disk.get(0).unwrap();
        let invalidates = beside(&world.disk, |disk| {
            assert_eq!(disk.invalidate(0), Ok(true));
            assert_eq!(disk.get(1).err(), Some(GetError::NoFreeBuffers));
        });
        dawdle();
        let pin = guard.pin().unwrap();
        drop(guard);
        invalidates.join().unwrap();
        look(&pin, 0);
    });
}

/// And of one that waited for its load: that turns its pin into a guard. Whoever wants the buffer
/// meanwhile is told that there is none.
#[test]
fn inv10_a_waiter_keeps_it() {
    model(|| {
        let world = World::impatient(1);
        let (tell, told) = (Arc::new(Futex::new()), Arc::new(AtomicBool::new(false)));
        let waits = {
            let (disk, tell, told) = (world.disk.clone(), Arc::clone(&tell), Arc::clone(&told));
            move || {
                let Ok(guard) = disk.get(0) else { return };
                loop {
                    let seen = tell.load();
                    if told.load(Acquire) {
                        break;
                    }
                    tell.wait(seen);
                }
                look(&guard, 0);
            }
        };
        let loads = || {
            drop(world.disk.get(0));
            world.disk.invalidate(0).unwrap();
            drop(world.disk.get(1));
            told.store(true, Release);
            tell.advance();
            tell.wake_all();
        };
        world.with_other(loads, waits);
    });
}

/// It marked the buffer, found it in use, and has it on no list.
#[test]
fn inv10_an_evictor_has_it_meanwhile() {
    model(|| {
        let world = World::impatient(1);
        world.read(0);
        let evicts = beside(&world, |world| {
            let held = world.disk.try_get(0);
            world.cache.shrink(1); // it was used
            world.cache.shrink(1);
            drop(held);
            if let Ok(guard) = world.disk.get(1) {
                look(&guard, 1);
            }
        });
        dawdle();
        world.disk.invalidate(0).unwrap();
        evicts.join().unwrap();
        // It is of use again, at once.
        world.read(1);
        world.read(2);
        assert_eq!(world.reads(), 3);
    });
}
