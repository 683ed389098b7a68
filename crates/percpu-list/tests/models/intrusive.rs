//! Items that several threads add, remove and drop at once.

use percpu::sync::{Arc, model};
use percpu_list::{Domain, IntrusiveList, Link, LockError, Refused};

use super::payload::{Drops, Item, ONE, Owned, ZERO, spawn_on};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("add: the home is this slot", "intrusive::inv02_of_two_adds_on_two_slots_one_is_refused"),
    ("add: the home is still the same", "intrusive::inv05_an_add_meets_a_move_and_back"),
    ("add: record the new home", "intrusive::inv02_of_two_adds_on_two_slots_one_is_refused"),
    (
        "remove: the locked slot is still the home",
        "intrusive::inv05_a_removal_meets_readd_on_another_slot",
    ),
    ("remove: the anchor is still linked", "intrusive::inv03_two_removals_lock_the_same_slot"),
    (
        "remove: the anchor is on this list",
        "intrusive::inv02_a_removal_meets_a_move_to_another_list",
    ),
    ("drop: leave the list first", "intrusive::an_item_drops_beside_a_locked_walk"),
    ("unlink: after the last use by a walk", "intrusive::an_item_drops_once_it_is_seen_unlinked"),
    (
        "is_linked: before the item is destroyed",
        "intrusive::an_item_drops_once_it_is_seen_unlinked",
    ),
];

/// Of these, what only loom can see.
///
/// A removal that is stopped for as long as its item takes to move is none of a random schedule's.
pub(super) const LOOM_ONLY: &[&str] = &[
    "remove: the locked slot is still the home",
    "unlink: after the last use by a walk",
    "is_linked: before the item is destroyed",
];

/// How often a short thing is done that must hit another: a random schedule needs some.
const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// A list and two items, the first added in `slot`, the second at home in the other.
struct World {
    list: IntrusiveList<Item>,
    item: Owned,
    other: Owned,
}

impl World {
    fn new() -> Arc<Self> {
        let domain = Domain::new();
        let list = IntrusiveList::new_in(&domain);
        let drops = Drops::new();
        let [item, other] =
            [(ZERO, 1), (ONE, 2)].map(|(slot, n)| Owned::new(&domain, slot, &drops, n));
        Arc::new(Self { list, item, other })
    }

    /// With the item on the list.
    fn linked() -> Arc<Self> {
        let world = Self::new();
        world.list.insert_on(ZERO, world.item.pin()).unwrap();
        world
    }

    /// Adds the item; how many were added.
    fn add_on(&self, slot: percpu::CpuId) -> i32 {
        match self.list.insert_on(slot, self.item.pin()) {
            Ok(()) => 1,
            Err(error) => {
                assert_eq!(error, Refused::Linked);
                0
            }
        }
    }

    /// Removes the item; what that adds to the length.
    fn remove(&self) -> i32 {
        -i32::from(self.list.remove(&self.item).unwrap())
    }

    /// Called while no other thread uses the list: its length is the number of additions minus removals.
    fn assert_len(&self, len: i32) {
        self.list.validate();
        assert_eq!(self.list.len() as i32, len);
        assert_eq!(self.list.lock_all().unwrap().len() as i32, len);
        let linked = i32::from(self.item.link.is_linked()) + i32::from(self.other.link.is_linked());
        assert_eq!(linked, len);
    }
}

#[test]
fn inv02_of_two_adds_on_two_slots_one_is_refused() {
    model(|| {
        let world = World::new();
        let there = spawn_on(ONE, {
            let world = Arc::clone(&world);
            move || world.add_on(ONE)
        });
        let sum = world.add_on(ZERO);
        assert_eq!(sum + there.join().unwrap(), 1);
        world.assert_len(1);
    });
}

/// The item comes to a list from another of the domain, under a removal from that.
#[test]
fn inv02_a_removal_meets_a_move_to_another_list() {
    model(|| {
        let world = World::linked();
        let two = Arc::new(IntrusiveList::new_in(world.list.domain()));
        let there = spawn_on(ZERO, {
            let (world, two) = (Arc::clone(&world), Arc::clone(&two));
            move || {
                let moved = world.item.link.remove().unwrap();
                two.insert(world.item.pin()).unwrap();
                moved
            }
        });
        let removed = world.list.remove(&world.item).unwrap();
        assert!(removed != there.join().unwrap());
        assert!(world.list.is_empty() && two.len() == 1);
        two.validate();
        assert_eq!(two.remove(&world.item), Ok(true));
    });
}

#[test]
fn inv03_two_removals_lock_the_same_slot() {
    model(|| {
        let world = World::linked();
        let there = spawn_on(ONE, {
            let world = Arc::clone(&world);
            move || world.remove()
        });
        let sum = world.remove();
        assert_eq!(sum + there.join().unwrap(), -1);
        world.assert_len(0);
    });
}

