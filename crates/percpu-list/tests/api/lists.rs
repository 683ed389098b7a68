//! The list on one thread: indexes in dense arrays, nested locks, lifetimes.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use percpu_list::{
    CpuId, Domain, Entry, InsertError, LockError, PerCpuList, Refused, SlotPolicy, Stats,
};

const CPU: CpuId = CpuId::new(0);

/// A value that counts its drop.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// The array is [A, B, C, D] and a walk has read A and B. A removal of A must not move D to its
/// index.
#[test]
fn inv11_a_removal_behind_a_walk_moves_nothing_there() {
    let names: String = ('A'..='Z').chain('a'..='z').collect();
    let list = PerCpuList::new();
    let mut entries: Vec<_> =
        names.chars().map(|name| Some(list.insert_on(CPU, name).unwrap())).collect();
    let mut walk = list.iter();
    let mut seen: String = walk.by_ref().take(2).map(|found| *found.unwrap()).collect();
    entries[0] = None;
    list.validate();
    seen.extend(walk.map(|found| *found.unwrap()));
    assert_eq!(seen, names);
}

/// The walk's last entry and its next one are removed.
#[test]
fn inv12_the_current_and_the_next_are_removed_during_a_walk() {
    let list = PerCpuList::new();
    for many in [3, 33, 65, 100] {
        let mut entries: Vec<Option<Entry<_>>> =
            (0..many).map(|n| Some(list.insert_on(CPU, Box::new(n)).unwrap())).collect();
        let mut seen = Vec::new();
        for found in list.iter() {
            let found = found.unwrap();
            entries[**found] = None;
            if let Some(next) = entries.get_mut(**found + 1) {
                *next = None;
            }
            list.validate();
            seen.push(**found); // the reference keeps it alive
        }
        // A walk takes a chunk of entries under one lock, so a removed entry of the chunk is still
        // returned.
        assert!(seen.windows(2).all(|two| two[0] < two[1]) && seen.len() >= many.div_ceil(2));
        assert!(list.is_empty());
    }
}

#[test]
fn inv10_a_list_with_a_permanent_entry_is_never_empty() {
    let list = PerCpuList::new();
    let last = CpuId::new(percpu::sync::cpu::possible() as u32 - 1);
    let _permanent = list.insert_on(last, 0).unwrap();
    thread::scope(|scope| {
        let churn = || (0..20_000).for_each(|n| drop(list.insert(n).unwrap()));
        let others = [scope.spawn(churn), scope.spawn(churn)];
        while !others.iter().all(|other| other.is_finished()) {
            assert!(!list.is_empty() && !list.is_empty());
            let stats = list.stats();
            assert!(stats.cpu_hits <= stats.node_hits && stats.node_hits <= stats.removals);
            assert!(stats.removals < stats.adds);
        }
    });
    assert_eq!(list.len(), 1);
}

#[test]
fn inv15_hits_are_counted_by_the_slot_that_an_entry_was_added_to() {
    let list = PerCpuList::new();
    let last = CpuId::new(percpu::sync::cpu::possible() as u32 - 1);
    let near = percpu::topology().node_of(last) == percpu::topology().node_of(CPU);
    assert_eq!(list.stats(), Stats::default());
    assert_eq!(list.stats().cpu_hit_percent(), 100.0);
    for n in 0..10 {
        let entry = list.insert_on(CPU, n).unwrap();
        assert!(entry.remove_on(if n < 7 { CPU } else { last }).unwrap());
    }
    let stats = list.stats();
    assert_eq!((stats.adds, stats.removals, stats.live()), (10, 10, 0));
    let misses = if last == CPU { 0 } else { 3 };
    assert_eq!(stats.cpu_hits, 10 - misses);
    assert_eq!(stats.node_hits, if near { 10 } else { 7 });
}

/// Under every slot policy, a removal by a CPU of the same node is a node hit.
#[test]
fn inv15_a_removal_on_the_same_node_is_a_hit_of_it_in_every_policy() {
    let nodes = percpu::topology().nodes().len();
    let slots = Domain::new().slots();
    for policy in [SlotPolicy::PerCpu, SlotPolicy::PerNode, SlotPolicy::Fixed(slots)] {
        let list = PerCpuList::new_in(&Domain::with_policy(policy));
        let entry = list.insert_on(CPU, 1).unwrap();
        entry.remove_on(CpuId::new(slots as u32 - 1)).unwrap();
        let stats = list.stats();
        if nodes == 1 {
            assert_eq!((stats.removals, stats.node_hits), (1, 1), "{policy:?}");
        }
        assert!(stats.cpu_hits <= stats.node_hits);
    }
}

/// Every combination of two removals of one entry.
#[test]
fn inv04_a_second_removal_returns_false() {
    let list = PerCpuList::new();
    let entry = list.insert(1).unwrap();
    let found = entry.share();
    assert_eq!([list.remove(&found), list.remove(&found)], [Ok(true), Ok(false)]);
    assert!(!entry.remove().unwrap());
    let entry = list.insert(2).unwrap();
    let found = entry.share();
    entry.defer_remove();
    assert_eq!(list.remove(&found), Ok(false), "the deferred removal was first");
    list.validate();
}

