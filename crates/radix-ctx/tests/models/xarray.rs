//! Readers of an array and of its tree, while a writer changes them.

use percpu::rcu::{self, Owned};
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::{Arc, model, thread};
use radix_ctx::xarray::{Mark, Value, XArray};

use super::support::{TIMES, spawn, thoroughly, yield_often};

/// The planted bugs, each with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("publish: the nodes are built", "xarray::an_entry_is_seen_finished"),
    ("set a mark: the work before it is done", "xarray::a_mark_carries_what_was_done_before"),
    (
        "search by mark: the entry is built",
        "xarray::a_search_by_mark_sees_the_entry_that_replaces_another",
    ),
];

/// The planted bugs that only loom can catch.
pub(super) const LOOM_ONLY: &[&str] = &[
    "publish: the nodes are built",
    "search by mark: the entry is built",
    "set a mark: the work before it is done",
];

type Numbers = Arc<XArray<Value>>;

fn numbers(indexes: &[u64]) -> Numbers {
    let array = XArray::new();
    for &index in indexes {
        array.store(index, value(index)).unwrap();
    }
    Arc::new(array)
}

fn value(index: u64) -> Value {
    Value::new(index + 100).unwrap()
}

/// A value whose memory stays in quarantine after its drop: the checker sees a late read.
struct Payload(*mut Watched<u64>);

// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Send for Payload {}
// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Sync for Payload {}

impl Payload {
    fn new(value: u64) -> Self {
        Self(Box::into_raw(Box::new(Watched::new(value))))
    }

    /// Checks the value, as a reader that has just found it.
    fn check(&self) {
        assert_eq!(Self::read(self.0), 7);
    }

