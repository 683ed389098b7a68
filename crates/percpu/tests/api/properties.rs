//! The steps of the fuzzer, on its corpus and on random bytes.

use std::thread;

use proptest::prelude::*;

use crate::model::{run, run_steps};
use crate::rcu::alone;
use crate::threads::take_id;

/// Steps whose first byte is one of `kinds`, with a few arbitrary steps among them.
fn steps(kinds: &'static [u8]) -> impl Strategy<Value = Vec<[u8; 4]>> {
    let step = (prop::sample::select(kinds), any::<[u8; 3]>());
    let step = step.prop_map(|(kind, [a, b, c])| [kind, a, b, c]);
    prop::collection::vec(prop_oneof![12 => step.boxed(), 1 => any::<[u8; 4]>().boxed()], 0..120)
}

fn check(steps: Vec<[u8; 4]>) {
    let _alone = alone();
    run_steps(steps);
}

proptest! {
    #[test]
    fn random_operations_agree_with_the_model(steps: Vec<[u8; 4]>) {
        check(steps);
    }

    /// A kill, and then gets and clones.
    #[test]
    fn inv08_a_killed_count_gives_no_reference(steps in steps(&[16, 16, 16, 17, 18, 19])) {
        check(steps);
    }

    #[test]
    fn inv09_gets_puts_and_a_kill_agree_with_the_model(
        steps in steps(&[16, 16, 16, 16, 16, 17, 17, 17, 17, 17, 19, 14, 14]),
    ) {
        check(steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))] // each case runs on a thread of its own

    #[test]
    fn inv09_operations_without_a_cpu_id_agree_with_the_model(
        steps in steps(&[1, 16, 16, 16, 17, 17, 17, 19, 20, 14]),
    ) {
        let without_id = thread::spawn(|| {
            take_id();
            check(steps);
        });
        without_id.join().unwrap();
    }
}

#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/percpu_ops");
    let _alone = alone();
    testkit::corpus::replay(corpus, 19, 800, run);
}
