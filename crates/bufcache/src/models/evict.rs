//! Readers of a buffer against an evictor that needs it for another block, and blocks whose home is full.

use crate::GetError;
use offlock_sync::{model, thread};

use super::world::{World, beside, dawdle, look, neighbours, thoroughly};

/// There is one buffer: the other block takes its place and its memory.
#[test]
fn inv06_a_hit_keeps_its_buffer() {
    thoroughly(|| hits_against_an_evictor(&World::new(1)));
}

fn hits_against_an_evictor(world: &World) {
    let [other] = neighbours(1);
    world.against_a_hit(|| world.read(other));
    assert_eq!(world.reads(), 2);
}

/// The evictor comes between the guard and the pin, and finds neither gone.
#[test]
fn inv06_a_guard_becomes_a_pin() {
    thoroughly(|| {
        let world = World::impatient(1);
        let guard = world.disk.get(0).unwrap();
        let evicts = beside(&world.disk, |disk| {
            assert_eq!(disk.get(1).err(), Some(GetError::NoFreeBuffers))
        });
        let pin = guard.pin().unwrap();
        drop(guard);
        evicts.join().unwrap();
        look(&pin, 0);
    });
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
        let reads = beside(&world, |world| world.read(0));
        // The claim takes the buffer and its memory, if it is not in use.
        drop(world.disk.claim(1).unwrap());
        reads.join().unwrap();
        // Read again only if the claim has evicted it, which it may do in vain.
        assert!(world.reads() as u64 <= 1 + world.cache.stats().evictions);
    });
}

/// Two want a buffer, and there is one that may go.
#[test]
fn inv06_two_evict_one_buffer() {
    model(|| {
        let world = World::new(1);
        let reads = beside(&world, |world| world.read(1));
        world.read(0);
        reads.join().unwrap();
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
