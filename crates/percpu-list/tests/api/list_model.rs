//! The list against a model of sets, on one thread.

use std::thread;

use proptest::prelude::*;

use crate::list_ops::{Step, run, run_steps};
use crate::no_id::take_id;

/// Runs `PROPTEST_CASES` cases, or 40.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

/// Steps whose first byte is one of `kinds`, with a few arbitrary steps among them.
fn steps(kinds: &'static [u8]) -> impl Strategy<Value = Vec<Step>> {
    let step = (prop::sample::select(kinds), any::<[u8; 3]>());
    let step = step.prop_map(|(kind, [a, b, c])| [kind, a, b, c]);
    prop::collection::vec(prop_oneof![12 => step.boxed(), 1 => any::<Step>().boxed()], 1..150)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv01_a_list_equals_its_adds_minus_its_removals(
        input in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        run(&input);
    }

    /// Entries are added on every CPU, and removed in every way.
    #[test]
    fn inv02_an_entry_is_on_one_list_and_slot(
        ops in steps(&[0, 1, 2, 3, 6, 7, 8, 9, 12, 14, 18]),
    ) {
        run_steps(ops.into_iter());
    }

    /// A reference, a drain and the owner remove the same entry.
    #[test]
    fn inv04_one_of_several_removals_succeeds(
        ops in steps(&[0, 3, 6, 7, 11, 12, 13, 14, 15, 16, 16, 18, 18, 18, 20]),
    ) {
        run_steps(ops.into_iter());
    }

    /// Snapshots on every CPU, in which each operation that would wait for them is refused.
    #[test]
    fn inv09_a_snapshot_refuses_the_locks_of_its_own_thread(
        ops in steps(&[0, 1, 6, 7, 8, 16, 20, 21, 21, 22]),
    ) {
        run_steps(ops.into_iter());
    }

    /// Blocks without entries are freed beside open walks.
    #[test]
    fn inv11_trims_beside_open_walks(
        ops in steps(&[0, 7, 7, 7, 20, 23, 24, 25, 26, 27, 29, 29, 30, 30]),
    ) {
        run_steps(ops.into_iter());
    }

    /// Walks stay open while entries are removed that they have seen or are about to see.
    #[test]
    fn inv12_removals_beside_open_walks(
        ops in steps(&[0, 7, 7, 8, 9, 15, 23, 24, 25, 26, 27, 28, 29]),
    ) {
        run_steps(ops.into_iter());
    }

    /// Lists are dropped with entries that are forgotten or drained.
    #[test]
    fn inv13_lists_are_dropped_with_entries_in_every_state(
        ops in steps(&[0, 3, 7, 12, 14, 15, 16, 20, 21, 23, 25, 30, 31]),
    ) {
        run_steps(ops.into_iter());
    }

    #[test]
    fn inv15_hits_are_counted_by_the_slot_that_an_entry_was_added_to(
        ops in steps(&[0, 0, 1, 6, 6, 8, 12, 14, 18, 20]),
    ) {
        run_steps(ops.into_iter());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))] // each case runs on a thread of its own

    /// A thread without a CPU id adds under the lock of a slot, and removes by atomic operations.
    #[test]
    fn inv02_a_thread_without_an_id_agrees_with_the_model(
        ops in steps(&[0, 1, 2, 6, 7, 8, 9, 12, 14, 16, 18, 20, 21, 23, 25, 29]),
    ) {
        let alone = thread::spawn(move || {
            take_id();
            run_steps(ops.into_iter());
        });
        alone.join().unwrap();
    }
}

#[test]
fn every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/list_ops");
    testkit::corpus::replay(corpus, 8, 400, run);
}
