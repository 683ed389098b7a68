//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

/// A planted bug, and the model that must fail for it.
const MUTANTS: &[(&str, &str)] = &[
    ("put: the use is done", "counts::inv07_one_of_two_puts_after_the_fold_is_the_last"),
    ("kill: the uses so far are done", "counts::inv09_a_kill_counts_what_races_with_it"),
    ("kill a count: no section still counts", "counts::inv09_a_kill_counts_what_races_with_it"),
    ("fold: no section still counts", "counts::inv09_a_kill_counts_what_races_with_it"),
    ("fold: the holders of the word", "counts::inv07_the_fold_sees_what_holders_did"),
    ("fold: only since the last fold", "counts::inv21_nothing_of_a_life_counts_in_the_next"),
    ("open a count: from zero", "counts::inv21_nothing_of_a_life_counts_in_the_next"),
    (
        "begin: the gate opens before the count",
        "counts::inv21_a_get_races_with_the_beginning_of_a_life",
    ),
    ("get a count: its gate is open", "counts::inv21_an_old_name_gets_nothing_in_the_next_life"),
    ("section: its gate is open", "counts::inv21_an_old_name_gets_nothing_in_the_next_life"),
    (
        "lock a slot: none from it on is held",
        "lglock::holders_are_refused_rather_than_left_waiting_for_each_other",
    ),
    ("reclaim: the target is completed", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("bump: before the scan", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("pin: before the reads", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("scan: the readers have left", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("unpin: the reads are done", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("pin: the reads of earlier guards are done", "rcu::a_reader_that_comes_back_has_left"),
    ("publish: the node is built", "rcu::a_new_value_is_seen_finished"),
    ("publish: the node is built", "rcu::a_value_taken_out_is_seen_finished"),
    ("pin: the unlinks before the grace period", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("bump: the unlinks", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("target: after the unlink", "rcu::a_cookie_needs_no_shared_write"),
    ("target: one more, for a bump under way", "rcu::a_cookie_needs_no_shared_write"),
    ("scan: the reads are done", "rcu::a_grace_period_of_another_thread_carries_the_reads"),
    ("free: the reads are done", "rcu::a_grace_period_of_another_thread_carries_the_reads"),
    (
        "thread exit: no guard is left",
        "rcu::inv15_a_thread_that_ends_inside_a_guard_goes_on_reading",
    ),
    ("thread exit: the slot is reset", "rcu::inv15_a_slot_goes_to_the_next_thread"),
    ("bag: take its lock", "rcu::two_threads_retire_on_one_cpu"),
    ("bag: the lists are consistent", "rcu::two_threads_retire_on_one_cpu"),
];

/// Of these, what only loom can see: weak memory, and races of plain accesses.
const LOOM_ONLY: &[&str] = &[
    "put: the use is done",
    "kill: the uses so far are done",
    "fold: the holders of the word",
    "pin: before the reads",
    "bump: before the scan",
    "scan: the readers have left",
    "unpin: the reads are done",
    "pin: the reads of earlier guards are done",
    "publish: the node is built",
    "pin: the unlinks before the grace period",
    "bump: the unlinks",
    "target: after the unlink",
    "target: one more, for a bump under way",
    "scan: the reads are done",
    "free: the reads are done",
    "thread exit: the slot is reset",
    "bag: take its lock",
    "bag: the lists are consistent",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
