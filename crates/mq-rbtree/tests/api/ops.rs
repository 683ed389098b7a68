//! The fuzz target's operations, on its corpus and on random bytes.
#![cfg(not(offlock_model))]

use crate::mq_ops;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").map_or(100, |cases| cases.parse().expect("a number"))
    ))]

    #[test]
    fn inv17_random_bytes_lose_no_message(
        input in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        mq_ops::run(&input);
    }
}

#[test]
fn inv17_every_input_of_the_corpus_loses_no_message() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/mq_ops");
    testkit::corpus::replay(corpus, 12, 400, mq_ops::run);
}
