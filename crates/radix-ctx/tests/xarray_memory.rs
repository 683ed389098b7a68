//! Arrays without memory, and the memory that arrays free. The allocator counts nodes, and can refuse.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use percpu::rcu::{self, Owned};
use radix_ctx::xarray::{
    AllocateError, CompareExchangeReason, Cycle, InsertError, Mark, ReserveError, StoreError,
    Value, XArray,
};

/// The size and the alignment of a node. No other allocation of these tests has both.
const NODE: (usize, usize) = (576, 64);

static NODES: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// The number of allocations of this thread before one fails. A negative number means that none fails.
    static LEFT: Cell<i64> = const { Cell::new(-1) };
}

struct Refusing;

// SAFETY: passes each call to the system's allocator or returns null, which an allocator may do. Never unwinds.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let left = LEFT.get();
        if left == 0 {
            return std::ptr::null_mut();
        }
        LEFT.set((left - 1).max(-1));
        if (layout.size(), layout.align()) == NODE {
            NODES.fetch_add(1, Relaxed);
        }
        // SAFETY: the caller keeps the contract of the system allocator, which is also that of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if (layout.size(), layout.align()) == NODE {
            NODES.fetch_sub(1, Relaxed);
        }
        // SAFETY: the caller keeps the contract of the system allocator, which is also that of this function.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Lets one test of this file run at a time, because each counts the nodes of the process. Makes the bag and
/// the reader's slot of this thread before.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    drop(rcu::pin());
    let array = XArray::<Value>::new();
    array.store(1, 7.into()).unwrap();
    array.erase(1);
    rcu::barrier().unwrap(); // frees the nodes of the previous test
    turn
}

/// Runs `f` with an allocator that fails after `left` allocations.
fn refusing<R>(left: i64, f: impl FnOnce() -> R) -> R {
    LEFT.set(left);
    let result = f();
    LEFT.set(-1);
    result
}

/// The visible state of an array.
#[derive(Debug, PartialEq)]
struct Snapshot {
    entries: Vec<(u64, Value)>,
    marked: Vec<u64>,
    free: Vec<Option<u64>>,
    stats: radix_ctx::xarray::Stats,
    nodes: i64,
}

fn snapshot(array: &XArray<Value>) -> Snapshot {
    array.validate();
    let guard = rcu::pin();
    Snapshot {
        entries: array.iter(&guard).collect(),
        marked: array.marked(Mark::Two, .., &guard).map(|(index, _)| index).collect(),
        free: [0, 60, 4_000].map(|from| array.next_free(from..)).to_vec(),
        stats: array.stats(),
        nodes: NODES.load(Relaxed),
    }
}

/// Arrays whose next index needs one node, several, or a new root and several.
fn arrays() -> impl Iterator<Item = (XArray<Value>, u64)> {
    const CASES: [(&[u64], u64); 8] = [
        (&[], 1),
        (&[], u64::MAX),
        (&[0], 1),
        (&[0], 4096),
        (&[0, 1, 63], 64),
        (&[0, 64], u64::MAX),
        (&[5_000], 0),
        (&[u64::MAX], 1 << 32),
    ];
    CASES.into_iter().map(|(stored, index)| {
        let array = XArray::new();
        for &key in stored {
            array.store(key, 7.into()).unwrap();
            array.set_mark(key, Mark::Two);
        }
        (array, index)
    })
}

/// Calls `f` while its first allocation fails, then its second, and so on until it succeeds. `f` returns
/// whether it failed. Checks that the failed calls changed nothing.
fn fails_cleanly(array: &XArray<Value>, mut f: impl FnMut() -> bool) {
    let before = snapshot(array);
    let mut refused = 0;
    while refusing(refused, &mut f) {
        assert_eq!(snapshot(array), before, "after {refused} allocations");
        refused += 1;
        assert!(refused < 100);
    }
    assert!(refused > 0, "the case does not allocate");
    array.validate();
}

#[test]
fn inv09_a_refused_allocation_changes_nothing() {
    let _alone = alone();
    let new = Value::from(9);
    type Case = fn(&XArray<Value>, u64) -> bool;
    let cases: [Case; 8] = [
        |array, index| array.store(index, 9.into()) == Err(StoreError::NoMemory(9.into())),
        |array, index| array.insert(index, 9.into()) == Err(InsertError::NoMemory(9.into())),
        |array, index| array.alloc(index.., 9.into()) == Err(AllocateError::NoMemory(9.into())),
        |array, index| array.reserve(index).map(|r| r.keep()) == Err(ReserveError::NoMemory),
        |array, index| {
            array.reserve_lowest(index..).map(|r| r.keep()) == Err(ReserveError::NoMemory)
        },
        |array, index| match array.insert_with(index, |_| 9.into()) {
            Ok(()) => false,
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOMEM);
                error.into_inner().is_some()
            }
        },
        |array, index| match array.compare_exchange(index, None, Some(9.into()), &rcu::pin()) {
            Ok(old) => old.is_some(),
            Err(error) => {
                assert!(matches!(error.reason, CompareExchangeReason::NoMemory));
                error.into_inner() == Some(9.into())
            }
        },
        |array, index| array.try_reserve(index..=index) == Err(StoreError::NoMemory(())),
    ];
    for case in cases {
        for (array, index) in arrays() {
            fails_cleanly(&array, || case(&array, index));
            array.release(index);
            assert_eq!(array.store(index, new).map(|_| ()), Ok(()), "the next call works");
            assert_eq!(array.load(index, &rcu::pin()), Some(new));
        }
    }
}

