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

testkit::planted_tests!(PLANTED);
