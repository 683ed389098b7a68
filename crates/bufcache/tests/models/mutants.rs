//! Every planted bug must fail the model that is about it.

use percpu::sync::planted::Planted;

use super::{bare, evict, invalidate, load, place, write};

const PLANTED: Planted = Planted {
    mutants: &[
        bare::MUTANTS,
        evict::MUTANTS,
        invalidate::MUTANTS,
        load::MUTANTS,
        place::MUTANTS,
        write::MUTANTS,
    ],
    loom_only: &[bare::LOOM_ONLY, evict::LOOM_ONLY, load::LOOM_ONLY, write::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "src/cache", "src/dirty", "src/policy", "tests/models"],
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
