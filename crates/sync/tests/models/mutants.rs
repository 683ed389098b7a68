//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

use super::{asymmetric, facade, wait_set, word_lock};

const PLANTED: Planted = Planted {
    mutants: &[asymmetric::MUTANTS, facade::MUTANTS, wait_set::MUTANTS, word_lock::MUTANTS],
    loom_only: &[
        asymmetric::LOOM_ONLY,
        facade::LOOM_ONLY,
        wait_set::LOOM_ONLY,
        word_lock::LOOM_ONLY,
    ],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
