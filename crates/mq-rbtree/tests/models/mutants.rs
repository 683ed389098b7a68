//! Every mutant must fail the model that is listed for it.

use testkit::planted::Planted;

use super::{closing, memory, readiness, staging, threads};

const PLANTED: Planted = Planted {
    mutants: &[
        closing::MUTANTS,
        memory::MUTANTS,
        readiness::MUTANTS,
        staging::MUTANTS,
        threads::MUTANTS,
    ],
    loom_only: &[staging::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
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
