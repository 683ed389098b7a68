//! Cases of one thread that the steps of `table_ops` do not have.

use radix_ctx::{CtxTable, Id};

use crate::support::alone;

/// An empty slab is kept for the next insert, which uses it before another slab becomes empty. Only a slab
/// without contexts is released then.
#[test]
fn inv17_an_empty_slab_that_is_used_again_stays() {
    let _alone = alone();
    let table = CtxTable::new();
    let remove = |id| table.remove(id).unwrap().wait().unwrap();
    let below: Vec<_> = (0..64).map(|n| table.insert(n).unwrap()).collect();
    remove(table.insert(64).unwrap());
    let above = table.insert(65).unwrap();
    assert_eq!(above.index(), 64);
    below.into_iter().for_each(remove);
    assert_eq!(table.with(above, |value| *value), Ok(65));
    assert_eq!(table.stats().slabs, 2, "the slab of the context, and the empty one");
    table.validate();
}

/// The slab of index 64 is released and made again. Index 65 never had a context, so it begins with
/// generation 1.
#[test]
fn inv20_a_released_slab_charges_no_index_that_was_never_used() {
    let _alone = alone();
    let table = CtxTable::new();
    let insert = |n| {
        let id = table.insert(n).unwrap();
        (id, (id.index(), id.generation()))
    };
    let below: Vec<_> = (0..64).map(|n| insert(n).0).collect();
    let mut below = below.into_iter();
    // The lower of two empty slabs is kept, so the slab of 64 is released when another one is empty.
    let mut release = |ids: &[Id]| {
        ids.iter().for_each(|&id| _ = table.remove(id).unwrap());
        below.by_ref().for_each(|id| _ = table.remove(id).unwrap());
        table.flush().unwrap();
        assert_eq!(table.stats().slabs, 1);
        below = (0..64).map(|n| insert(n).0).collect::<Vec<_>>().into_iter();
    };
    release(&[insert(64).0]);
    let ((again, at), (fresh, beside)) = (insert(65), insert(66));
    assert_eq!((at, beside), ((64, 2), (65, 1)), "the second context of 64, the first of 65");

    // After another release 65 was used, so its id stays stale. 66 was never used.
    release(&[again, fresh]);
    assert_eq!([67, 68, 69].map(|n| insert(n).1), [(64, 3), (65, 3), (66, 1)]);
    assert!([again, fresh].iter().all(|&id| !table.contains(id)));
    table.validate();
}

#[test]
fn retain_counts_no_context_that_another_call_removes() {
    let _alone = alone();
    let table = CtxTable::new();
    (0..100).for_each(|n| _ = table.insert(n).unwrap());
    let removed = table.retain(|id, n| {
        drop(table.remove(id));
        n % 2 == 0
    });
    assert_eq!((removed, table.len()), (0, 0));
    table.flush().unwrap();
    table.validate();
}
