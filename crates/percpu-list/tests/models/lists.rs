//! Entries that several threads add, remove, drain and drop at the same time.

use offlock_sync::{model, thoroughly};
use percpu_list::Refused;

use super::world::{ONE, World, ZERO, beside, both_modes};

#[test]
fn inv04_a_removal_meets_a_drain() {
    model(|| {
        let (world, [entry]) = World::with();
        let drains = beside(&world, ONE, World::drain);
        let removed = entry.remove().unwrap();
        assert_eq!(usize::from(removed) + drains.join().unwrap(), 1);
        world.end([]);
    });
}

#[test]
fn inv04_two_drains_share_the_entries() {
    model(|| {
        let (world, [first, second]) = World::with();
        let drains = beside(&world, ONE, World::drain);
        let taken = world.drain();
        assert_eq!(taken + drains.join().unwrap(), 2);
        world.list.validate();
        assert_eq!((world.list.len(), world.drops.dropped()), (0, 0));
        assert!(!first.remove().unwrap() && !second.is_linked());
        drop(second);
        world.end([]);
    });
}

/// A reference and the drop of the entry remove the same value. The last of them drops it.
#[test]
fn inv04_a_removal_meets_the_drop_of_the_entry() {
    thoroughly(|| {
        let (world, [entry]) = World::with();
        let found = entry.share();
        let removes = beside(&world, ONE, move |world| {
            world.list.remove(&found).unwrap();
            assert_eq!(found.read(), 0);
        });
        assert_eq!(entry.read(), 0);
        drop(entry);
        removes.join().unwrap();
        world.end([]);
    });
}

/// A value that was added before the close is drained. A value that comes later is returned. If the slot
/// has a block already, the addition is one section.
#[test]
fn inv08_nothing_is_added_once_close_returned() {
    fn close_meets_an_addition<const N: usize>() {
        let (world, stay) = World::with::<N>();
        let adds = beside(&world, ZERO, |world| match world.list.insert(world.drops.payload(1)) {
            Ok(entry) => Some(entry),
            Err(error) => {
                assert_eq!((error.reason, error.value.read()), (Refused::Closed, 1));
                None
            }
        });
        world.list.close().unwrap();
        let drained = world.drain();
        let added = adds.join().unwrap();
        assert_eq!(drained, N + usize::from(added.is_some()));
        assert!(world.list.is_empty() && world.list.is_closed());
        drop((added, stay));
        world.end([]);
    }
    both_modes(close_meets_an_addition::<0>);
    both_modes(close_meets_an_addition::<1>);
}

#[test]
fn two_first_entries_of_a_slot_share_a_block() {
    model(|| {
        let (world, []) = World::with();
        let adds = beside(&world, ZERO, |world| world.add(1));
        let entry = world.add(0);
        let other = adds.join().unwrap();
        world.end([entry, other]);
    });
}

/// Another entry is added and removed while one stays. The length is never 0, and there are never
/// more hits than removals.
#[test]
fn inv10_a_list_with_an_entry_is_never_empty() {
    thoroughly(|| {
        let (world, [stays]) = World::with();
        let changes = beside(&world, ZERO, |world| drop(world.add(1)));
        assert!(!world.list.is_empty());
        let stats = world.list.stats();
        assert!(stats.cpu_hits <= stats.removals && stats.removals <= stats.adds);
        changes.join().unwrap();
        world.end([stays]);
    });
}
