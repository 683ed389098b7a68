//! Every planted bug must fail the model that is about it.

use percpu::sync::planted::Planted;

const PLANTED: Planted = Planted {
    mutants: &[&[
        ("bell-answered-after-the-reap", "pool_announces_what_a_budget_leaves"),
        ("mailbox-abandons-by-an-older-look", "remote::who_stops_waiting_leaves_nothing_behind"),
        ("mailbox-close-forgets-the-sent", "remote::closing_answers_or_refuses_every_letter"),
        (
            "mailbox-registers-by-an-older-look",
            "remote::inv06_no_wake_up_is_lost_between_the_result_and_a_poll",
        ),
        ("mailbox-rings-by-its-first-look", "remote::inv06_each_letter_is_heard_of"),
        ("mailbox-send-relaxed", "remote::inv06_each_letter_is_heard_of"),
        (
            "mailbox-wakes-before-the-result",
            "remote::inv06_no_wake_up_is_lost_between_the_result_and_parking",
        ),
        ("pool-bell-by-an-older-look", "pool_loses_no_job_and_no_wake_up"),
        ("pool-budget-hides-the-rest", "pool_announces_what_a_budget_leaves"),
        ("pool-close-wakes-one", "pool_closes_with_every_worker"),
        ("pool-leaves-jobs-behind", "pool_performs_what_is_queued_when_it_closes"),
        ("pool-notify-before-push", "pool_loses_no_job_and_no_wake_up"),
        ("pool-withdraws-by-an-older-look", "pool_withdraws_a_job_or_performs_it"),
        ("remote-bell-answered-after-the-take", "remote::inv06_each_letter_is_heard_of"),
        ("remote-last-sender-is-silent", "remote::serving_ends_with_the_last_sender"),
        ("remote-looks-for-senders-too-late", "remote::serving_takes_the_last_letter"),
        ("remote-sleeps-by-an-older-look", "remote::serving_ends_with_the_last_sender"),
        ("ring-head-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
        ("ring-release-before-read", "inv08_ring_hands_over_whole_events_and_wraps"),
        ("ring-tail-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
    ]],
    loom_only: &[&[
        "mailbox-send-relaxed",
        "ring-head-relaxed",
        "ring-release-before-read",
        "ring-tail-relaxed",
    ]],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src/backend", "src/remote", "tests/models"],
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