#[test]
fn inv09_a_refused_allocation_does_not_move_the_cycle() {
    let _alone = alone();
    for (array, index) in arrays() {
        let mut cycle = Cycle::starting_at(index);
        fails_cleanly(&array, || {
            let result = array.alloc_cyclic_by(.., &mut cycle, 9.into());
            let refused = result == Err(AllocateError::NoMemory(9.into()));
            assert_eq!(refused, cycle == Cycle::starting_at(index));
            refused
        });
    }
}

/// After a `try_reserve` a store in the range allocates nothing, whatever entries the array had.
#[test]
fn inv09_a_store_after_try_reserve_succeeds() {
    let _alone = alone();
    for (array, index) in arrays() {
        let last = index.saturating_add(200);
        array.try_reserve(index..=last).unwrap();
        refusing(0, || {
            for index in index..=last {
                array.store(index, 9.into()).unwrap();
            }
        });
        array.validate();
        array.shrink_to_fit();
        drop(array);
    }
    rcu::barrier().unwrap();
    assert_eq!(NODES.load(Relaxed), 0);
}

/// Reads, marks, replacements, removals and commits of reservations allocate nothing.
#[test]
fn operations_without_a_new_node_allocate_nothing() {
    let _alone = alone();
    for (array, index) in arrays() {
        array.store(index, 1.into()).unwrap();
        let kept = array.reserve_lowest(..).unwrap().keep();
        let left = refusing(100, || {
            let guard = rcu::pin();
            assert_eq!(array.load(index, &guard), Some(1.into()));
            assert_eq!(array.with(index, Value::get), Some(1));
            assert!(array.contains(index) && !array.contains(kept) && !array.is_empty());
            assert!(array.set_mark(index, Mark::One) && array.is_marked(index, Mark::One));
            assert_eq!(array.marked(Mark::One, .., &guard).next(), Some((index, 1.into())));
            assert!(array.clear_mark(index, Mark::One) && !array.any_marked(Mark::One));
            assert!(array.at_or_before(index, &guard).is_some());
            assert!(array.next_free(..).is_some());
            assert_eq!(array.iter(&guard).count() as u64, array.stats().entries);
            assert_eq!(array.store(index, 2.into()), Ok(Some(1.into())));
            array.compare_exchange(index, Some(2.into()), Some(3.into()), &guard).unwrap();
            assert!(!array.release(index));
            array.commit(kept, 4.into()).unwrap();
            assert_eq!(array.erase(index), Some(3.into()));
            assert!(array.erase_range(..) > 0 && array.is_empty());
            LEFT.get()
        });
        assert_eq!(left, 100, "the operations allocate nothing");
    }
}

/// A reserve that needs more memory than any machine has fails before it allocates.
#[test]
fn inv09_an_absurd_reserve_is_refused() {
    let _alone = alone();
    let array = XArray::<Value>::new();
    let (result, left) = refusing(100, || (array.try_reserve(..), LEFT.get()));
    assert_eq!((result, left), (Err(StoreError::NoMemory(())), 100), "the call allocates nothing");
}

/// Stores a range, erases half of it and then all, under a reader's guard.
#[test]
fn inv11_all_nodes_are_back_after_a_grace_period() {
    let _alone = alone();
    rcu::barrier().unwrap();
    assert_eq!(NODES.load(Relaxed), 0);
    let array = XArray::<Owned<u64>>::new();
    let guard = rcu::pin();
    for index in (0..100_000).chain([1 << 40, u64::MAX]) {
        array.store(index, Owned::new(index)).unwrap();
    }
    let full = array.stats();
    assert!(NODES.load(Relaxed) >= full.nodes as i64);
    for index in (0..100_000).step_by(2) {
        drop(array.erase(index));
    }
    array.clear();
    assert!(array.is_empty());
    assert_eq!(array.stats().nodes, 0);
    assert!(NODES.load(Relaxed) >= full.nodes as i64, "a reader may be in the nodes");
    drop(guard);
    rcu::barrier().unwrap();
    assert_eq!(NODES.load(Relaxed), 0);
}

/// Target R9: a dense entry takes 10 bytes at most, and an empty array allocates nothing.
#[test]
fn dense_entries_take_ten_bytes() {
    let _alone = alone();
    let array = XArray::<Value>::new();
    assert!(size_of_val(&array) <= 1024 && NODES.load(Relaxed) == 0);
    for entries in [65_536, 1_000_000] {
        for index in array.stats().entries..entries {
            array.alloc(.., Value::new(index).unwrap()).unwrap();
        }
        let bytes = NODES.load(Relaxed) as u64 * NODE.0 as u64;
        assert_eq!(bytes, array.stats().bytes as u64);
        assert!(bytes <= 10 * entries, "{bytes} for {entries}");
    }
}
