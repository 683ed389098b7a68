//! Tests that set private state.

use std::sync::atomic::Ordering;

use offlock_percpu::rcu;

use crate::id::{Id, MAX_GENERATION};
use crate::slab::NotLive;
use crate::{CtxTable, LookupError};

/// The last generation that an id has room for is followed by none.
#[test]
fn inv12_the_last_generation_retires_its_index() {
    let table = CtxTable::new();
    let first = table.insert("first").unwrap();
    let neighbour = table.insert("neighbour").unwrap();
    table.remove(first).unwrap().wait().unwrap();
    let guard = rcu::pin();
    // SAFETY: the guard.
    let slab = unsafe { table.core().slabs.slab(0) }.unwrap();
    let last = MAX_GENERATION - 1;
    slab.slot(0).state.store(NotLive::vacant(last - 1, 0).bits(), Ordering::Relaxed);
    drop(guard);
    for generation in [last - 1, last] {
        let id = table.insert("one of the last").unwrap();
        assert_eq!(id, Id::new(0, generation));
        assert_eq!(table.with(id, |name| name.len()), Ok(15));
        table.remove(id).unwrap().wait().unwrap();
        assert_eq!(table.with(id, |_| ()), Err(LookupError::Stale));
        table.validate();
    }
    assert_eq!((table.stats().exhausted, table.stats().pending), (1, 0));
    assert_eq!(table.insert("elsewhere").unwrap().index(), 2);
    assert!(!table.contains(first) && table.contains(neighbour));
    // The neighbours' generations are far from it.
    table.remove(neighbour).unwrap().wait().unwrap();
    assert_eq!(table.insert("again").unwrap(), Id::new(1, 2));
    table.validate();
}
