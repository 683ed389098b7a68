//! An `XArray` against a `BTreeMap`, on one thread.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::model;

use percpu::rcu::{self, Owned};
use proptest::prelude::*;
use radix_ctx::xarray::{
    AllocateError, CommitError, Cycle, InsertError, Mark, ReserveError, StoreError, Value, XArray,
};
use std::sync::Arc;

use model::{Both, Op};

fn many(of: BoxedStrategy<Op>) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(prop_oneof![2 => model::stores(), 3 => of], 1..80)
}

fn any_op() -> BoxedStrategy<Op> {
    prop_oneof![
        model::inserts(),
        model::exchanges(),
        model::allocations(),
        model::marks(),
        model::iterations(),
        model::memory(),
    ]
    .boxed()
}

/// Indexes at the limits of levels.
fn edges() -> impl Iterator<Item = u64> {
    let powers = (0..64).map(|bit| 1_u64 << bit);
    powers.chain([0, u64::MAX, u64::MAX - 1])
}

proptest! {
    #![proptest_config(model::cases())]

    #[test]
    fn inv01_any_sequence_of_operations_equals_the_map(ops in many(any_op())) {
        Both::run(&ops)?;
    }

    #[test]
    fn inv04_marks_are_of_entries_and_summed_up(ops in many(model::marks())) {
        Both::run(&ops)?;
    }

    #[test]
    fn inv05_compare_exchange_stores_on_a_match_only(ops in many(model::exchanges())) {
        Both::run(&ops)?;
    }

    #[test]
    fn inv06_iterations_neither_skip_nor_repeat(ops in many(model::iterations())) {
        Both::run(&ops)?;
    }

    #[test]
    fn inv07_reservations_are_neither_read_nor_given_away(ops in many(model::inserts())) {
        Both::run(&ops)?;
    }

    #[test]
    fn inv08_allocations_give_the_lowest_or_the_next(ops in many(model::allocations())) {
        Both::run(&ops)?;
    }

    /// Each step of an iteration returns what a search from its position returns, whatever changes between
    /// two steps.
    #[test]
    fn inv06_a_walk_goes_on_through_changes(
        ops in many(any_op()),
        from in model::keys(),
        steps in prop::collection::vec(0..3_usize, 80),
    ) {
        let mut both = Both::new();
        let array = std::sync::Arc::clone(&both.array);
        let guard = rcu::pin();
        let mut iterations = [array.range(from.., &guard), array.marked(Mark::One, .., &guard)];
        for (op, steps) in ops.iter().zip(steps) {
            both.step(op)?;
            for _ in 0..steps {
                for (iteration, mark) in iterations.iter_mut().zip([None, Some(Mark::One)]) {
                    let position = iteration.next_index();
                    let expected = position.and_then(|from| both.first(from, mark));
                    let found = iteration.next();
                    prop_assert_eq!(found, expected);
                    if let Some((index, _)) = found {
                        prop_assert_eq!(iteration.next_index(), index.checked_add(1));
                    }
                    // At the end begins a new iteration.
                    if iteration.next_index().is_none() {
                        *iteration = match mark {
                            Some(mark) => array.marked(mark, .., &guard),
                            None => array.iter(&guard),
                        };
                    }
                }
            }
        }
    }

    /// After erases in any order the array is as if the entries had never been stored.
    #[test]
    fn inv02_erased_is_never_stored(
        ops in many(any_op()),
        order in any::<prop::sample::Index>(),
    ) {
        let mut both = Both::new();
        for op in &ops {
            both.step(op)?;
        }
        let mut keys: Vec<u64> = both.model.keys().copied().collect();
        if !keys.is_empty() {
            let by = order.index(keys.len());
            keys.rotate_left(by);
        }
        for (left, key) in keys.iter().enumerate().map(|(done, key)| (keys.len() - done, key)) {
            prop_assert!(!both.array.is_empty(), "{left} left");
            both.step(&Op::Erase(*key))?;
            both.step(&Op::Release(*key))?;
        }
        prop_assert!(both.array.is_empty());
        let stats = both.array.stats();
        prop_assert_eq!((stats.nodes, stats.bytes, stats.height), (0, 0, 0));
        prop_assert_eq!(both.array.next_free(..), Some(0));
        both.compare()?;
    }
}

