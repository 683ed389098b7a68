//! Each planted bug must fail a model.

use testkit::planted::Planted;

use super::{owning, pool, snapshot, walk};

const PLANTED: Planted = Planted {
    mutants: &[owning::MUTANTS, snapshot::MUTANTS, pool::MUTANTS, walk::MUTANTS],
    loom_only: &[owning::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