/// A thread that waits for the old slot finds that the item has moved.
#[test]
fn inv05_a_removal_meets_readd_on_another_slot() {
    model(|| {
        let world = World::linked();
        let there = spawn_on(ONE, {
            let world = Arc::clone(&world);
            move || {
                let turn =
                    |_| world.add_on(ZERO) + world.remove() + world.add_on(ONE) + world.remove();
                world.remove()
                    + world.add_on(ONE)
                    + world.remove()
                    + (1..TIMES).map(turn).sum::<i32>()
            }
        });
        let sum: i32 = (0..TIMES).map(|_| world.remove()).sum();
        world.assert_len(1 + sum + there.join().unwrap());
    });
}

#[test]
fn inv05_an_add_meets_a_move_and_back() {
    model(|| {
        let world = World::new();
        let there = spawn_on(ONE, {
            let world = Arc::clone(&world);
            move || world.add_on(ONE) + world.remove() + world.add_on(ONE)
        });
        let sum = world.add_on(ZERO);
        world.assert_len(sum + there.join().unwrap());
    });
}

/// A removal and two additions on two slots, each of which may come first. For loom a third thread
/// is too much: there one of the additions follows the removal.
#[test]
fn inv05_a_removal_meets_two_readds() {
    model(|| {
        let world = World::linked();
        let add_on = |slot| {
            let world = Arc::clone(&world);
            move || world.add_on(slot)
        };
        let there = spawn_on(ONE, add_on(ONE));
        let here = cfg!(offlock_shuttle).then(|| spawn_on(ZERO, add_on(ZERO)));
        let mut sum = 1 + world.remove();
        sum += here.map_or_else(add_on(ZERO), |here| here.join().unwrap());
        world.assert_len(sum + there.join().unwrap());
    });
}

/// No thread waits for ever: for all locks, for two of them, or for one. A third thread is too much for
/// loom, so there one thread takes the one lock beside the two.
#[test]
fn inv08_global_two_slots_and_local_end() {
    model(|| {
        let world = World::new();
        let add = |item: fn(&World) -> &Owned| {
            let world = Arc::clone(&world);
            move || world.list.insert_on(ZERO, item(&world).pin())
        };
        let moves = spawn_on(ZERO, add(|world| &world.other)); // from the higher slot
        let adds = cfg!(offlock_shuttle).then(|| spawn_on(ZERO, add(|world| &world.item)));
        assert!(world.list.lock_all().unwrap().len() <= 2);
        let added = adds.map_or_else(add(|world| &world.item), |adds| adds.join().unwrap());
        assert_eq!((moves.join().unwrap(), added), (Ok(()), Ok(())));
        world.assert_len(2);
    });
}

/// A call that never waits removes the item, or returns `WouldBlock`; then another thread had the lock.
#[test]
fn inv14_a_try_meets_a_removal() {
    model(|| {
        let world = World::linked();
        let there = spawn_on(ONE, {
            let world = Arc::clone(&world);
            move || world.remove()
        });
        match world.list.try_remove(&world.item) {
            Ok(removed) => assert_eq!(there.join().unwrap(), i32::from(removed) - 1),
            Err(error) => {
                assert_eq!((error, there.join().unwrap()), (LockError::WouldBlock, -1));
            }
        }
        world.assert_len(0);
    });
}

/// A walk reads the item, or does not find it.
#[test]
fn an_item_drops_beside_a_locked_walk() {
    model(|| {
        let (list, item, drops) = one();
        let walk = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || {
                list.for_each(|item| assert_eq!(item.read(), 7)).unwrap();
                list.lock_all().unwrap().for_each(|item| assert_eq!(item.read(), 7));
            }
        });
        drop(item);
        walk.join().unwrap();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

/// The item is read, and then taken off by another: whose owner need not wait to destroy it.
#[test]
fn an_item_drops_once_it_is_seen_unlinked() {
    model(|| {
        let (list, item, drops) = one();
        let takes = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || list.retain(|item| item.read() != 7).unwrap()
        });
        drop(item);
        assert!(takes.join().unwrap() <= 1);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

/// The list is dropped beside its item, which is on it or not, and never on what is freed.
#[test]
fn inv13_a_list_drops_beside_its_item() {
    for removes in [false, true] {
        model(move || {
            let (list, item, drops) = one();
            let there = spawn_on(ONE, move || {
                if removes {
                    item.link.remove().unwrap();
                }
                drop(item);
            });
            drop(list);
            there.join().unwrap();
            assert_eq!(drops.count(), 1);
        });
    }
}

/// A list with an item, in slot 0.
fn one() -> (Arc<IntrusiveList<Item>>, Owned, Drops) {
    let (list, drops) = (IntrusiveList::new(), Drops::new());
    let item = Owned::new(list.domain(), ZERO, &drops, 7);
    list.insert_on(ZERO, item.pin()).unwrap();
    assert!(Link::is_linked(&item.link));
    (Arc::new(list), item, drops)
}
