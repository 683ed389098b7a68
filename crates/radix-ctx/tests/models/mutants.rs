//! Every planted bug must fail its model.

use testkit::planted::Planted;

const FINISHED: &str = "table::inv12_a_context_is_seen_finished";
const CALLBACK: &str = "table::a_removal_meets_the_last_callback";
const IN_PLACE: &str = "table::inv15_the_insert_in_its_place_sees_what_came_before_a_removal";
const FOLD: &str = "table_refs::inv13_the_last_put_meets_the_fold";
const TASK: &str = "table_refs::inv18_a_removal_wakes_a_task";
const BEFORE: &str = "table_refs::inv18_a_removal_carries_what_was_done_before";
const DONE: &str = "table_refs::inv14_a_removal_that_is_done_carries_the_drop";

/// The planted bugs, each with the model that must fail for it.
const MUTANTS: &[(&str, &str)] = &[
    ("publish: the nodes are built", FINISHED),
    ("insert: the value is written", FINISHED),
    ("iterate: the context is complete", "table::inv12_an_iteration_sees_finished_contexts"),
    ("reclaim: a grace period is over", "table::inv12_a_removed_context_outlives_its_readers"),
    (
        "flush: the lists still wait for the period that has ended",
        "table::inv12_a_flush_leaves_lists_of_a_later_period",
    ),
    ("insert: the spare slab is the missing one", "table::inv08_two_inserts_need_a_slab"),
    ("vacate: no slot of the slab is used", "table::inv17_an_insert_keeps_its_slab_in_the_tree"),
    ("callback: queue it for slots that were added meanwhile", CALLBACK),
    ("retire: the slot is in its list before the look for the callback", CALLBACK),
    ("callback: the flag is clear before the look at the lists", CALLBACK),
    ("take: what came before the removal", IN_PLACE),
    ("give back: the number carries what came before the removal", IN_PLACE),
    ("fold: no section still counts", FOLD),
    ("fold: no reference is left", FOLD),
    ("remove: no task waits", TASK),
    ("remove: the slot is dead before the look for tasks", TASK),
    ("removed: the mark comes before the look at the context", TASK),
    (
        "remove: the slot is dead before the look at the references",
        "table_refs::inv18_a_removal_wakes_a_task_with_the_first_reference",
    ),
    ("retire: the link carries what came before the removal", BEFORE),
    ("retire all: the link carries what came before", BEFORE),
    (
        "fold: the mark carries what came before the removal",
        "table_refs::inv18_the_fold_of_a_removal_carries_what_was_done_before",
    ),
    ("end: the state carries what came before the drop", BEFORE),
    ("kill: what came before the removal", BEFORE),
    ("is_removed: what came before the removal", BEFORE),
    ("refs: the counts are made", "table_refs::inv13_two_threads_take_the_first_references"),
    ("is_done: the drop has ended", DONE),
    ("finish: the drop has ended", DONE),
    ("remove all: the drops have ended", DONE),
];

/// The planted bugs that only loom can catch: shuttle returns no stale values, and a random schedule never
/// stops a flush for a whole reclaim by another thread, or a section for a whole grace period.
const LOOM_ONLY: &[&str] = &[
    "flush: the lists still wait for the period that has ended",
    "publish: the nodes are built",
    "insert: the value is written",
    "iterate: the context is complete",
    "reclaim: a grace period is over",
    "retire: the slot is in its list before the look for the callback",
    "callback: the flag is clear before the look at the lists",
    "take: what came before the removal",
    "give back: the number carries what came before the removal",
    "fold: no section still counts",
    "remove: the slot is dead before the look for tasks",
    "remove: the slot is dead before the look at the references",
    "removed: the mark comes before the look at the context",
    "retire: the link carries what came before the removal",
    "retire all: the link carries what came before",
    "fold: the mark carries what came before the removal",
    "end: the state carries what came before the drop",
    "kill: what came before the removal",
    "is_removed: what came before the removal",
    "refs: the counts are made",
    "is_done: the drop has ended",
    "finish: the drop has ended",
    "remove all: the drops have ended",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
