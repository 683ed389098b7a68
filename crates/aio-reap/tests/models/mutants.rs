//! Every planted bug must fail the model that is about it.

use percpu::sync::planted::Planted;

use super::{driver, remote};

const MUTANTS: &[(&str, &str)] = &[
    ("bell-answered-after-the-reap", "pool_announces_what_a_budget_leaves"),
    ("pool-bell-by-an-older-look", "pool_loses_no_job_and_no_wake_up"),
    ("pool-budget-hides-the-rest", "pool_announces_what_a_budget_leaves"),
    ("pool-close-wakes-one", "pool_closes_with_every_worker"),
    ("pool-leaves-jobs-behind", "pool_performs_what_is_queued_when_it_closes"),
    ("pool-notify-before-push", "pool_loses_no_job_and_no_wake_up"),
    ("pool-withdraws-by-an-older-look", "pool_withdraws_a_job_or_performs_it"),
    ("ring-head-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
    ("ring-release-before-read", "inv08_ring_hands_over_whole_events_and_wraps"),
    ("ring-tail-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
];

const LOOM_ONLY: &[&str] = &["ring-head-relaxed", "ring-release-before-read", "ring-tail-relaxed"];

const PLANTED: Planted = Planted {
    mutants: &[driver::MUTANTS, remote::MUTANTS, MUTANTS],
    loom_only: &[remote::LOOM_ONLY, LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "src/backend", "src/remote", "tests/models"],
};

#[test]
fn planted_mutants_are_caught() {
    PLANTED.assert_caught();
}

#[test]
fn a_mutant_that_does_not_exist_changes_nothing() {
    PLANTED.assert_control_passes();
}

#[test]
fn every_planted_mutant_has_a_model() {
    PLANTED.assert_listed();
}
