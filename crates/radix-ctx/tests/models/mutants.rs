//! Every planted bug must fail its model.

use testkit::planted::Planted;

use super::{quota, table, table_refs};

const PLANTED: Planted = Planted {
    mutants: &[quota::MUTANTS, table::MUTANTS, table_refs::MUTANTS],
    loom_only: &[quota::LOOM_ONLY, table::LOOM_ONLY, table_refs::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
