//! Items that several threads add, remove and drop at the same time.

use percpu::sync::{Arc, model};
use percpu_list::{Domain, IntrusiveList, Link, LockError, Refused};

use super::payload::{Drops, Item, ONE, Owned, ZERO, spawn_on, thoroughly};

/// Each planted bug, with a model that must fail if the bug is active.
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

/// The planted bugs that only loom finds.
///
/// A random schedule rarely stops a removal for as long as the item takes to move.
pub(super) const LOOM_ONLY: &[&str] = &[
    "remove: the locked slot is still the home",
    "unlink: after the last use by a walk",
    "is_linked: before the item is destroyed",
];

/// How often a short operation is repeated. A random schedule needs repetitions to make two of them
/// overlap.
const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// A list and two unlinked items, whose homes are slot 0 and slot 1.
struct Fixture {
    list: IntrusiveList<Item>,
    item: Owned,
    other: Owned,
}

impl Fixture {
    fn new() -> Arc<Self> {
        let domain = Domain::new();
        let list = IntrusiveList::new_in(&domain);
        let drops = Drops::new();
        let [item, other] =
            [(ZERO, 1), (ONE, 2)].map(|(slot, n)| Owned::new(&domain, slot, &drops, n));
        Arc::new(Self { list, item, other })
    }

    /// Creates a list with `item` in slot 0.
    fn linked() -> Arc<Self> {
        let fixture = Self::new();
        fixture.list.insert_on(ZERO, fixture.item.pin()).unwrap();
        fixture
    }

    /// Adds the item, and returns by how much that changes the length.
    fn add_on(&self, slot: percpu::CpuId) -> i32 {
        match self.list.insert_on(slot, self.item.pin()) {
            Ok(()) => 1,
            Err(error) => {
                assert_eq!(error, Refused::Linked);
                0
            }
        }
    }

    /// Removes the item, and returns by how much that changes the length.
    fn remove(&self) -> i32 {
        -i32::from(self.list.remove(&self.item).unwrap())
    }

    /// Checks the length, and the links of the items. The other threads have ended.
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
        let fixture = Fixture::new();
        let there = spawn_on(ONE, {
            let fixture = Arc::clone(&fixture);
            move || fixture.add_on(ONE)
        });
        let sum = fixture.add_on(ZERO);
        assert_eq!(sum + there.join().unwrap(), 1);
        fixture.assert_len(1);
    });
}

/// A removal from one list meets a move of the item to another list of the domain.
#[test]
fn inv02_a_removal_meets_a_move_to_another_list() {
    model(|| {
        let fixture = Fixture::linked();
        let two = Arc::new(IntrusiveList::new_in(fixture.list.domain()));
        let there = spawn_on(ZERO, {
            let (fixture, two) = (Arc::clone(&fixture), Arc::clone(&two));
            move || {
                let moved = fixture.item.link.remove().unwrap();
                two.insert(fixture.item.pin()).unwrap();
                moved
            }
        });
        let removed = fixture.list.remove(&fixture.item).unwrap();
        assert!(removed != there.join().unwrap());
        assert!(fixture.list.is_empty() && two.len() == 1);
        two.validate();
        assert_eq!(two.remove(&fixture.item), Ok(true));
    });
}

#[test]
fn inv03_two_removals_lock_the_same_slot() {
    thoroughly(|| {
        let fixture = Fixture::linked();
        let there = spawn_on(ONE, {
            let fixture = Arc::clone(&fixture);
            move || fixture.remove()
        });
        let sum = fixture.remove();
        assert_eq!(sum + there.join().unwrap(), -1);
        fixture.assert_len(0);
    });
}

/// A removal that waited for the old slot finds that the item has moved.
#[test]
fn inv05_a_removal_meets_readd_on_another_slot() {
    model(|| {
        let fixture = Fixture::linked();
        let there = spawn_on(ONE, {
            let fixture = Arc::clone(&fixture);
            move || {
                let turn = |_| {
                    fixture.add_on(ZERO) + fixture.remove() + fixture.add_on(ONE) + fixture.remove()
                };
                fixture.remove()
                    + fixture.add_on(ONE)
                    + fixture.remove()
                    + (1..TIMES).map(turn).sum::<i32>()
            }
        });
        let sum: i32 = (0..TIMES).map(|_| fixture.remove()).sum();
        fixture.assert_len(1 + sum + there.join().unwrap());
    });
}

