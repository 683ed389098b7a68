//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

use super::{counter, lglock, rcu, ref_block, refcount};

const PLANTED: Planted = Planted {
    mutants: &[
        counter::MUTANTS,
        lglock::MUTANTS,
        rcu::MUTANTS,
        ref_block::MUTANTS,
        refcount::MUTANTS,
    ],
    loom_only: &[
        counter::LOOM_ONLY,
        lglock::LOOM_ONLY,
        rcu::LOOM_ONLY,
        ref_block::LOOM_ONLY,
        refcount::LOOM_ONLY,
    ],
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
