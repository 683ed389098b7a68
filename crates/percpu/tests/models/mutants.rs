//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

use super::{lglock, rcu, ref_block, refcount};

const PLANTED: Planted = Planted {
    mutants: &[lglock::MUTANTS, rcu::MUTANTS, ref_block::MUTANTS, refcount::MUTANTS],
    loom_only: &[lglock::LOOM_ONLY, rcu::LOOM_ONLY, ref_block::LOOM_ONLY, refcount::LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
