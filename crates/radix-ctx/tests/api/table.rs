//! A table and one thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, InsertRefused, LookupError};

use testkit::wait_until;

use crate::alone::alone;

#[test]
fn a_table_from_its_first_context_to_its_last_reference() {
    let _alone = alone();
    let table = CtxTable::new();
    let ids: Vec<_> = (0..1000).map(|i| table.insert(Arc::new(i)).unwrap()).collect();
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(id.index() as usize, i);
        assert_eq!(table.with(*id, |value| **value), Ok(i));
    }
    table.validate();
    let first = table.get_ref(ids[7]).unwrap();
    let second = first.clone();
    let guard = rcu::pin();
    assert_eq!(table.iter(&guard).count(), 1000);
    drop(guard);
    for id in &ids {
        table.remove(*id).unwrap();
        assert_eq!(table.with(*id, |value| **value), Err(LookupError::Stale));
    }
    assert_eq!(table.len(), 0);
    assert!(CtxRef::is_removed(&first));
    let vacated = table.flush().unwrap();
    assert!(vacated <= 999, "{vacated}");
    assert_eq!(table.stats().pending, 1);
    assert_eq!(**second, 7);
    drop(first);
    drop(second);
    assert_eq!(table.stats().pending, 0);
    table.validate();
    assert!(ids.iter().all(|id| table.with(*id, |_| ()) == Err(LookupError::Stale)));

    let id = table.insert(Arc::new(5)).unwrap();
    assert_eq!(id.index(), 0);
    table.remove(id).unwrap().wait().unwrap();
    assert_eq!(table.remove_all(), Ok(0));
    let kept = table.get_ref(table.insert(Arc::new(7)).unwrap()).unwrap();
    drop(table);
    assert_eq!(**kept, 7);
}

#[test]
fn inv08_a_full_table_gives_the_value_back() {
    let _alone = alone();
    let table = CtxTable::builder().max_index(3).build();
    let ids: Vec<_> = (0..4).map(|i| table.insert(i).unwrap()).collect();
    let refused = table.insert(9).unwrap_err();
    assert_eq!((refused.reason, refused.value), (InsertRefused::Exhausted { pending: 0 }, 9));
    let guard = rcu::pin(); // before the removal, so that the index does not become vacant
    let removal = table.remove(ids[2]).unwrap();
    let refused = table.insert(9).unwrap_err();
    assert_eq!(refused.reason, InsertRefused::Exhausted { pending: 1 });
    drop(guard);
    removal.wait().unwrap();
    let id = table.insert(9).unwrap();
    assert_eq!((id.index(), id.generation()), (2, 2));
}

/// `insert_ref` takes the reference before another thread can remove the context.
#[test]
fn a_context_is_inserted_with_a_reference() {
    let _alone = alone();
    let table = CtxTable::builder().max_contexts(1).build();
    let first = table.insert_ref("one".to_string()).unwrap();
    let id = CtxRef::id(&first);
    assert_eq!(table.insert_ref("two".to_string()).unwrap_err().value, "two");
    table.remove(id).unwrap();
    assert_eq!(table.flush(), Ok(0));
    assert_eq!((first.as_str(), table.stats().pending), ("one", 1));
    drop(first);
    assert_eq!(table.stats().pending, 0);
    table.validate();
    assert_eq!(table.insert_ref("two".to_string()).unwrap().as_str(), "two");
}

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
fn retain_removes_what_it_is_told_once() {
    let _alone = alone();
    let table = CtxTable::new();
    let ids: Vec<_> = (0..1000).map(|i| table.insert(i).unwrap()).collect();
    let mut seen = Vec::new();
    let removed = table.retain(|id, &i| {
        seen.push((id, i));
        i % 3 == 0
    });
    assert!(seen.iter().map(|&(id, _)| id).eq(ids.iter().copied()) && seen.len() == 1000);
    assert_eq!((removed, table.len()), (666, 334));
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(table.contains(*id), i % 3 == 0, "{id}");
    }
    // A context that another thread removes in between is not counted.
    let removed = table.retain(|id, _| {
        drop(table.remove(id));
        false
    });
    assert_eq!((removed, table.len()), (0, 0));
    table.flush().unwrap();
    table.validate();
}

/// `keep` returns, or panics. No later call of the table is needed: `retain` has told RCU of what it removed.
#[test]
fn what_retain_removed_is_dropped_by_rcu() {
    let _alone = alone();
    for panics in [false, true] {
        let table = CtxTable::new();
        let value = Arc::new(());
        (0..100).for_each(|n| _ = table.insert((n, Arc::clone(&value))).unwrap());
        let keeps = |n: i32| n % 10 == 0;
        let retain = || {
            table.retain(|_, &(n, _)| {
                assert!(!panics || n != 99, "half-way");
                keeps(n)
            })
        };
        assert_eq!(catch_unwind(AssertUnwindSafe(retain)).is_err(), panics);
        let left: Vec<i32> = table.iter(&rcu::pin()).map(|(_, &(n, _))| n).collect();
        assert!((0..100).filter(|&n| keeps(n)).all(|n| left.contains(&n)));
        assert!(left.len() < 100, "a batch was removed before the panic");
        wait_until(|| {
            rcu::poll();
            Arc::strong_count(&value) == 1 + left.len()
        });
        table.validate();
    }
}
