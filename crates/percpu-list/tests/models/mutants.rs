//! Each planted bug must fail a model.

use testkit::planted::Planted;

use super::{cells, ends, fallback, lists, snapshot};

const PLANTED: Planted = Planted {
    mutants: &[cells::MUTANTS, ends::MUTANTS, fallback::MUTANTS, lists::MUTANTS, snapshot::MUTANTS],
    loom_only: &[cells::LOOM_ONLY, ends::LOOM_ONLY, fallback::LOOM_ONLY, lists::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