#[test]
fn inv01_neighbours_of_an_entry_stay_empty() {
    for index in edges() {
        let array = XArray::<Value>::new();
        array.store(index, 1.into()).unwrap();
        let guard = rcu::pin();
        for by in 1..130 {
            assert_eq!(array.load(index.wrapping_add(by), &guard), None, "{index} + {by}");
            assert_eq!(array.load(index.wrapping_sub(by), &guard), None, "{index} - {by}");
        }
        for bit in 0..64 {
            assert!(!array.contains(index ^ 1 << bit), "{index} and bit {bit}");
        }
        assert_eq!(array.iter(&guard).map(|(index, _)| index).collect::<Vec<_>>(), [index]);
        array.validate();
    }
}

/// The drop of an array drops every entry and frees every node.
#[test]
fn inv02_a_dropped_array_drops_its_entries_once() {
    let counted = Arc::new(());
    let array = XArray::<Owned<Arc<()>>>::new();
    for index in edges() {
        array.store(index, Owned::new(Arc::clone(&counted))).unwrap();
    }
    for index in edges() {
        array.reserve(index ^ 0b101).map(|reservation| reservation.keep()).ok();
    }
    let stored = array.stats().entries as usize;
    assert_eq!(Arc::strong_count(&counted), 1 + stored);
    drop(array.erase(1 << 20));
    drop(array);
    rcu::barrier().unwrap();
    assert_eq!(Arc::strong_count(&counted), 1);
}

/// An entry that is removed in any way is dropped once, and not before its reader leaves.
#[test]
fn inv02_a_removed_entry_outlives_its_readers() {
    type Array = XArray<Owned<Arc<u32>>>;
    let ways: [fn(&Array); 6] = [
        |array| drop(array.store(5, Owned::new(Arc::new(9))).unwrap()),
        |array| drop(array.erase(5)),
        |array| assert_eq!(array.erase_range(3..), 1),
        |array| assert_eq!(array.clear(), 1),
        |array| {
            let guard = rcu::pin();
            let seen = array.load(5, &guard);
            drop(array.compare_exchange(5, seen, None, &guard).unwrap());
        },
        |array| {
            let guard = rcu::pin();
            let seen = array.load(5, &guard);
            let new = Some(Owned::new(Arc::new(9)));
            assert!(array.compare_exchange(5, None, None, &guard).is_err());
            drop(array.compare_exchange(5, seen, new, &guard).unwrap());
        },
    ];
    for take_out in ways {
        let counted = Arc::new(7);
        let array = Array::new();
        array.insert(5, Owned::new(Arc::clone(&counted))).unwrap();
        let guard = rcu::pin();
        let seen = array.load(5, &guard).unwrap();
        take_out(&array);
        assert_eq!((Arc::strong_count(&counted), **seen), (2, 7));
        drop(guard);
        rcu::barrier().unwrap();
        assert_eq!(Arc::strong_count(&counted), 1);
    }
}

#[test]
fn inv03_storing_and_erasing_the_last_index_restores_the_tree() {
    let array = XArray::<Value>::new();
    for few in [0, 1, 64, 100, 5_000] {
        for index in 0..few {
            array.store(index, 1.into()).unwrap();
        }
        let before = array.stats();
        array.store(u64::MAX, 2.into()).unwrap();
        assert_eq!(array.stats().height, 11);
        array.validate();
        array.erase(u64::MAX);
        assert_eq!(array.stats(), before);
        array.validate();
    }
}

/// Each dense level takes one node per 64 indexes, and the tree shrinks back after an erase.
#[test]
fn inv03_height_is_minimal_on_the_way_down() {
    let array = XArray::<Value>::new();
    let mut before = Vec::new();
    for index in 0..4_200 {
        before.push((array.stats().nodes, array.stats().height));
        array.store(index, 0.into()).unwrap();
    }
    assert_eq!((array.stats().nodes, array.stats().height), (66 + 2 + 1, 3));
    for index in (0..4_200).rev() {
        array.erase(index);
        let stats = array.stats();
        assert_eq!((stats.nodes, stats.height), before[index as usize], "below {index}");
    }
}

