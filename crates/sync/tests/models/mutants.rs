//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

const UNLINKED: &str = "facade::a_node_unlinked_under_the_lock_may_be_freed_after_it";
const ONE_AT_A_TIME: &str = "word_lock::inv24_one_thread_at_a_time_sees_what_the_last_one_did";

/// A planted bug, and the model that must fail for it.
const MUTANTS: &[(&str, &str)] = &[
    ("heavy: a full fence", "asymmetric::inv19_one_of_two_sees_the_other"),
    ("heavy: a full fence", "asymmetric::inv19_a_reader_is_seen_or_sees_the_new_payload"),
    ("read: before the index", "asymmetric::inv19_a_reader_is_seen_or_sees_the_new_payload"),
    ("add: without the lock", "facade::a_mutex_excludes"),
    ("condvar: wake all", "facade::notify_all_wakes_every_waiter"),
    ("condvar: wake one", "facade::notify_one_wakes_the_waiter"),
    ("give: the flag is set outside the lock", "facade::notify_one_wakes_the_waiter"),
    ("free: unlink the node first", UNLINKED),
    ("futex: the condition has changed", "facade::a_futex_wakes_a_thread_that_looked_early"),
    ("futex: no change", "facade::a_futex_wakes_a_thread_that_looked_early"),
    ("futex: wake all", "facade::a_futex_wakes_all"),
    ("last put: before the free", "facade::the_last_put_frees_after_every_read"),
    ("put: after the owner's read", "facade::the_last_put_frees_after_every_read"),
    ("free: mark the node as dead", "facade::a_double_free_is_caught"),
    ("free: mark the node as dead", "facade::a_use_after_free_is_caught"),
    ("read: the lock is released early", UNLINKED),
    ("wait: until the flag is set", "facade::notify_all_wakes_every_waiter"),
    ("wait: before the second look", "wait_set::inv26_a_change_beside_the_wait_is_seen"),
    ("wake: before the look at the waiters", "wait_set::inv26_a_change_beside_the_wait_is_seen"),
    ("cancel: pass the wake-up on", "wait_set::inv27_a_cancelled_wait_passes_its_wake_up_on"),
    ("poll: pass a late wake-up on", "wait_set::inv26_a_unit_beside_a_look_wakes_another"),
    ("lock: the value", ONE_AT_A_TIME),
    ("unlock: the value", ONE_AT_A_TIME),
    ("lock: the word is free", ONE_AT_A_TIME),
    ("unlock: wake a waiter", "word_lock::inv24_three_threads_are_all_woken"),
    ("unpark: change the sequence", "word_lock::inv24_three_threads_are_all_woken"),
    ("unpark: wake a waiter", "word_lock::inv24_three_threads_are_all_woken"),
    ("unpark: before the look at the waiters", ONE_AT_A_TIME),
    ("park: before the attempt", ONE_AT_A_TIME),
];

/// Of these, what only loom can see: weak memory, and races of plain accesses.
const LOOM_ONLY: &[&str] = &[
    "heavy: a full fence",
    "read: before the index",
    "futex: the condition has changed",
    "last put: before the free",
    "put: after the owner's read",
    "wait: before the second look",
    "wake: before the look at the waiters",
    "lock: the value",
    "unlock: the value",
    "unpark: before the look at the waiters",
    "park: before the attempt",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
