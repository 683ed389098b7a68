//! Both kinds of list against sets, one thread.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use crate::list_ops;

use percpu_list::SlotPolicy;
use proptest::prelude::*;

use list_ops::{Step, policy_of, run_intrusive, run_owning};

/// `PROPTEST_CASES`, or a few.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..150)
}

/// Of the steps whose first byte is in a list, with some others among them.
fn steps(whats: &'static [u8]) -> impl Strategy<Value = Vec<Step>> {
    let some = (prop::sample::select(whats), any::<[u8; 3]>());
    let some = some.prop_map(|(what, [a, b, c])| [what, a, b, c]);
    prop::collection::vec(prop_oneof![12 => some.boxed(), 1 => any::<Step>().boxed()], 1..150)
}

fn policies() -> impl Strategy<Value = SlotPolicy> {
    (0..5_u8).prop_map(policy_of)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv01_an_owning_list_equals_its_additions_less_its_removals(
        policy in policies(), ops in any_steps(),
    ) {
        run_owning(policy, ops.into_iter());
    }

    #[test]
    fn inv01_an_intrusive_list_equals_its_additions_less_its_removals(
        policy in policies(), ops in any_steps(),
    ) {
        run_intrusive(policy, ops.into_iter());
    }

    /// Many items, all ways to remove, and adding again: mostly to another slot or list.
    #[test]
    fn inv02_an_item_is_on_one_list_and_slot_at_a_time(
        policy in policies(),
        ops in steps(&[0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 16, 16]),
    ) {
        run_intrusive(policy, ops.into_iter());
    }

    /// Entries that were removed by a reference, a drain or by their owner, again and again.
    #[test]
    fn inv04_of_several_removals_one_gets_it(
        policy in policies(),
        ops in steps(&[0, 3, 7, 11, 12, 13, 14, 15, 16, 16, 18, 18, 18, 20]),
    ) {
        run_owning(policy, ops.into_iter());
    }

    /// Walks that are left open beside removals of what they see, or are about to see.
    #[test]
    fn inv12_removals_beside_open_walks_of_an_owning_list(
        policy in policies(),
        ops in steps(&[0, 7, 7, 8, 9, 15, 23, 24, 25, 26, 27, 28, 29, 21]),
    ) {
        run_owning(policy, ops.into_iter());
    }

    #[test]
    fn inv12_removals_beside_open_walks_of_an_intrusive_list(
        policy in policies(),
        ops in steps(&[0, 1, 6, 6, 7, 10, 12, 13, 15, 17, 18, 19, 23, 24, 25, 26, 27, 28]),
    ) {
        run_intrusive(policy, ops.into_iter());
    }

    /// Lists that end with entries forgotten, deferred and drained on them.
    #[test]
    fn inv13_lists_are_dropped_with_all_sorts_of_entries(
        policy in policies(),
        ops in steps(&[0, 3, 7, 12, 14, 15, 16, 20, 23, 25, 30, 31]),
    ) {
        run_owning(policy, ops.clone().into_iter());
        run_intrusive(policy, ops.into_iter());
    }

    /// The model knows nothing of slots, but for the hits: all of them, with one.
    #[test]
    fn inv18_one_slot_behaves_as_a_plain_locked_list(ops in any_steps()) {
        run_owning(SlotPolicy::Fixed(1), ops.clone().into_iter());
        run_intrusive(SlotPolicy::Fixed(1), ops.into_iter());
    }
}