#[test]
fn inv04_a_new_entry_has_no_marks_and_a_replaced_one_keeps_them() {
    let array = XArray::<Value>::new();
    for index in [0, 1, 63, 64, u64::MAX] {
        array.store(index, 1.into()).unwrap();
        assert!(array.set_mark(index, Mark::One));
        array.store(index, 2.into()).unwrap();
        assert!(array.is_marked(index, Mark::One) && !array.is_marked(index, Mark::Two));
        array.erase(index);
        assert!(!array.set_mark(index, Mark::One));
        array.store(index, 3.into()).unwrap();
        assert!(!array.is_marked(index, Mark::One), "{index}");
        assert!(!array.any_marked(Mark::One));
        array.validate();
    }
}

/// The marks of an entry in the root word are cleared when the tree has grown and becomes empty.
#[test]
fn inv04_an_empty_tree_has_no_marks_at_its_root() {
    let array = XArray::<Value>::new();
    for other in [1, 64, u64::MAX] {
        array.store(0, 1.into()).unwrap();
        array.set_mark(0, Mark::Two);
        array.store(other, 1.into()).unwrap();
        array.erase(0);
        array.erase(other);
        assert!(array.is_empty());
        assert_eq!(array.next_free(..), Some(0));
        array.store(0, 1.into()).unwrap();
        assert!(!array.is_marked(0, Mark::Two), "{other}");
        array.erase(0);
    }
}

#[test]
fn inv05_boxes_are_compared_by_address() {
    static ONE: u32 = 7;
    static OTHER: u32 = 7;
    let array = XArray::<&'static u32>::new();
    array.store(0, &ONE).unwrap();
    let guard = rcu::pin();
    let error = array.compare_exchange(0, Some(&OTHER), None, &guard).unwrap_err();
    assert_eq!((error.errno(), error.into_inner()), (libc::EAGAIN, None));
    let old = array.compare_exchange(0, Some(&ONE), Some(&OTHER), &guard).unwrap();
    assert!(std::ptr::eq(old.unwrap(), &ONE));
    assert!(std::ptr::eq(array.load(0, &guard).unwrap(), &OTHER));
}

#[test]
fn inv06_iterations_end_at_the_first_and_last_index() {
    let array = XArray::<Value>::new();
    for index in edges() {
        array.store(index, 1.into()).unwrap();
    }
    let guard = rcu::pin();
    let mut sorted: Vec<u64> = edges().collect();
    sorted.sort_unstable();
    assert_eq!(array.iter(&guard).map(|(index, _)| index).collect::<Vec<_>>(), sorted);
    for pair in sorted.windows(2) {
        assert_eq!(array.next(pair[0], &guard).unwrap().0, pair[1]);
        assert_eq!(array.prev(pair[1], &guard).unwrap().0, pair[0]);
    }
    assert_eq!(array.next(u64::MAX, &guard), None);
    assert_eq!(array.prev(0, &guard), None);
    let mut last = array.range(u64::MAX.., &guard);
    assert_eq!(last.next_index(), Some(u64::MAX));
    assert_eq!(last.next().map(|(index, _)| index), Some(u64::MAX));
    assert_eq!((last.next_index(), last.next()), (None, None));
    #[allow(clippy::reversed_empty_ranges, reason = "the test is about empty ranges")]
    let empty = array.range(5..3, &guard);
    assert_eq!((empty.next_index(), empty.count()), (None, 0));
    assert_eq!(array.range(..0, &guard).count(), 0);
}

