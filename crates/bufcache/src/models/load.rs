//! One load, and the threads that wait for it, or read ahead.

use crate::GetError;
use offlock_sync::model;

use super::world::{World, beside, look, race, thoroughly};

/// The loser's buffer is of use again: both are had at once.
#[test]
fn inv02_two_misses_read_once() {
    model(|| {
        let world = World::new(2);
        race(&world, |world| world.read(1), |world| world.read(1));
        assert_eq!(world.reads(), 1);
        world.both_are_of_use();
        assert_eq!(world.reads(), 2);
    });
}

/// A get that finds no free buffer finds the block in the only one, which another thread keeps.
#[test]
fn inv02_two_misses_and_one_buffer() {
    model(|| {
        let world = World::new(1);
        let reads = beside(&world, |world| world.read(1));
        let held = world.disk.get(1).unwrap();
        reads.join().unwrap();
        look(&held, 1);
        drop(held);
        assert!(world.reads() <= 2);
    });
}

/// One is told by the device, the other by the one; or both read, and the second well.
#[test]
fn inv12_a_failed_load_is_an_error_of_its_waiters() {
    let failed = GetError::Io { errno: libc::EIO, block: 1 };
    model(move || is_told_to_both(&World::failing(2, 1), failed));
}

#[test]
fn inv12_a_loader_that_panics_is_an_error_of_its_waiters() {
    let failed = GetError::Panicked { block: 1 };
    model(move || is_told_to_both(&World::panicking(2, 1), failed));
}

fn is_told_to_both(world: &World, failed: GetError) {
    let waits = {
        let world = world.clone();
        move || match world.disk.get(1) {
            Ok(guard) => look(&guard, 1),
            Err(error) => assert_eq!((error, world.reads()), (failed, 1)),
        }
    };
    let loads = || world.disk.get(1).map(drop);
    assert_eq!(world.with_other(loads, waits), Err(failed));
    world.both_are_of_use();
}

/// A get that loses the race frees the buffer that it took, for a thread that has none. Too large
/// for loom to explore in a minute.
#[cfg(offlock_shuttle)]
#[test]
fn inv02_three_misses_of_two_blocks() {
    model(|| {
        let world = World::new(2);
        let threads = [1, 1, 2].map(|block| beside(&world, move |world: World| world.read(block)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(world.reads(), 2);
    });
}

/// There is one buffer, and no thread waits: neither for its block, nor for the buffer.
#[test]
fn inv13_what_is_being_read_ahead_is_not_evicted() {
    thoroughly(|| {
        let world = World::later(1, 0);
        world.disk.readahead(1..2);
        assert!(world.disk.is_cached(1));
        let other = world.disk.get(2).map(|guard| look(&guard, 2));
        world.join();
        // The block was cached until another took its buffer, and no pin holds it.
        assert_eq!(world.disk.is_cached(1), other.is_err());
        look(&world.disk.get(1).unwrap(), 1);
        look(&world.disk.get(2).unwrap(), 2);
        assert_eq!(world.reads(), if other.is_ok() { 4 } else { 2 });
    });
}

/// The pool or the get reads the block, and both see the bytes of that read.
#[test]
fn inv13_it_is_handed_over() {
    thoroughly(|| {
        let world = World::new(2);
        world.disk.readahead(1..2);
        world.read(1);
        world.read(1);
        assert_eq!(world.reads(), 1);
        world.both_are_of_use();
        world.end();
    });
}