/// Each slot is locked inside a lock of itself and inside the lock of all slots, and all slots
/// inside one.
#[test]
fn inv09_a_lock_inside_itself_is_an_error_and_never_hangs() {
    let domain = Domain::new();
    let (list, other) = (PerCpuList::new_in(&domain), PerCpuList::new_in(&domain));
    let entry = Cell::new(Some(list.insert_on(CPU, 1).unwrap()));
    let refused = |n| Err::<(), _>((n, Refused::Lock(LockError::Deadlock)));
    let add = |list: &PerCpuList<i32>, n| {
        list.insert_on(CPU, n).map(drop).map_err(|InsertError { value, reason }| (value, reason))
    };
    let mut seen = 0;
    list.for_each(|_| {
        seen += 1;
        assert_eq!((add(&list, 2), add(&other, 3)), (refused(2), refused(3)));
        assert_eq!(list.lock_all().map(drop), Err(LockError::Deadlock));
        assert_eq!(other.lock_all().map(drop), Err(LockError::Deadlock));
        assert_eq!(list.for_each(|_| ()), Err(LockError::Deadlock));
        assert_eq!(list.iter().next().unwrap().map(drop), Err(LockError::Deadlock));
        assert_eq!(list.drain().next().unwrap().map(drop), Err(LockError::Deadlock));
        assert_eq!(
            (list.flush(), other.close()),
            (Err(LockError::Deadlock), Err(LockError::Deadlock))
        );
        let entry = entry.take().unwrap();
        let error = entry.remove().unwrap_err();
        assert_eq!(error.reason, LockError::Deadlock);
        let error = error.entry.into_ref().unwrap_err();
        drop(error.entry); // its removal is deferred
    })
    .unwrap();
    assert_eq!((seen, list.len()), (1, 0), "removed when the walk ended");

    let entry = list.insert_on(CPU, 4).unwrap();
    let snapshot = list.lock_all().unwrap();
    assert_eq!((add(&list, 5), list.for_each(|_| ())), (refused(5), Err(LockError::Deadlock)));
    assert_eq!(list.lock_all().map(drop), Err(LockError::Deadlock));
    drop(entry);
    assert_eq!(snapshot.iter().copied().collect::<Vec<_>>(), [4]);
    drop(snapshot);
    assert_eq!(list.len(), 0, "removed when the snapshot ended");
    assert_eq!(list.lock_all().unwrap().len(), 0);
    list.validate();
}

/// A walk that cannot lock returns its entries, then one error, and then ends, so a caller that
/// skips errors does not loop for ever. So does a drain.
#[test]
fn inv11_a_walk_ends_after_a_lock_error() {
    let list = PerCpuList::new();
    let _entries: Vec<_> = (0..100).map(|n| list.insert_on(CPU, n).unwrap()).collect();
    let mut walk = list.iter();
    let seen: Vec<i32> = walk.by_ref().take(32).map(|found| *found.unwrap()).collect();
    assert_eq!(seen, (0..32).collect::<Vec<_>>());
    let snapshot = list.lock_all().unwrap();
    assert_eq!(walk.next().unwrap().map(drop), Err(LockError::Deadlock));
    assert!(walk.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count(), snapshot.len()), (1, 1, 100));
    drop(snapshot);
    assert!(walk.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count()), (100, 100));
    list.validate();
}

/// X is added before Y, and its removal is deferred before that of Y. Every later snapshot sees
/// both removals.
#[test]
fn inv06_a_deferred_removal_is_seen_by_every_later_snapshot() {
    let list = PerCpuList::new();
    for _ in 0..100 {
        let (x, y) = (list.insert_on(CPU, 'x').unwrap(), list.insert('y').unwrap());
        y.defer_remove();
        let seen: String = list.lock_all().unwrap().iter().collect();
        assert_eq!(seen, "x");
        x.defer_remove();
        assert!(list.lock_all().unwrap().is_empty());
    }
}

/// The entries that a locked walk's own thread drops are removed at the end of the walk.
#[test]
fn inv09_entries_dropped_in_a_walk_are_removed_at_its_end() {
    let list = PerCpuList::new();
    let last = CpuId::new(list.domain().slots() as u32 - 1);
    let drops = Arc::new(AtomicUsize::new(0));
    let entries =
        || [CPU, last].map(|cpu| Some(list.insert_on(cpu, Counted(Arc::clone(&drops))).unwrap()));
    let mut all = entries();
    list.for_each(|_| all.iter_mut().for_each(|entry| drop(entry.take()))).unwrap();
    assert_eq!((list.len(), drops.load(Relaxed)), (0, 2));

    let mut all = entries();
    let snapshot = list.lock_all().unwrap();
    all.iter_mut().for_each(|entry| drop(entry.take()));
    assert_eq!((snapshot.len(), drops.load(Relaxed)), (2, 2));
    drop(snapshot);
    assert_eq!((list.len(), drops.load(Relaxed)), (0, 4));
}

