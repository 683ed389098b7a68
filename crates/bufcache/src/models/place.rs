//! Blocks whose home is full.

use offlock_sync::{model, thread};

use super::world::{World, neighbours};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("free: OVERFLOW is the bucket's", "place::inv04_a_block_is_found_behind_its_home"),
    ("insert: mark the home of a displaced block", "place::inv04_a_block_is_found_behind_its_home"),
];

/// Its home has two places, taken by others, of which one goes meanwhile.
#[test]
fn inv04_a_block_is_found_behind_its_home() {
    model(|| {
        let [one, two] = neighbours(2);
        let world = World::new(3);
        world.read(0);
        world.read(one);
        let displaced = thread::spawn({
            let world = world.clone();
            move || world.read(two)
        });
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
