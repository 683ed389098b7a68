//! A snapshot shows one instant.

use offlock_sync::virtual_cpu::set_current;
use offlock_sync::{is_planted, model, yield_often};

use super::world::{ONE, World, ZERO, beside, both_modes, spawn};

/// Returns the values at one instant.
fn seen(world: &World) -> Vec<u64> {
    let mut seen: Vec<u64> = if is_planted("snapshot-is-taken-slot-by-slot") {
        world.list.iter().map(|found| found.read()).inspect(|_| yield_often()).collect()
    } else {
        let snapshot = world.list.lock_all().unwrap();
        let seen: Vec<u64> = snapshot.iter().map(|value| value.read()).collect();
        assert_eq!(seen.len(), snapshot.len());
        seen
    };
    seen.sort_unstable();
    seen
}

/// The thread adds 1 on CPU 0, where 0 is, and then 2 on CPU 1.
#[test]
fn inv06_the_first_of_two_adds_is_seen_first() {
    model(|| {
        let (world, [stays]) = World::with();
        set_current(ONE);
        drop(world.add(3)); // leaves a block in slot 1
        set_current(ZERO);
        let adds = beside(&world, ZERO, |world| {
            let first = world.add(1);
            set_current(ONE);
            [first, world.add(2)]
        });
        let seen = seen(&world);
        assert!([&[0][..], &[0, 1], &[0, 1, 2]].contains(&&*seen), "{seen:?}");
        let [first, second] = adds.join().unwrap();
        world.end([stays, first, second]);
    });
}

/// The thread removes 0 from slot 0, and then adds 1 in slot 1, where 2 is.
#[test]
fn inv06_a_removal_before_an_add_is_seen() {
    model(|| {
        let (world, [entry]) = World::with();
        set_current(ONE);
        let stays = world.add(2);
        set_current(ZERO);
        let adds = beside(&world, ONE, |world| {
            drop(entry);
            world.add(1)
        });
        let seen = seen(&world);
        assert!([&[0, 2][..], &[2], &[1, 2]].contains(&&*seen), "{seen:?}");
        let added = adds.join().unwrap();
        world.end([added, stays]);
    });
}

/// Reads the list twice under a snapshot.
fn read_twice(world: &World) {
    let snapshot = world.list.lock_all().unwrap();
    let read = || {
        let mut seen = 0;
        snapshot.for_each(|value| seen += 1 + value.read());
        yield_often();
        seen
    };
    assert_eq!(read(), read(), "a snapshot changed");
}

#[test]
fn inv06_a_snapshot_does_not_change() {
    both_modes(|| {
        let (world, [goes]) = World::with();
        let removes = spawn(ZERO, move || drop(goes));
        read_twice(&world);
        removes.join().unwrap();
        world.end([]);
    });
}

#[test]
fn inv06_a_snapshot_does_not_grow() {
    both_modes(|| {
        let (world, [stays]) = World::with();
        let adds = beside(&world, ZERO, |world| world.add(1));
        read_twice(&world);
        let added = adds.join().unwrap();
        world.end([added, stays]);
    });
}

/// An entry that is dropped under a snapshot is removed at its end, after a walk of another thread
/// may have found it.
#[test]
fn inv13_an_entry_dropped_under_a_snapshot_is_dropped_once() {
    model(|| {
        let (world, [entry]) = World::with();
        let walks = beside(&world, ONE, |world| {
            world.list.iter().for_each(|found| assert_eq!(found.read(), 0));
        });
        let snapshot = world.list.lock_all().unwrap();
        drop(entry);
        drop(snapshot);
        walks.join().unwrap();
        world.end([]);
    });
}
