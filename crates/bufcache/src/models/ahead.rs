//! What is read before anybody asks.

use super::task::Later;
use super::world::{World, look, thoroughly};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] =
    &[("enter: pin it for the requester", "ahead::inv13_what_is_being_read_ahead_is_not_evicted")];

/// There is one buffer, and no thread waits: neither for its block, nor for the buffer.
#[test]
fn inv13_what_is_being_read_ahead_is_not_evicted() {
    thoroughly(|| {
        let later = Later::new(1);
        let device = later.attach(1);
        device.readahead(1..2);
        assert!(device.is_cached(1));
        let other = device.get(2).map(|guard| look(&guard, 2));
        later.join();
        // The block was cached until another took its buffer, and no pin holds it.
        assert_eq!(device.is_cached(1), other.is_err());
        look(&device.get(1).unwrap(), 1);
        look(&device.get(2).unwrap(), 2);
        assert_eq!(later.reads(), if other.is_ok() { 4 } else { 2 });
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