    /// Reads the value of a pointer that a reader took some time ago.
    fn read(found: *const Watched<u64>) -> u64 {
        // SAFETY: the memory is alive, or in quarantine until the run ends.
        **unsafe { &*found }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is dropped once.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// A reader finds nothing, or a complete entry below complete nodes.
#[test]
fn an_entry_is_seen_finished() {
    thoroughly(|| {
        let array = Arc::new(XArray::<Owned<Payload>>::new());
        let reader = spawn(&array, |array| {
            let guard = rcu::pin();
            for index in [0, 2] {
                if let Some(payload) = array.load(index, &guard) {
                    assert_eq!(Payload::read(payload.0), 7);
                }
            }
        });
        for index in [0, 2] {
            array.store(index, Owned::new(Payload::new(7))).unwrap();
        }
        reader.join().unwrap();
    });
}

/// Every kind of search sees complete nodes and entries while the tree grows: at its root, by a node below
/// one that stays, by an entry in a node that stays, and by another node in the place of a marked one.
#[test]
fn a_search_sees_finished_nodes_and_entries() {
    type Search = fn(&XArray<Owned<Payload>>, &rcu::Guard);
    const SEARCHES: [Search; 6] = [
        |array, guard| array.iter(guard).for_each(|(_, found)| found.check()),
        |array, guard| array.marked(Mark::One, .., guard).for_each(|(_, found)| found.check()),
        |array, guard| {
            array.at_or_before(3, guard).into_iter().for_each(|(_, found)| found.check());
        },
        |array, guard| array.load(2, guard).into_iter().for_each(Payload::check),
        |array, _| _ = array.is_marked(2, Mark::One),
        |array, _| _ = array.any_marked(Mark::One),
    ];
    const ENTRIES: [(&[u64], &[u64]); 4] =
        [(&[], &[0, 2]), (&[0, 4], &[2]), (&[0, 3], &[2]), (&[0, 2], &[2])];
    for (search, (before, added)) in SEARCHES.into_iter().flat_map(|s| ENTRIES.map(|e| (s, e))) {
        model(move || {
            let array = Arc::new(XArray::<Owned<Payload>>::new());
            let store = |&index: &u64| {
                array.store(index, Owned::new(Payload::new(7))).unwrap();
                array.set_mark(index, Mark::One);
            };
            before.iter().for_each(store);
            let reader = spawn(&array, move |array| search(array, &rcu::pin()));
            for index in added {
                array.erase(*index);
                store(index);
            }
            reader.join().unwrap();
        });
    }
}

/// A search by mark sees all of the entry that replaces a marked one.
#[test]
fn a_search_by_mark_sees_the_entry_that_replaces_another() {
    thoroughly(|| {
        let array = Arc::new(XArray::<Owned<Payload>>::new());
        let store = |index| array.store(index, Owned::new(Payload::new(7))).unwrap();
        for index in [0, 2] {
            store(index);
            array.set_mark(index, Mark::One);
        }
        let reader = spawn(&array, |array| {
            array.marked(Mark::One, .., &rcu::pin()).for_each(|(_, found)| found.check());
        });
        store(2);
        assert!(array.is_marked(2, Mark::One));
        reader.join().unwrap();
    });
}

/// A thread that sees a mark, in a node or beside the root, sees what its setter did before. A search finds
/// the marked entry.
#[test]
fn a_mark_carries_what_was_done_before() {
    type Sees = fn(&XArray<Value>, u64) -> bool;
    const WAYS: [Sees; 3] = [
        |array, index| array.is_marked(index, Mark::One),
        |array, _| array.any_marked(Mark::One),
        |array, _| array.marked(Mark::One, .., &rcu::pin()).next().is_some(),
    ];
    for (last, sees) in [0, 1].into_iter().flat_map(|last| WAYS.map(|sees| (last, sees))) {
        thoroughly(move || {
            let both = Arc::new((numbers(&[0, 1][..=last as usize]), AtomicU64::new(0)));
            let reader = spawn(&both, move |(array, done)| {
                if sees(array, last) {
                    assert_eq!(done.load(Ordering::Relaxed), 1);
                }
            });
            both.1.store(1, Ordering::Relaxed);
            assert!(both.0.set_mark(last, Mark::One));
            reader.join().unwrap();
            let found = both.0.marked(Mark::One, .., &rcu::pin()).map(|(index, _)| index).next();
            assert_eq!(found, Some(last));
        });
    }
}

/// A thread that sees that a mark is gone sees what was done before it was cleared.
#[test]
fn a_cleared_mark_carries_what_was_done_before() {
    for last in [0, 1] {
        thoroughly(move || {
            let both = Arc::new((numbers(&[0, 1][..=last as usize]), AtomicU64::new(0)));
            both.0.set_mark(last, Mark::One);
            let reader = spawn(&both, move |(array, done)| {
                if !array.is_marked(last, Mark::One) {
                    assert_eq!(done.load(Ordering::Relaxed), 1);
                }
            });
            both.1.store(1, Ordering::Relaxed);
            assert!(both.0.clear_mark(last, Mark::One));
            reader.join().unwrap();
        });
    }
}

/// A reader in a node may stay there when the node leaves the tree.
#[test]
fn a_node_outlives_its_readers() {
    thoroughly(|| {
        let array = numbers(&[0, 2]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                let found = array.with(2, |found| found);
                assert!(found.is_none_or(|found| found == value(2)));
            }
        });
        array.erase(2); // removes two nodes
        rcu::poll();
        reader.join().unwrap();
    });
}

/// A reader may use an entry that was erased after the reader found it.
#[test]
fn an_erased_entry_outlives_its_readers() {
    thoroughly(|| {
        let array = Arc::new(XArray::<Owned<Payload>>::new());
        array.store(1, Owned::new(Payload::new(7))).unwrap();
        let reader = spawn(&array, |array| {
            let guard = rcu::pin();
            if let Some(found) = array.load(1, &guard).map(|payload| payload.0) {
                thread::yield_now();
                yield_often();
                assert_eq!(Payload::read(found), 7);
            }
        });
        yield_often();
        drop(array.erase(1));
        rcu::poll();
        reader.join().unwrap();
    });
}

