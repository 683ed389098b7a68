//! Each planted bug must fail a model.

use testkit::planted::Planted;

use super::{cells, owning, pool, snapshot, walk};

const PLANTED: Planted = Planted {
    mutants: &[cells::MUTANTS, owning::MUTANTS, snapshot::MUTANTS, pool::MUTANTS, walk::MUTANTS],
    loom_only: &[owning::LOOM_ONLY],
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
