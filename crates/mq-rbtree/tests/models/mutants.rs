//! Every mutant must fail the model that is listed for it.

use testkit::planted::Planted;

const MUTANTS: &[(&str, &str)] = &[
    ("drop: the last handle", "closing::last_sender_closes"),
    ("last receiver: close before the drain", "closing::last_receiver_drains"),
    ("keep: the pool has room", "memory::inv05_one_of_two_unused_nodes_is_kept"),
    ("grow: the chunk is still missing", "memory::inv05_an_outdated_chunk_is_not_stored"),
    ("insert: a slot is free", "memory::inv05_an_outdated_chunk_is_not_stored"),
    ("clear: arm after the read", "readiness::inv14_message_races_clear"),
    ("unlock: signal the armed notifiers", "readiness::inv14_message_races_clear"),
    (
        "clear: come back for the stopped sender",
        "readiness::inv22_clear_comes_back_for_a_stopped_sender",
    ),
    ("publish: the message is written", "staging::inv21_a_message_is_published_with_its_send"),
    ("drain: the message is written", "staging::inv21_a_message_is_published_with_its_send"),
    ("publish: report the hole", "staging::inv21_a_send_behind_a_hole_is_drained"),
    ("publish: the holes before", "ring::inv21_a_hole_reported_by_another_sender_is_seen"),
    ("drain: a hole is waited for", "staging::inv21_a_send_behind_a_hole_is_drained"),
    (
        "receive: wait for the sender at a hole",
        "staging::inv22_a_receive_at_a_hole_ends_at_its_deadline",
    ),
    (
        "receive: a bounded wait at a hole",
        "staging::inv22_a_receive_at_a_hole_ends_at_its_deadline",
    ),
    ("receive: drain before the choice", "staging::inv21_the_highest_staged_message_is_next"),
    (
        "receive: the stored messages were sent before",
        "staging::inv21_stored_messages_are_received_before_staged_ones",
    ),
    ("room: the slots are free", "staging::inv24_a_slot_is_reused_after_its_message_was_read"),
    ("refresh: the slots are free", "staging::inv24_a_slot_is_reused_after_its_message_was_read"),
    ("refresh: for the other senders", "ring::inv24_two_senders_reuse_slots"),
    ("claim: the slot is free", "ring::inv24_two_senders_reuse_slots"),
    (
        "reopen: the slots are stamped",
        "ring::inv21_a_sender_sees_the_stamps_of_the_positions_sent_under_the_lock",
    ),
    (
        "claim: the slots are stamped",
        "ring::inv21_a_sender_sees_the_stamps_of_the_positions_sent_under_the_lock",
    ),
    ("leave: open the quiet ring only", "staging::inv22_a_waiting_receiver_gets_a_staged_message"),
    ("lock: shut the ring", "staging::inv22_a_waiting_receiver_gets_a_staged_message"),
    ("give up: open the undrained ring", "staging::inv22_receives_that_give_up_open_the_ring"),
    ("close: shut the ring", "staging::inv22_close_races_two_claims"),
    ("unlock: wake receivers for the messages", "threads::inv08_a_message_wakes_a_waiter"),
    ("unlock: wake senders for the places", "threads::inv11_room_wakes_a_waiter"),
];

/// The mutants that only loom can detect.
const LOOM_ONLY: &[&str] = &[
    "publish: the message is written",
    "drain: the message is written",
    "publish: the holes before",
    "room: the slots are free",
    "refresh: the slots are free",
    "refresh: for the other senders",
    "claim: the slot is free",
    "reopen: the slots are stamped",
    "claim: the slots are stamped",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
