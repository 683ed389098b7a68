//! The list against a model of sets, on one thread.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::list_ops;

use percpu_list::SlotPolicy;
use proptest::prelude::*;

use list_ops::{Step, policy_of, run_steps};

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

fn policies() -> impl Strategy<Value = SlotPolicy> {
    (0..5_u8).prop_map(policy_of)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv01_a_list_equals_its_adds_minus_its_removals(
        policy in policies(), ops in any_steps(),
    ) {
        run_steps(policy, ops.into_iter());
    }

    /// Entries are removed in every way, and others are added, mostly to another slot or list.
    #[test]
    fn inv02_an_entry_is_on_one_list_and_slot(
        policy in policies(),
        ops in steps(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18]),
    ) {
        run_steps(policy, ops.into_iter());
    }

    /// A reference, a drain and the owner remove the same entry.
    #[test]
    fn inv04_one_of_several_removals_succeeds(
        policy in policies(),
        ops in steps(&[0, 3, 7, 11, 12, 13, 14, 15, 16, 16, 18, 18, 18, 20]),
    ) {
        run_steps(policy, ops.into_iter());
    }

    /// Walks stay open while entries are removed that they have seen or are about to see.
    #[test]
    fn inv12_removals_beside_open_walks(
        policy in policies(),
        ops in steps(&[0, 7, 7, 8, 9, 15, 23, 24, 25, 26, 27, 28, 29, 21]),
    ) {
        run_steps(policy, ops.into_iter());
    }

    /// Lists are dropped with entries that are forgotten, deferred or drained.
    #[test]
    fn inv13_lists_are_dropped_with_entries_in_every_state(
        policy in policies(),
        ops in steps(&[0, 3, 7, 12, 14, 15, 16, 20, 23, 25, 30, 31]),
    ) {
        run_steps(policy, ops.into_iter());
    }

    /// The model ignores slots except for the hits; with one slot every removal is a hit.
    #[test]
    fn inv18_one_slot_behaves_as_a_plain_locked_list(ops in any_steps()) {
        run_steps(SlotPolicy::Fixed(1), ops.into_iter());
    }
}
