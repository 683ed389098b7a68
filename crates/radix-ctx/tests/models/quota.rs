//! The limits of a table: never exceeded, and no insert is refused that fits.

use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::virtual_fence::with_membarrier;
use offlock_sync::{Arc, model, thread};
use radix_ctx::{CtxTable, InsertRefused};

use super::support::{spawn, thoroughly};

/// The planted bugs, each with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    (
        "take: what came before the removal",
        "quota::inv15_the_insert_in_its_place_sees_what_came_before_a_removal",
    ),
    (
        "give back: the number carries what came before the removal",
        "quota::inv15_the_insert_in_its_place_sees_what_came_before_a_removal",
    ),
];

/// The planted bugs that only loom can catch: shuttle returns no stale values.
pub(super) const LOOM_ONLY: &[&str] = &[
    "take: what came before the removal",
    "give back: the number carries what came before the removal",
];

/// Two inserts while one more context fits: exactly one succeeds.
#[test]
fn inv15_two_inserts_share_the_last_room() {
    thoroughly(|| {
        let table = Arc::new(CtxTable::builder().max_contexts(2).build());
        table.insert(0).unwrap();
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || table.insert(1).is_ok()
        });
        let mine = table.insert(2).is_ok();
        let theirs = other.join().unwrap();
        assert_ne!(mine, theirs, "room for one of the two");
        assert_eq!(table.len(), 2);
        let refused = table.insert(3).map_err(|error| error.reason);
        assert_eq!(refused, Err(InsertRefused::Quota { limit: 2 }));
    });
}

/// A thread removes its context and inserts another. With the context of the other thread the table never
/// has more than two, so no insert is refused.
#[test]
fn inv15_an_insert_finds_the_room_of_a_removal() {
    model(|| {
        let table = Arc::new(CtxTable::builder().max_contexts(2).build());
        let first = table.insert(0).unwrap();
        let other = spawn(&table, move |table| {
            table.remove(first).unwrap();
            table.insert(1).unwrap();
        });
        table.insert(2).unwrap();
        other.join().unwrap();
        assert_eq!(table.len(), 2);
    });
}

/// The insert that takes the place of a removed context sees what the removing thread did before. With
/// membarrier, because the fences of two guards would carry it, too.
#[test]
fn inv15_the_insert_in_its_place_sees_what_came_before_a_removal() {
    with_membarrier(insert_in_its_place_sees_what_came_before_a_removal);
}

fn insert_in_its_place_sees_what_came_before_a_removal() {
    model(|| {
        let table = Arc::new(CtxTable::builder().max_contexts(1).build());
        let first = table.insert(0).unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let other = thread::spawn({
            let (table, done) = (Arc::clone(&table), Arc::clone(&done));
            move || {
                if table.insert(1).is_ok() {
                    assert!(done.load(Ordering::Relaxed));
                }
            }
        });
        done.store(true, Ordering::Relaxed);
        table.remove(first).unwrap();
        other.join().unwrap();
    });
}
