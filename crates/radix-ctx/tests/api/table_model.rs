//! A `CtxTable` against a `BTreeMap`, on one thread.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::table_ops;

use proptest::prelude::*;
use radix_ctx::{CtxTable, InsertRefused, LookupError};

use table_ops::{Limits, Op, run_ops};

/// Returns a configuration of `PROPTEST_CASES` cases, or of 40.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

fn any_op() -> BoxedStrategy<[u8; 4]> {
    any::<[u8; 4]>().boxed()
}

/// Operations whose first byte is one of `kinds`, and some others.
fn ops(kinds: &'static [u8]) -> impl Strategy<Value = Vec<[u8; 4]>> {
    let some = (prop::sample::select(kinds), any::<[u8; 3]>());
    let some = some.prop_map(|(kind, [a, b, c])| [kind, a, b, c]);
    prop::collection::vec(prop_oneof![5 => some.boxed(), 1 => any_op()], 1..120)
}

fn run(limits: Limits, ops: &[[u8; 4]]) {
    run_ops(limits, ops.iter().map(|op| Op::decode(*op, limits.max_index)));
}

const FREE: Limits =
    Limits { contexts: None, weight: None, max_index: u32::MAX - 2, generations: None };

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv12_any_sequence_of_operations_equals_the_map(
        limits in any::<[u8; 4]>(),
        ops in prop::collection::vec(any_op(), 1..120),
    ) {
        run(Limits::decode(limits), &ops);
    }

    /// Stale ids stay stale while generations run out, and while slabs are freed and made again.
    #[test]
    fn inv12_stale_ids_stay_stale(
        generations in prop::option::of(1..4_u32),
        ops in ops(&[0, 11, 11, 15, 19, 19, 20, 23, 27, 29, 7, 6]),
    ) {
        run(Limits { generations, ..FREE }, &ops);
    }

    #[test]
    fn inv08_the_lowest_or_the_next_index_of_a_few(
        max_index in 0..140_u32,
        ops in ops(&[0, 6, 8, 9, 10, 12, 14, 15, 19, 25, 26]),
    ) {
        run(Limits { max_index, ..FREE }, &ops);
    }

    #[test]
    fn inv15_the_use_of_the_limits_is_the_sum_over_live_contexts(
        contexts in prop::option::of(0..20_u64),
        weight in prop::option::of(0..300_u64),
        ops in ops(&[0, 4, 4, 5, 8, 9, 12, 13, 14, 15, 16, 19, 27]),
    ) {
        run(Limits { contexts, weight, ..FREE }, &ops);
    }
}

/// Each reason for a refusal is found before those that come later in the order of checks.
#[test]
fn inv16_size_then_quota_then_index() {
    let builder = CtxTable::builder().max_contexts(2).max_weight(10).max_index(1);
    let table = builder.generation_limit(1).build().unwrap();
    let refused = |weight| table.insert_weighted("back", weight).unwrap_err();
    let ids = [table.insert_weighted("a", 5).unwrap(), table.insert_weighted("b", 5).unwrap()];
    let too_heavy = InsertRefused::TooHeavy { weight: 11, limit: 10 };
    assert_eq!(too_heavy.to_string(), "weight 11 is above 10, the limit of all contexts together");
    assert_eq!(refused(11).reason, too_heavy); // also above the limit, and no index
    assert_eq!(refused(1).reason, InsertRefused::Quota);
    assert_eq!(table.insert_in(7..9, "back").unwrap_err().reason, InsertRefused::Quota);
    for id in ids {
        assert_eq!(table.remove(id).map(|_| ()), Ok(()));
        assert_eq!(table.remove(id).map(|_| ()), Err(LookupError::Stale));
    }
    table.flush().unwrap();
    assert_eq!(refused(11).reason, too_heavy); // also no index
    assert_eq!(refused(1).reason, InsertRefused::Exhausted { pending: 0 });
    assert_eq!(refused(1).value, "back");
    assert_eq!(table.insert_in(7..9, "back").unwrap_err().reason, InsertRefused::NoRange);
    let usage = table.usage();
    assert_eq!((usage.contexts, usage.weight), (0, Some(0)), "the use after refused inserts");
    assert_eq!(table.stats().exhausted, 2);
}

/// The removal of a context makes room for another one at once, even if a reference keeps the old one.
#[test]
fn inv15_an_insert_after_a_removal_fits() {
    let table = CtxTable::builder().max_contexts(3).max_weight(30).build().unwrap();
    let mut ids = [(); 3].map(|()| table.insert_weighted(0, 10).unwrap());
    let held = table.get_ref(ids[1]).unwrap();
    for round in 0..10_000 {
        let slot = &mut ids[round % 3];
        table.remove(*slot).unwrap();
        *slot = table.insert_weighted(round, 10).unwrap();
        assert_eq!(table.insert(0).unwrap_err().reason, InsertRefused::Quota);
    }
    assert_eq!(*held, 0);
    drop(held);
    table.flush().unwrap();
    table.validate();
}

/// `try_reserve` makes the slabs of the lowest vacant indexes, even if a higher slab has vacant slots.
#[test]
fn try_reserve_makes_the_slabs_that_inserts_would_take() {
    let table = CtxTable::builder().max_index(199).build().unwrap();
    table.insert_in(190..=190, ()).unwrap();
    table.try_reserve(100).unwrap();
    assert_eq!(table.stats().slabs, 3, "slabs of 0 to 127, and of 190");
    table.try_reserve(199).unwrap();
    assert_eq!(table.stats().slabs, 4);
    assert_eq!(table.try_reserve(200), Err(InsertRefused::Exhausted { pending: 0 }));
    table.validate();
    table.shrink_to_fit();
    assert_eq!(table.stats().slabs, 1);
    table.validate();
}
