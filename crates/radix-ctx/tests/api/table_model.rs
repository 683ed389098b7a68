//! A `CtxTable` against a `BTreeMap`, on one thread.

use proptest::prelude::*;

use crate::support::alone;
use crate::table_ops::{self, Limits, Op};

/// Returns a configuration of `PROPTEST_CASES` cases, or of 40.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

/// Operations whose first byte is one of `kinds`, and some others.
fn ops(kinds: &'static [u8]) -> impl Strategy<Value = Vec<[u8; 4]>> {
    let some = (prop::sample::select(kinds), any::<[u8; 3]>());
    let some = some.prop_map(|(kind, [a, b, c])| [kind, a, b, c]);
    prop::collection::vec(prop_oneof![5 => some.boxed(), 1 => any::<[u8; 4]>().boxed()], 1..80)
}

fn run(limits: Limits, ops: &[[u8; 4]]) {
    table_ops::run_ops(limits, ops.iter().copied().map(Op::decode));
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv12_any_sequence_of_operations_equals_the_map(
        input in prop::collection::vec(any::<u8>(), 0..480),
    ) {
        let _alone = alone();
        table_ops::run(&input);
    }

    /// References keep indexes, and not the limit.
    #[test]
    fn inv16_the_limit_is_checked_before_the_indexes(
        contexts in 0..6_u64,
        max_index in 0..6_u32,
        ops in ops(&[0, 4, 5, 12, 13, 14, 20, 21, 22, 23]),
    ) {
        let _alone = alone();
        run(Limits { contexts: Some(contexts), max_index }, &ops);
    }

    /// Stale ids stay stale while slabs are freed and made again.
    #[test]
    fn inv12_stale_ids_stay_stale(ops in ops(&[0, 11, 11, 12, 19, 19, 20, 23, 27, 29])) {
        let _alone = alone();
        run(Limits { contexts: None, max_index: u32::MAX - 2 }, &ops);
    }

    #[test]
    fn inv08_the_lowest_index_of_a_few(
        max_index in 0..140_u32,
        ops in ops(&[0, 6, 12, 14, 15, 19, 25, 26]),
    ) {
        let _alone = alone();
        run(Limits { contexts: None, max_index }, &ops);
    }

    #[test]
    fn inv15_the_use_of_the_limit_is_the_number_of_live_contexts(
        contexts in prop::option::of(0..20_u64),
        ops in ops(&[0, 4, 5, 12, 13, 14, 15, 16, 19, 27]),
    ) {
        let _alone = alone();
        run(Limits { contexts, max_index: u32::MAX - 2 }, &ops);
    }
}

#[test]
fn every_input_of_the_corpus_holds() {
    let _alone = alone();
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/radix_ops");
    testkit::corpus::replay(corpus, 10, 300, table_ops::run);
}
