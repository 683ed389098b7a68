//! Every planted bug must fail the model that is about it.

use percpu::sync::planted::Planted;

const PLANTED: Planted = Planted {
    mutants: &[
        ("add-without-the-lock", "a_mutex_excludes"),
        ("condvar-notify-all-wakes-one", "notify_all_wakes_every_waiter"),
        ("condvar-notify-one-lost", "notify_one_wakes_the_waiter"),
        ("flag-set-outside-the-lock", "notify_one_wakes_the_waiter"),
        ("free-before-unlink", "a_node_unlinked_under_the_lock_may_be_freed_after_it"),
        ("mutex-try-lock-refuses", "try_lock_refuses_exactly_while_held"),
        ("put-is-relaxed", "the_last_put_frees_after_every_read"),
        ("quarantine-canary-lives", "a_double_free_is_caught"),
        ("quarantine-canary-lives", "a_use_after_free_is_caught"),
        ("reader-leaves-the-lock-early", "a_node_unlinked_under_the_lock_may_be_freed_after_it"),
    ],
    loom_only: &["put-is-relaxed"],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src/sync", "tests/models"],
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
