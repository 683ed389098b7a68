//! Every planted bug must fail its model.

use testkit::planted::Planted;

use super::{quota, table, table_refs};

const PLANTED: Planted = Planted {
    mutants: &[quota::MUTANTS, table::MUTANTS, table_refs::MUTANTS],
    loom_only: &[quota::LOOM_ONLY, table::LOOM_ONLY, table_refs::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "src/tree", "tests/models"],
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
