//! What the fuzzer drives, on its corpus and on random bytes.
#![cfg(not(offlock_model))]

#[path = "../buf_ops/mod.rs"]
mod driven;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").map_or(100, |cases| cases.parse().expect("a number"))
    ))]

    #[test]
    fn inv21_random_operations_hold(input in prop::collection::vec(any::<u8>(), 0..600)) {
        driven::run(&input);
    }
}

#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/bufcache_ops");
    testkit::corpus::replay(corpus, 12, 1_000, driven::run);
}
