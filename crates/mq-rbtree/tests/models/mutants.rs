//! Every mutant must fail the model that is listed for it.

use testkit::planted::Planted;

use super::{closing, guards, memory, readiness, staging, tasks, threads};

const PLANTED: Planted = Planted {
    mutants: &[
        closing::MUTANTS,
        guards::MUTANTS,
        memory::MUTANTS,
        readiness::MUTANTS,
        staging::MUTANTS,
        tasks::MUTANTS,
        threads::MUTANTS,
    ],
    loom_only: &[staging::LOOM_ONLY, threads::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
