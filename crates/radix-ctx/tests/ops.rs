//! The operations of the fuzz target, on its corpus and on random bytes.
#![cfg(not(offlock_model))]

#[path = "ops/mod.rs"]
mod driven;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").map_or(40, |cases| cases.parse().expect("a number"))
    ))]

    #[test]
    fn random_bytes_hold(input in prop::collection::vec(any::<u8>(), 0..400)) {
        driven::run(&input);
    }
}

#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/radix_ops");
    testkit::corpus::replay(corpus, 10, 300, driven::run);
}
