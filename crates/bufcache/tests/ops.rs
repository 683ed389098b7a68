//! What the fuzzer drives, on its corpus and on random bytes.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "buf_ops/mod.rs"]
mod driven;

use std::fs;
use std::path::Path;

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
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/bufcache_ops");
    let Ok(corpus) = fs::read_dir(corpus) else { return }; // not part of a packaged crate
    let (mut inputs, mut steps) = (0, 0);
    for entry in corpus {
        let input = fs::read(entry.unwrap().path()).unwrap();
        steps += driven::run(&input);
        inputs += 1;
    }
    println!("{inputs} inputs, {steps} steps");
    assert!(inputs >= 12 && steps >= 1_000, "the corpus is gone: {inputs} inputs, {steps} steps");
}