/// The entry of index 0 moves into a node and back, and every lookup finds it.
#[test]
fn inv10_lookup_of_zero_succeeds_while_one_toggles() {
    thoroughly(|| {
        let array = numbers(&[0]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                assert_eq!(array.with(0, |found| found), Some(value(0)));
            }
        });
        for _ in 0..TIMES {
            array.store(1, value(1)).unwrap();
            array.erase(1);
        }
        reader.join().unwrap();
    });
}

/// The root becomes a child and the root again, and every lookup finds the entries below it.
#[test]
fn inv10_lookups_succeed_while_the_tree_grows_and_shrinks() {
    thoroughly(|| {
        let array = numbers(&[0, 1]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                for index in [0, 1] {
                    assert_eq!(array.with(index, |found| found), Some(value(index)));
                }
            }
        });
        for _ in 0..TIMES {
            array.store(2, value(2)).unwrap();
            array.erase(2);
        }
        reader.join().unwrap();
    });
}

/// Checks that an iteration is ascending and returns the entries that stay.
fn check_iteration(array: &XArray<Value>, stays: &[u64]) {
    let guard = rcu::pin();
    let seen: Vec<u64> = array
        .iter(&guard)
        .map(|(index, found)| {
            assert_eq!(found, value(index));
            index
        })
        .collect();
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
    for index in stays {
        assert!(seen.contains(index), "{index} in {seen:?}");
    }
}

/// The nodes of an iteration leave the tree, down to the entry in the root word.
#[test]
fn inv10_gang_lookup_against_shrink() {
    thoroughly(|| {
        let array = numbers(&[0, 1, 2, 3]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                check_iteration(array, &[0, 1]);
            }
        });
        array.erase(2);
        array.erase(3);
        for _ in (0..TIMES).skip(1) {
            array.store(3, value(3)).unwrap();
            array.erase(3);
        }
        rcu::poll();
        reader.join().unwrap();
        check_iteration(&array, &[0, 1]);
    });
}

/// The leaf that an iteration remembers leaves the tree, and the next entries are in another one.
#[test]
fn inv10_an_iteration_outlives_its_leaf() {
    thoroughly(|| {
        let array = numbers(&[0, 1]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                check_iteration(array, &[0]);
            }
        });
        for _ in 0..TIMES {
            array.erase(1);
            array.store(1, value(1)).unwrap();
        }
        rcu::poll();
        reader.join().unwrap();
        check_iteration(&array, &[0, 1]);
    });
}

/// An iteration begins under a smaller root and continues under a larger one.
#[test]
fn inv10_iterators_go_on_across_growth() {
    thoroughly(|| {
        let array = numbers(&[0, 1]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                check_iteration(array, &[0, 1]);
            }
        });
        for _ in (0..TIMES).skip(1) {
            array.store(4, value(4)).unwrap();
            array.erase(4);
        }
        array.store(4, value(4)).unwrap();
        reader.join().unwrap();
        check_iteration(&array, &[0, 1, 4]);
    });
}

/// Two allocations of the lowest index get two indexes, and neither gets a reserved one.
#[test]
fn inv08_two_allocations_share_no_index() {
    thoroughly(|| {
        let array = numbers(&[]);
        let reservation = array.reserve(1).unwrap();
        let other = spawn(&array, |array| {
            let index = array.alloc(.., value(5)).unwrap();
            assert_eq!(array.with(index, |found| found), Some(value(5)));
        });
        let index = array.alloc(.., value(6)).unwrap();
        assert_eq!(array.with(index, |found| found), Some(value(6)));
        other.join().unwrap();
        reservation.commit(value(1)).unwrap();
        let used: Vec<u64> = array.iter(&rcu::pin()).map(|(index, _)| index).collect();
        assert_eq!(used, [0, 1, 2]);
        array.validate();
    });
}
