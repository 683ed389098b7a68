//! The quota of a table: never exceeded, never refused while there is room.

use percpu::sync::{Arc, model, thread};
use radix_ctx::{CtxTable, InsertRefused};

use super::table::spawn;

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[];

/// Two inserts where there is room for one: exactly one succeeds.
#[test]
fn inv15_two_inserts_share_the_last_room() {
    model(|| {
        let table = Arc::new(CtxTable::builder().max_contexts(2).build().unwrap());
        table.insert(0).unwrap();
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || table.insert(1).is_ok()
        });
        let mine = table.insert(2).is_ok();
        let theirs = other.join().unwrap();
        assert_ne!(mine, theirs, "room for one of the two");
        assert_eq!((table.len(), table.usage().contexts), (2, 2));
        let refused = table.insert(3).map_err(|error| error.reason);
        assert_eq!(refused, Err(InsertRefused::Quota));
    });
}

/// One thread replaces its context: with the other's there are never more than two.
#[test]
fn inv15_room_that_a_removal_leaves_is_found() {
    model(|| {
        let table = Arc::new(CtxTable::builder().max_contexts(2).build().unwrap());
        let first = table.insert(0).unwrap();
        let other = spawn(&table, move |table| {
            table.remove(first).unwrap();
            table.insert(1).unwrap();
        });
        table.insert(2).unwrap();
        other.join().unwrap();
        assert_eq!((table.len(), table.usage().contexts), (2, 2));
    });
}

/// An insert that is too large for the room that is left does not keep a smaller one from it.
#[test]
fn inv15_a_refused_insert_takes_no_room_from_another() {
    model(|| {
        let table = Arc::new(CtxTable::builder().max_weight(3).build().unwrap());
        table.insert_weighted(0, 1).unwrap();
        let large = spawn(&table, |table| {
            // There are 2 left at most, and no more is taken back.
            let refused = table.insert_weighted(1, 3).map_err(|error| error.reason);
            assert_eq!(refused, Err(InsertRefused::Quota));
        });
        table.insert_weighted(2, 2).unwrap();
        large.join().unwrap();
        assert_eq!(table.usage().weight, Some(3));
    });
}
