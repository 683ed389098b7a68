//! The list against a model of sets, on one thread.

use proptest::prelude::*;

use crate::list_ops::{Step, run_steps};

/// Runs `PROPTEST_CASES` cases, or 40.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..150)
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
    fn inv01_a_list_equals_its_adds_minus_its_removals(ops in any_steps()) {
        run_steps(ops.into_iter());
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
}
