//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

/// The planted bugs by the labels of their steps, each with the model that must fail for it. Those that are for loom
/// alone are too rare in random schedules.
const MUTANTS: &[(&str, &str)] = &[
    ("publish: the bytes are there before", "load::inv13_it_is_handed_over"),
    ("protect: the slot is set before the lookup", "bare::inv06_a_slot_against_a_scan"),
    ("scan: the words are changed before", "bare::inv06_a_slot_against_a_scan"),
    ("clear: the bytes were read before", "bare::inv06_a_slot_against_a_scan"),
    ("scan: the bytes were read before", "bare::inv06_a_slot_against_a_scan"),
    ("is_left: no pin before the scan", "bare::inv06_a_pin_becomes_a_slot"),
    ("unpin: the bytes were read before", "bare::inv06_the_last_pin"),
    ("free: the key is hidden before", "bare::inv06_a_place_is_free_once_its_user_has_left"),
    (
        "free the first: the key is hidden before",
        "bare::inv06_the_first_place_of_a_bucket_is_free_once_its_user_has_left",
    ),
    ("take: the place was freed before", "bare::inv06_a_place_is_free_once_its_user_has_left"),
    ("look: the bytes are there before", "load::inv13_it_is_handed_over"),
    ("word: the load has ended before", "load::inv13_it_is_handed_over"),
    ("try_pin: the bytes are there before", "bare::inv03_a_pin_of_a_block_that_was_loaded_again"),
    ("change: the bytes were read or written before", "write::inv16_the_log_against_a_writer"),
    (
        "change: the bytes were read or written before",
        "bare::inv10_a_creator_against_an_invalidation",
    ),
    ("push: the record is built before", "bare::inv06_a_slot_against_a_scan"),
    ("records: each was built before", "bare::inv06_a_slot_against_a_scan"),
    ("release: the slots are null before", "bare::inv06_a_record_of_a_thread_that_has_ended"),
    ("claim_record: the slots were null before", "bare::inv06_a_record_of_a_thread_that_has_ended"),
    ("end: the operations come before the detach", "bare::inv23_the_last_operation"),
    ("refuse: the operations come before the detach", "bare::inv23_the_last_operation"),
    ("any: the operations come before the detach", "bare::inv23_an_operation_that_is_waited_for"),
    (
        "abandon: the device is abandoned before the look at the marks",
        "bare::inv19_the_last_handle_against_a_write_that_fails",
    ),
    (
        "is_abandoned: the mark is taken off before",
        "bare::inv19_the_last_handle_against_a_write_that_fails",
    ),
    ("sync: it has not failed", "bare::inv18_three_syncs_that_fail"),
    ("sync: nothing is lost since the caller wrote", "bare::inv20_a_sync_that_a_reset_overtakes"),
    ("forgive: the blocks are dirty before", "bare::inv24_the_end_of_a_reset"),
    ("reset: nothing is lost since it looked", "bare::inv18_a_failure_during_a_reset"),
    ("poisoned: the reset has dirtied its blocks", "bare::inv24_the_end_of_a_reset"),
    ("exclusion: no other range overlaps", "overwrite::inv15_two_bypasses"),
    ("is_left: no slot names the entry", "overwrite::inv10_a_bypass_against_a_hit"),
    ("invalidate: nothing is to be waited for", "overwrite::inv10_a_claim_against_invalidate"),
    (
        "completion: the result is stored",
        "completion::inv17_a_write_of_a_task_that_another_thread_fails",
    ),
    ("completion: wake the issuer", "completion::inv18_a_sync_that_another_thread_drops"),
    (
        "completion: wake the issuer",
        "completion::inv17_a_write_of_a_task_that_another_thread_fails",
    ),
    (
        "running: it was not woken meanwhile",
        "completion::inv17_a_write_of_a_task_that_another_thread_fails",
    ),
    ("wait: the results are stored before", "completion::inv18_a_sync_that_another_thread_drops"),
    ("group: wake the waiters", "write::inv20_a_sync_that_runs_is_not_enough"),
    ("insert: the sector is not excluded", "overwrite::inv10_a_bypass_against_a_load"),
    #[cfg(offlock_loom)]
    ("discard: wait for the load", "overwrite::inv24_a_load_after_a_discard"),
    ("exclusion: wake those who wait", "overwrite::inv10_a_bypass_against_a_load"),
    ("discard: no write or write-back runs", "overwrite::inv15_a_discard_against_write_back"),
    ("discard: no write or write-back runs", "overwrite::inv15_a_discard_against_a_writer"),
    ("wait: the load is in no engine", "engine::inv02_loads_that_are_crossed"),
    ("protect: the slot is set before the lookup", "evict::inv06_a_hit_keeps_its_buffer"),
    ("evict: scan the slots", "evict::inv06_a_hit_keeps_its_buffer"),
    #[cfg(offlock_loom)]
    ("evict: scan the slots", "evict::inv05_a_lookup_against_the_last_release"),
    #[cfg(offlock_loom)]
    ("lookup: the entry is still that of the key", "evict::inv06_a_hit_keeps_its_buffer"),
    #[cfg(offlock_loom)]
    ("evict: no pin after the scan", "evict::inv06_a_guard_becomes_a_pin"),
    ("unpin: the bytes were read before", "evict::inv06_a_pin_keeps_its_buffer"),
    ("free: OVERFLOW is the bucket's", "evict::inv04_a_block_is_found_behind_its_home"),
    ("insert: mark the home of a displaced block", "evict::inv04_a_block_is_found_behind_its_home"),
    #[cfg(offlock_loom)]
    ("enter: the block is absent", "evict::inv04_a_buffer_that_is_not_evicted_stays_the_only_one"),
    ("is_left: no slot names the entry", "evict::inv10_a_hit_keeps_what_was_invalidated"),
    #[cfg(offlock_loom)]
    ("is_left: no pin after the scan", "evict::inv10_a_guard_becomes_a_pin"),
    #[cfg(offlock_loom)]
    ("invalidate: protect the entry", "evict::inv10_an_evictor_has_it_meanwhile"),
    #[cfg(offlock_loom)]
    ("evict: the buffer is not stale", "evict::inv10_an_evictor_has_it_meanwhile"),
    ("enter: the block is absent", "load::inv02_two_misses_read_once"),
    ("load: wake those who wait", "load::inv02_two_misses_read_once"),
    ("enter: pin it for the requester", "load::inv13_what_is_being_read_ahead_is_not_evicted"),
    ("fail: wake those who wait", "load::inv12_a_failed_load_is_an_error_of_its_waiters"),
    ("unpin: it was the last pin", "load::inv12_a_failed_load_is_an_error_of_its_waiters"),
    ("evict: the buffer is clean", "write::inv15_a_writer_against_an_evictor"),
    ("write-back: the log is durable", "write::inv16_the_log_against_a_writer"),
    ("write-back: the log was flushed that far", "write::inv16_the_log_against_a_writer"),
    ("write-back: a wait has timed out", "write::inv20_a_sync_against_the_cleaner"),
    ("write through: no sector is unsynced", "write::inv20_a_durable_write_against_the_cleaner"),
    (
        "write-back: note the sectors as unsynced",
        "write::inv20_a_durable_write_against_the_cleaner",
    ),
    ("write-back: note the sectors as unsynced", "write::inv20_what_is_flushed_during_a_sync"),
    ("sync: the device is not poisoned", "write::inv18_a_sync_beside_one_that_fails"),
    ("load: wake those who wait", "task::inv02_a_task_is_woken"),
    ("enter: pin it for the requester", "task::inv02_a_requester_that_is_gone"),
    ("publish: the bytes are there before", "task::inv02_a_requester_that_is_gone"),
    ("unpin: it was the last pin", "task::inv12_a_requester_that_is_gone_of_a_load_that_fails"),
    ("load: tell of the panic", "task::inv12_a_task_is_told_of_a_load_that_panics"),
    ("pool: tell a thread", "task::inv23_calls_of_tasks"),
    ("call: wake the task", "task::inv23_calls_of_tasks"),
    ("defer: wake those who may read it", "task::inv02_a_verifier_needs_a_block_that_is_queued"),
    #[cfg(offlock_loom)]
    ("wait: the block is kept", "task::inv15_a_task_that_waits_for_a_writer"),
    ("unpin: wake the tasks that wait to write", "task::inv15_a_task_that_waits_for_a_pin"),
    ("queue: wake the next", "task::inv23_a_writer_that_is_gone_leaves_the_line"),
    ("pool: tell a thread", "task::inv12_a_task_is_told_of_a_load_that_panics"),
    ("write: the mark is set before the scan", "write::inv15_a_writer_against_a_reader"),
    ("write: no reader is left", "write::inv15_a_writer_against_a_reader"),
    ("scan by a writer: the bytes were read before", "write::inv15_a_writer_against_a_reader"),
    (
        "pin: no writer waits for the slot",
        "write::inv15_a_writer_against_a_guard_that_becomes_a_pin",
    ),
    ("write: wake the waiters", "write::inv15_a_reader_that_waits_for_a_writer_is_woken"),
    ("write: no write or write-back runs", "write::inv15_a_writer_against_the_device"),
    ("sync: ask the device", "write::inv20_a_sync_against_the_cleaner"),
    ("sync: one that runs is not enough", "write::inv20_a_sync_that_runs_is_not_enough"),
    ("reset: wait for the write-backs", "write::inv18_a_reset_against_the_cleaner"),
    ("write-back: evict the buffers next", "write::a_buffer_that_was_due_is_evicted_once_written"),
    ("write-back: the device has it", "write::inv17_a_write_that_fails"),
    ("close: refuse writers", "write::inv19_a_creator_against_a_close"),
    ("close: no thread writes the block", "write::inv19_a_writer_against_a_close"),
];

/// Of those, what only a checker of weak memory can see.
const LOOM_ONLY: &[&str] = &[
    "publish: the bytes are there before",
    "protect: the slot is set before the lookup",
    "scan: the words are changed before",
    "clear: the bytes were read before",
    "scan: the bytes were read before",
    "free: the key is hidden before",
    "free the first: the key is hidden before",
    "take: the place was freed before",
    "unpin: the bytes were read before",
    "look: the bytes are there before",
    "word: the load has ended before",
    "try_pin: the bytes are there before",
    "change: the bytes were read or written before",
    "push: the record is built before",
    "records: each was built before",
    "release: the slots are null before",
    "claim_record: the slots were null before",
    "end: the operations come before the detach",
    "refuse: the operations come before the detach",
    "any: the operations come before the detach",
    "abandon: the device is abandoned before the look at the marks",
    "is_abandoned: the mark is taken off before",
    "forgive: the blocks are dirty before",
    "poisoned: the reset has dirtied its blocks",
    "completion: the result is stored",
    "wait: the results are stored before",
    "write: the mark is set before the scan",
    "scan by a writer: the bytes were read before",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src"],
};

// Some have no model under shuttle.
testkit::planted_tests!(PLANTED, #[cfg(offlock_loom)]);
