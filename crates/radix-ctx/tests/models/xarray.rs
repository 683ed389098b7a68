//! Readers of an array, and of the tree in it, while a writer is at work.

use percpu::rcu::{self, Owned};
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::{Arc, model, thread};
use radix_ctx::xarray::{Mark, Value, XArray};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("publish: the nodes are built", "xarray::an_entry_is_seen_finished"),
    ("set a mark: what it stands for is done", "xarray::a_mark_carries_what_was_done_before"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["publish: the nodes are built", "set a mark: what it stands for is done"];

type Numbers = Arc<XArray<Value>>;

fn numbers(indices: &[u64]) -> Numbers {
    let array = XArray::new();
    for &index in indices {
        array.store(index, value(index)).unwrap();
    }
    Arc::new(array)
}

fn value(index: u64) -> Value {
    Value::new(index + 100).unwrap()
}

fn spawn<T: Send + Sync + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// How often a short thing is done that must hit another short thing: a random schedule needs some.
const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// Takes a while, so that others come in between as often as not; loom needs no help.
fn dawdle() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

/// A value whose reads the checker sees, however late: its memory is in quarantine when it is gone.
struct Payload(*mut Watched<u64>);

// SAFETY: read by all, and freed by the drop, which has it alone: that is what the models check.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Sync for Payload {}

impl Payload {
    fn new(value: u64) -> Self {
        Self(Box::into_raw(Box::new(Watched::new(value))))
    }

    /// Reads what `found` led to a while ago.
    fn read(found: *const Watched<u64>) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*found }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: ours from `into_raw`, and dropped once.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// A reader finds nothing, or all of an entry and of the nodes above it.
#[test]
fn an_entry_is_seen_finished() {
    model(|| {
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

/// Who sees the mark sees what its setter did before; who finds by it, too.
#[test]
fn a_mark_carries_what_was_done_before() {
    model(|| {
        let both = Arc::new((numbers(&[0, 1]), AtomicU64::new(0)));
        let reader = spawn(&both, |(array, done)| {
            if array.is_marked(1, Mark::One) {
                assert_eq!(done.load(Ordering::Relaxed), 1);
            }
        });
        both.1.store(1, Ordering::Relaxed);
        assert!(both.0.set_mark(1, Mark::One));
        reader.join().unwrap();
        let found = both.0.marked(Mark::One, .., &rcu::pin()).map(|(index, _)| index).next();
        assert_eq!(found, Some(1));
    });
}

/// A reader that is in a node when that dies may stay there.
#[test]
fn a_node_outlives_its_readers() {
    model(|| {
        let array = numbers(&[0, 2]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                let found = array.with(2, |found| found);
                assert!(found.is_none_or(|found| found == value(2)));
            }
        });
        array.erase(2); // two nodes less
        rcu::poll();
        reader.join().unwrap();
    });
}

/// A reader that has an entry when that is erased may go on reading it.
#[test]
fn an_erased_entry_outlives_its_readers() {
    model(|| {
        let array = Arc::new(XArray::<Owned<Payload>>::new());
        array.store(1, Owned::new(Payload::new(7))).unwrap();
        let reader = spawn(&array, |array| {
            let guard = rcu::pin();
            if let Some(found) = array.load(1, &guard).map(|payload| payload.0) {
                thread::yield_now();
                dawdle();
                assert_eq!(Payload::read(found), 7);
            }
        });
        dawdle();
        drop(array.erase(1));
        rcu::poll();
        reader.join().unwrap();
    });
}

/// The entry at 0 goes into a node and out of it; there is always one place to find it.
#[test]
fn inv10_lookup_of_zero_succeeds_while_one_toggles() {
    model(|| {
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

/// The same for a root that becomes a child, and again the root.
#[test]
fn inv10_lookups_succeed_while_the_tree_grows_and_shrinks() {
    model(|| {
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

/// Checks that what stays is seen once, and that all is ascending.
fn walk(array: &XArray<Value>, stays: &[u64]) {
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

/// A walk over nodes that die under it, down to the entry in the root word.
#[test]
fn inv10_gang_lookup_against_shrink() {
    model(|| {
        let array = numbers(&[0, 1, 2, 3]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                walk(array, &[0, 1]);
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
        walk(&array, &[0, 1]);
    });
}

/// The leaf that the walk remembers dies, and what it has not come to is in another.
#[test]
fn inv10_a_walk_outlives_the_leaf_it_is_in() {
    model(|| {
        let array = numbers(&[0, 1]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                walk(array, &[0]);
            }
        });
        for _ in 0..TIMES {
            array.erase(1);
            array.store(1, value(1)).unwrap();
        }
        rcu::poll();
        reader.join().unwrap();
        walk(&array, &[0, 1]);
    });
}

/// A walk that began under a smaller root.
#[test]
fn inv10_iterators_go_on_across_growth() {
    model(|| {
        let array = numbers(&[0, 1]);
        let reader = spawn(&array, |array| {
            for _ in 0..TIMES {
                walk(array, &[0, 1]);
            }
        });
        for _ in (0..TIMES).skip(1) {
            array.store(4, value(4)).unwrap();
            array.erase(4);
        }
        array.store(4, value(4)).unwrap();
        reader.join().unwrap();
        walk(&array, &[0, 1, 4]);
    });
}

/// Of two that want the lowest index one gets the next; what is reserved goes to neither.
#[test]
fn inv08_two_allocations_share_no_index() {
    model(|| {
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
