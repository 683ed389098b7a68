//! Readers of a buffer against an evictor that needs it for another block, and against an invalidation; and
//! blocks whose home is full.

use std::sync::Arc;

use crate::{Device, GetError};
use offlock_sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use offlock_sync::{Futex, model, thread};

use super::world::{World, beside, dawdle, look, neighbours, race, thoroughly};

/// There is one buffer: the other block takes its place and its memory.
#[test]
fn inv06_a_hit_keeps_its_buffer() {
    thoroughly(|| {
        let (world, [other]) = (World::new(1), neighbours(1));
        world.against_a_hit(|| world.read(other));
        assert_eq!(world.reads(), 2);
    });
}

/// The evictor comes between the guard and the pin, and finds neither gone.
#[test]
fn inv06_a_guard_becomes_a_pin() {
    thoroughly(|| guard_becomes_a_pin(|_| ()));
}

/// The same of a block that is invalidated.
#[test]
fn inv10_a_guard_becomes_a_pin() {
    thoroughly(|| guard_becomes_a_pin(|disk| assert_eq!(disk.invalidate(0), Ok(true))));
}

fn guard_becomes_a_pin(before: fn(&Device)) {
    let world = World::impatient(1);
    let guard = world.disk.get(0).unwrap();
    let evicts = beside(&world.disk, move |disk| {
        before(&disk);
        assert_eq!(disk.get(1).err(), Some(GetError::NoFreeBuffers));
    });
    let pin = guard.pin().unwrap();
    drop(guard);
    evicts.join().unwrap();
    look(&pin, 0);
}

/// The pin goes in another thread than the evictor's.
#[test]
fn inv06_a_pin_keeps_its_buffer() {
    thoroughly(|| {
        let world = World::new(1);
        let pin = world.disk.get(0).unwrap().pin().unwrap();
        let looks = thread::spawn(move || look(&pin, 0));
        world.read(1);
        looks.join().unwrap();
    });
}

/// An evictor marks a buffer and finds it in use. A get meanwhile waits until the mark is gone.
#[test]
fn inv04_a_buffer_that_is_not_evicted_stays_the_only_one() {
    thoroughly(|| {
        let world = World::new(2);
        let held = world.disk.get(0).unwrap();
        let shrinks = beside(&world.cache, |cache| assert_eq!(cache.shrink(1), 0));
        dawdle();
        let again = world.disk.get(0).unwrap();
        assert_eq!(again.as_ptr(), held.as_ptr());
        shrinks.join().unwrap();
        drop((again, held));
        assert_eq!(world.reads(), 1);
    });
}

/// A get finds the block, or reads it again into the same memory, as there is no other.
#[test]
fn inv05_a_lookup_against_the_last_release() {
    model(|| {
        let world = World::new(1);
        world.read(0);
        // The claim takes the buffer and its memory, if it is not in use.
        race(&world, |world| drop(world.disk.claim(1).unwrap()), |world| world.read(0));
        // Read again only if the claim has evicted it, which it may do in vain.
        assert!(world.reads() as u64 <= 1 + world.cache.stats().evictions);
    });
}

/// Two want a buffer, and there is one that may go.
#[test]
fn inv06_two_evict_one_buffer() {
    model(|| {
        let world = World::new(1);
        race(&world, |world| world.read(0), |world| world.read(1));
        assert_eq!(world.cache.stats().evictions, 1);
    });
}

/// Its home has two places, taken by others, of which one goes meanwhile.
#[test]
fn inv04_a_block_is_found_behind_its_home() {
    model(|| {
        let [one, two] = neighbours(2);
        let world = World::new(3);
        world.read(0);
        world.read(one);
        let displaced = beside(&world, move |world| world.read(two));
        assert_eq!(world.disk.invalidate(0), Ok(true));
        displaced.join().unwrap();
        assert!(world.disk.try_get(two).is_ok() && world.disk.try_get(one).is_ok());
        // And in its home, once there is room, and it was forgotten.
        assert_eq!(world.disk.invalidate(two), Ok(true));
        assert!(world.disk.try_get(two).is_err());
        world.read(two);
        assert_eq!(world.reads(), 4);
    });
}

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

/// A thread that waited for the load turns its pin into a guard. A thread that wants the buffer
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