/// A signal handler may end the entry that has the last `Arc` of its list, and drops nothing.
#[test]
fn inv14_a_deferred_removal_returns_the_last_reference_to_the_list() {
    let drops = Arc::new(AtomicUsize::new(0));
    let list = Arc::new(PerCpuList::new());
    let entry = list.insert_arc(Counted(Arc::clone(&drops))).unwrap();
    drop(list);
    let list = entry.defer_remove_keeping();
    assert_eq!((drops.load(Relaxed), Arc::strong_count(&list)), (0, 1));
    drop(list);
    assert_eq!(drops.load(Relaxed), 1);
}

/// A value whose drop uses its own list, in the slot that it was removed from.
struct Phoenix(Option<Arc<PerCpuList<Phoenix>>>, u32);

impl Drop for Phoenix {
    fn drop(&mut self) {
        if let Some(list) = self.0.take().filter(|_| self.1 != 0) {
            let ash = Phoenix(Some(Arc::clone(&list)), self.1 - 1);
            let ash = list.insert_on(CPU, ash).expect("no lock is held where a value is dropped");
            drop(list.lock_all().expect("nor any other"));
            drop(ash);
        }
    }
}

#[test]
fn inv09_a_value_is_dropped_after_the_unlock() {
    let list = Arc::new(PerCpuList::new());
    let add = || list.insert_on(CPU, Phoenix(Some(Arc::clone(&list)), 3)).unwrap();
    drop(add());
    drop(add().remove());
    drop(add().try_remove());
    drop(add().into_ref());
    let (one, another) = (add(), add());
    let found = one.share();
    assert_eq!(list.remove(&found), Ok(true));
    drop((found, one));
    another.defer_remove();
    list.flush().unwrap();
    add().defer_remove();
    drop(add()); // flushes
    add().defer_remove();
    drop(list.lock_all().unwrap());
    add().defer_remove();
    assert_eq!(list.iter().count(), 0);
    let entries = [add(), add()];
    assert_eq!(list.drain().count(), 2);
    drop(entries);
    add().defer_remove();
    list.for_each(|_| ()).unwrap();
    let entry = Cell::new(Some(add()));
    list.for_each(|_| drop(entry.take())).unwrap();
    list.flush().unwrap();
    assert_eq!(list.len(), 0);
    list.validate();
}

#[test]
fn inv13_a_reference_outlives_its_list() {
    let list = PerCpuList::new();
    std::mem::forget(list.insert(Box::new(1)).unwrap());
    let found = list.iter().next().unwrap().unwrap();
    drop(list);
    assert!(**found == 1 && !found.is_linked());
    assert_eq!(found.try_unwrap().map_err(|_| ()), Ok(Box::new(1)));

    let list = Arc::new(PerCpuList::new());
    let entry = list.insert_arc(Box::new(2)).unwrap();
    drop(list);
    assert!(entry.is_linked()); // the entry keeps the list alive
    let found = entry.into_ref().unwrap();
    assert_eq!(**found, 2);
}

/// A list is dropped in a locked walk of another list.
#[test]
fn inv13_a_list_is_dropped_inside_a_walk_of_another() {
    let domain = Domain::new();
    let list = PerCpuList::new_in(&domain);
    let _entry = list.insert_on(CPU, 1).unwrap();
    let other = Cell::new(Some(PerCpuList::new_in(&domain)));
    let dropped = Arc::new(());
    let inner = other.take().unwrap();
    std::mem::forget(inner.insert_on(CPU, Arc::clone(&dropped)).unwrap());
    other.set(Some(inner));
    list.for_each(|_| drop(other.take())).unwrap();
    assert_eq!(Arc::strong_count(&dropped), 1);
}

/// The slot of a CPU that does not run works like any other.
#[test]
fn inv16_entries_on_a_slot_without_threads() {
    let list = PerCpuList::new();
    let last = CpuId::new(percpu::sync::cpu::possible() as u32 - 1);
    let entry = list.insert_on(last, 7).unwrap();
    assert_eq!(list.iter().map(|found| *found.unwrap()).collect::<Vec<_>>(), [7]);
    assert_eq!(list.lock_all().unwrap().iter().copied().collect::<Vec<_>>(), [7]);
    assert_eq!((entry.slot(), entry.remove().unwrap(), list.len()), (last, true, 0));
    let beyond = CpuId::new(percpu::sync::cpu::possible() as u32);
    let error = list.insert_on(beyond, 8).unwrap_err();
    assert_eq!((error.value, error.reason), (8, Refused::Lock(LockError::NoSuchCpu(beyond))));
    let entry = list.insert(9).unwrap();
    let error = entry.remove_on(beyond).unwrap_err();
    assert!(error.reason == LockError::NoSuchCpu(beyond) && error.entry.is_linked());
}