#[test]
fn inv07_a_reservation_is_not_empty_and_reads_as_none() {
    let array = XArray::<Value>::new();
    for index in [0, 7, u64::MAX] {
        let reservation = array.reserve(index).unwrap();
        assert!(!array.is_empty());
        assert!(!array.contains(index));
        assert_eq!(array.iter(&rcu::pin()).count(), 0);
        assert_eq!(array.at_or_before(u64::MAX, &rcu::pin()), None);
        assert_eq!(array.insert(index, 1.into()), Err(InsertError::Reserved(1.into())));
        assert!(!array.set_mark(index, Mark::Zero));
        assert_eq!(array.stats().to_string().split(',').nth(1), Some(" 1 reserved"));
        drop(reservation);
        assert!(array.is_empty());
        array.store(index, 1.into()).unwrap();
        assert!(!array.release(index), "the index has an entry");
        assert!(array.contains(index));
        array.erase(index);
    }
}

/// A reservation knows only its index, so no other operation may end the reservation and leave the index to
/// another one.
#[test]
fn inv07_an_index_stays_reserved_until_its_guard_ends() {
    let array = XArray::<Value>::new();
    let mine = array.reserve(5).unwrap();
    assert_eq!(array.store(5, 1.into()), Err(StoreError::Reserved(1.into())));
    assert_eq!(array.erase(5), None);
    assert_eq!(array.erase_range(3..9), 0);
    assert_eq!(array.clear(), 0);
    assert_eq!(array.reserve(5).unwrap_err(), ReserveError::Reserved);
    assert_eq!(array.stats().reserved, 1);
    mine.commit(2.into()).unwrap();
    assert_eq!(array.erase(5), Some(2.into()));

    let kept = array.reserve(5).unwrap().keep();
    assert_eq!(array.commit(4, 3.into()), Err(CommitError::Lost(3.into())));
    array.commit(kept, 3.into()).unwrap();
    assert_eq!(array.commit(kept, 4.into()), Err(CommitError::Lost(4.into())));
    assert!(array.contains(5));
}

/// The closure of `insert_with` runs without the lock. If it panics, the index is free again.
#[test]
fn inv07_a_panic_releases_the_reservation() {
    let array = XArray::<Value>::new();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        array.insert_with(3, |_| {
            array.store(4, 1.into()).unwrap(); // the lock is free
            panic!("half-way");
        })
    }));
    assert!(caught.is_err());
    assert_eq!(array.next_free(3..), Some(3));
    assert!(array.contains(4));
    array.validate();
}

#[test]
fn inv08_a_refused_allocation_changes_nothing() {
    let array = XArray::<Value>::new();
    for index in 10..20 {
        assert_eq!(array.alloc(10..20, 1.into()), Ok(index));
    }
    let before = array.stats();
    assert_eq!(array.alloc(10..20, 1.into()), Err(AllocateError::Exhausted(1.into())));
    let mut cycle = Cycle::starting_at(15);
    let error = array.alloc_cyclic_by(10..20, &mut cycle, 1.into());
    assert_eq!(error.unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(cycle, Cycle::starting_at(15));
    assert_eq!(array.stats(), before);
    let taken = array.alloc_with(10..20, |_| -> Value { unreachable!("not called") });
    assert!(matches!(taken, Err(AllocateError::Exhausted(Some(_)))));
    assert_eq!(array.alloc(u64::MAX.., 1.into()), Ok(u64::MAX));
    assert_eq!(array.alloc(u64::MAX.., 1.into()), Err(AllocateError::Exhausted(1.into())));
}

#[test]
fn inv08_a_wrap_is_reported_once_also_after_the_largest_index() {
    let array = XArray::<Value>::new();
    let (mut cycle, mut given) = (Cycle::starting_at(u64::MAX - 1), Vec::new());
    for _ in 0..4 {
        let next = array.alloc_cyclic_by(5.., &mut cycle, 1.into()).unwrap();
        given.push((next.index, next.wrapped));
    }
    let last = u64::MAX;
    assert_eq!(given, [(last - 1, false), (last, false), (5, true), (6, false)]);
}

/// An array of `Send` and `Sync` entries is `Send` and `Sync`.
#[test]
fn arrays_are_send_and_sync() {
    fn both<T: Send + Sync>() {}
    both::<XArray<Value>>();
    both::<XArray<Owned<String>>>();
    both::<XArray<&'static u64>>();
}
