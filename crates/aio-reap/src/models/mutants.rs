//! Every planted bug must fail its model.

use testkit::planted::Planted;

use super::{driver, remote};

const MUTANTS: &[(&str, &str)] = &[
    ("notifier-cleared-after-the-reap", "pool_announces_what_a_reap_has_missed"),
    ("close: wake every worker", "pool_closes_with_every_worker"),
    ("push: wake a worker", "pool_loses_no_job_and_no_wake_up"),
    ("consume: the events are read", "inv08_ring_hands_over_whole_events_and_wraps"),
    ("consume: the events are written", "inv08_ring_hands_over_whole_events_and_wraps"),
];

const LOOM_ONLY: &[&str] = &["consume: the events are read", "consume: the events are written"];

const PLANTED: Planted = Planted {
    mutants: &[driver::MUTANTS, remote::MUTANTS, MUTANTS],
    loom_only: &[driver::LOOM_ONLY, LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src"],
};

testkit::planted_tests!(PLANTED);
