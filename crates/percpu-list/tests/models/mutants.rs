//! Each planted bug must fail a model.

use testkit::planted::Planted;

const SAME_CPU: &str = "cells::inv07_a_walk_meets_a_removal_on_the_same_cpu";
const FIRST: &str = "cells::inv07_a_walk_meets_the_first_addition_of_a_slot";
const NEXT: &str = "cells::inv07_a_walk_meets_the_next_entry_of_a_cell";
const PINNED: &str = "cells::inv07_a_pinned_cell_is_not_reused";
const UNPINNED: &str = "cells::inv07_a_cell_is_reused_after_the_last_unpin";
const REFILL: &str = "cells::inv07_a_refill_beside_a_pinned_cell";
const FREED: &str = "cells::inv03_a_cell_that_another_cpu_freed_is_reused";
const CLOSE: &str = "lists::inv08_nothing_is_added_once_close_returned";
const UNCHANGED: &str = "snapshot::inv06_a_snapshot_does_not_change";
const ENDS: &str = "ends::inv13_a_list_ends_beside_its_entry";
const FORGOTTEN: &str = "ends::inv13_a_list_ends_beside_the_thread_of_a_forgotten_snapshot";
const COUNT: &str = "ends::inv14_a_trim_meets_a_count";
const TRIMMED: &str = "ends::inv14_a_trim_meets_a_walk";

/// Each planted bug, with a model that must fail if the bug is active.
const MUTANTS: &[(&str, &str)] = &[
    ("walk: removals see the marks", SAME_CPU),
    ("walk: removals see the marks", "cells::inv07_a_walk_meets_a_removal_on_another_cpu"),
    ("cell remove: no walk has marked the entry", SAME_CPU),
    ("claim: after the last use by a walk", SAME_CPU),
    ("unpin: after the last use", SAME_CPU),
    ("walk: the entry is still marked", "cells::inv07_a_walk_meets_a_cell_that_is_reused"),
    ("occupied: before the value is read", NEXT),
    ("occupied: before the value is read", FIRST),
    ("insert: the value is in its cell", FIRST),
    ("blocks: before a block is read", FIRST),
    ("link: the block is complete", FIRST),
    ("cell insert: the value is in its cell", NEXT),
    ("cell refill: the state is free", "cells::inv07_a_refill_meets_the_pin_of_a_stale_walk"),
    ("cell refill: held cells are not free", REFILL),
    ("cell refill: `remote` before `held`", REFILL),
    ("cell refill: after the last unpin", "cells::inv07_a_refill_beside_the_last_unpin"),
    ("unlink: hold the cell first", PINNED),
    ("learn: `remote` before `held`", PINNED),
    ("learn: after the last unpin", UNPINNED),
    ("finish: before the cell is reused", UNPINNED),
    ("cell remove: the value is out of its cell", FREED),
    ("removal: the value is out of its cell", FREED),
    (
        "removal: the value is out of its cell",
        "cells::inv03_a_marked_cell_that_another_cpu_freed_is_reused",
    ),
    ("unlink: no other removal came first", "lists::inv04_a_removal_meets_a_drain"),
    ("removal: after the last use by a walk", "lists::inv04_a_removal_meets_the_drop_of_the_entry"),
    ("close: no section is under way", CLOSE),
    ("close: no addition under a lock is under way", CLOSE),
    ("cell insert: the list is open", CLOSE),
    ("cell insert: the list is open", "snapshot::inv06_a_snapshot_does_not_grow"),
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_the_first_of_two_adds_is_seen_first"),
    ("snapshot-is-taken-slot-by-slot", "snapshot::inv06_a_removal_before_an_add_is_seen"),
    ("cell remove: there is no snapshot", UNCHANGED),
    ("snapshot: no section is under way", UNCHANGED),
    ("snapshot: no change under a lock is under way", UNCHANGED),
    ("enter: there is no snapshot", UNCHANGED),
    ("end: no section is under way", ENDS),
    ("end: no cell is left", ENDS),
    ("end: no change under a lock is under way", ENDS),
    ("release: after the last use", "ends::inv13_the_last_entry_frees_the_list"),
    ("removal: unlock before the entry ends", "ends::inv13_a_list_ends_beside_a_reference"),
    ("defer: after the last use by the entry", FORGOTTEN),
    ("defer: before the removal", FORGOTTEN),
    ("defer: the link is stored", FORGOTTEN),
    ("end: before a link is read", FORGOTTEN),
    ("deferred: before the value is dropped", FORGOTTEN),
    ("thaw: the owner last", FORGOTTEN),
    ("owner: the snapshot has ended", FORGOTTEN),
    ("trim: no thread counts", COUNT),
    ("counting: before the blocks are read", COUNT),
    ("trim: no pin is left", TRIMMED),
    ("trim: tell the open walks", TRIMMED),
];

/// The planted bugs that only loom finds. Some leak the list or free it too early, which only loom sees, or
/// weaken an ordering, which needs weak memory or a check of plain accesses. Three need a rare schedule:
/// "walk: the entry is still marked", "trim: no pin is left" and "trim: tell the open walks".
const LOOM_ONLY: &[&str] = &[
    "walk: the entry is still marked",
    "claim: after the last use by a walk",
    "unpin: after the last use",
    "occupied: before the value is read",
    "insert: the value is in its cell",
    "blocks: before a block is read",
    "link: the block is complete",
    "cell insert: the value is in its cell",
    "cell refill: `remote` before `held`",
    "cell refill: after the last unpin",
    "learn: `remote` before `held`",
    "learn: after the last unpin",
    "finish: before the cell is reused",
    "cell remove: the value is out of its cell",
    "removal: the value is out of its cell",
    "removal: after the last use by a walk",
    "end: no section is under way",
    "release: after the last use",
    "defer: after the last use by the entry",
    "defer: before the removal",
    "defer: the link is stored",
    "end: before a link is read",
    "deferred: before the value is dropped",
    "thaw: the owner last",
    "owner: the snapshot has ended",
    "counting: before the blocks are read",
    "trim: no pin is left",
    "trim: tell the open walks",
];

const PLANTED: Planted = Planted {
    mutants: &[MUTANTS],
    loom_only: &[LOOM_ONLY],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

testkit::planted_tests!(PLANTED);