#[test]
fn inv05_an_add_meets_a_move_and_back() {
    model(|| {
        let fixture = Fixture::new();
        let there = spawn_on(ONE, {
            let fixture = Arc::clone(&fixture);
            move || fixture.add_on(ONE) + fixture.remove() + fixture.add_on(ONE)
        });
        let sum = fixture.add_on(ZERO);
        fixture.assert_len(sum + there.join().unwrap());
    });
}

/// A removal meets two adds in two slots. Under loom there are only two threads, and one of the
/// adds follows the removal.
#[test]
fn inv05_a_removal_meets_two_readds() {
    model(|| {
        let fixture = Fixture::linked();
        let add_on = |slot| {
            let fixture = Arc::clone(&fixture);
            move || fixture.add_on(slot)
        };
        let there = spawn_on(ONE, add_on(ONE));
        let here = cfg!(offlock_shuttle).then(|| spawn_on(ZERO, add_on(ZERO)));
        let mut sum = 1 + fixture.remove();
        sum += here.map_or_else(add_on(ZERO), |here| here.join().unwrap());
        fixture.assert_len(sum + there.join().unwrap());
    });
}

/// Threads that wait for all locks, for two locks and for one lock all end. Under loom there are
/// only two threads, and the single lock follows the snapshot.
#[test]
fn inv08_global_two_slots_and_local_end() {
    model(|| {
        let fixture = Fixture::new();
        let add = |item: fn(&Fixture) -> &Owned| {
            let fixture = Arc::clone(&fixture);
            move || fixture.list.insert_on(ZERO, item(&fixture).pin())
        };
        let moves = spawn_on(ZERO, add(|fixture| &fixture.other)); // from the higher slot
        let adds = cfg!(offlock_shuttle).then(|| spawn_on(ZERO, add(|fixture| &fixture.item)));
        assert!(fixture.list.lock_all().unwrap().len() <= 2);
        let added = adds.map_or_else(add(|fixture| &fixture.item), |adds| adds.join().unwrap());
        assert_eq!((moves.join().unwrap(), added), (Ok(()), Ok(())));
        fixture.assert_len(2);
    });
}

/// A removal that never waits removes the item, or returns an error because the other removal holds
/// the lock.
#[test]
fn inv14_a_try_meets_a_removal() {
    thoroughly(|| {
        let fixture = Fixture::linked();
        let there = spawn_on(ONE, {
            let fixture = Arc::clone(&fixture);
            move || fixture.remove()
        });
        match fixture.list.try_remove(&fixture.item) {
            Ok(removed) => assert_eq!(there.join().unwrap(), i32::from(removed) - 1),
            Err(error) => {
                assert_eq!((error, there.join().unwrap()), (LockError::WouldBlock, -1));
            }
        }
        fixture.assert_len(0);
    });
}

/// A walk reads the item before its drop, or does not find it.
#[test]
fn an_item_drops_beside_a_locked_walk() {
    thoroughly(|| {
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

/// Another thread reads the item and then removes it. The owner may destroy it without a wait.
#[test]
fn an_item_drops_once_it_is_seen_unlinked() {
    model(|| {
        let (list, item, drops) = one();
        let removes = spawn_on(ONE, {
            let list = Arc::clone(&list);
            move || list.retain(|item| item.read() != 7).unwrap()
        });
        drop(item);
        assert!(removes.join().unwrap() <= 1);
        list.validate();
        assert_eq!((list.len(), drops.count()), (0, 1));
    });
}

/// The list and its item are dropped at the same time, and neither uses the other after it was
/// freed.
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

/// Creates a list with an item in slot 0.
fn one() -> (Arc<IntrusiveList<Item>>, Owned, Drops) {
    let (list, drops) = (IntrusiveList::new(), Drops::new());
    let item = Owned::new(list.domain(), ZERO, &drops, 7);
    list.insert_on(ZERO, item.pin()).unwrap();
    assert!(Link::is_linked(&item.link));
    (Arc::new(list), item, drops)
}
